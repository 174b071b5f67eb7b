"""Large buffers return to the system when they are freed, whatever the allocator keeps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from deltacheck.codec import memory
from deltacheck.codec.extension import native

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


# Up to 1 MiB is copied under the lock of the interpreter, more without it.
@pytest.mark.parametrize("large", [9, 1 << 20])
def test_leaves_are_copied_to_their_offsets(large: int) -> None:
    sources = [np.full(size, size % 251, np.uint8) for size in (3, large)]
    addresses = np.array([sources[0].ctypes.data, 0, sources[1].ctypes.data], np.uint64)
    sizes, offsets = np.array([3, 0, large], np.uint64), np.array([1, 4, 5], np.uint64)
    out = np.zeros(large + 6, np.uint8)
    native.copy_leaves(addresses, sizes, offsets, out)
    assert np.array_equal(out, np.concatenate(([0], sources[0], [0], sources[1], [0])))


@pytest.mark.parametrize(
    ("sizes", "offsets", "problem"),
    [([4], [5], "fit"), ([1], [9], "fit"), ([2**64 - 1], [2], "fit"), ([1, 1], [0], "one entry")],
)
def test_a_copy_outside_the_memory_is_refused(
    sizes: list[int], offsets: list[int], problem: str
) -> None:
    source, out = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    arrays = (np.array(numbers, np.uint64) for numbers in ([source.ctypes.data], sizes, offsets))
    with pytest.raises(ValueError, match=problem):
        native.copy_leaves(*arrays, out)
    assert not out.any()
