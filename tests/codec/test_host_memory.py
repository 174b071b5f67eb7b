"""Large buffers return to the system when they are freed, whatever the allocator keeps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from deltacheck.codec import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux only")

# glibc takes requests of 2 MiB from its heap once a larger mapping was freed, and the small
# allocations keep each of them from the end of the heap.
_FREE_BETWEEN_PINS = """
import numpy as np
from pathlib import Path
from deltacheck.codec import memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

source = np.ones(2 << 20, np.uint8)
del_me = np.ones(30 << 20, np.uint8)
del del_me
buffers, pins = [], []
for _ in range(32):
    buffers.append(memory.copied(source, None))
    pins.append(np.ones(64 << 10, np.uint8))
before = resident()
buffers.clear()
print(before - resident())
"""


_WRITE_IN_A_CHILD = """
import os
from deltacheck.codec import host_memory

buffer = host_memory.empty(host_memory.LEAST_MAPPED_BYTES)
buffer[:] = 1
child = os.fork()
if child == 0:
    buffer[:] = 2
    os._exit(0)
os.waitpid(child, 0)
print(buffer.max())
"""


def printed_by(code: str) -> int:
    """Run code in a process of its own, which has no threads, and return what it prints."""
    return int(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def test_freed_copies_leave_the_process() -> None:
    assert printed_by(_FREE_BETWEEN_PINS) > 32 << 20  # of 64 MiB


def test_a_forked_child_does_not_write_to_the_memory() -> None:
    assert printed_by(_WRITE_IN_A_CHILD) == 1


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (4 << 20) + 3])
def test_a_copy_has_the_content_and_is_writable(size: int) -> None:
    source = np.arange(size, dtype=np.uint32).astype(np.uint8)
    copy = memory.copied(source, None)
    assert np.array_equal(copy, source)
    assert copy.flags.writeable
    assert not np.shares_memory(copy, source)
