"""The encoder's threads under a sanitizer, briefly, with the plain kernels.

`make tsan` takes longer, and all kernels. `make fuzz` has the other sanitizers.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.suites import sanitized

# Two compilers beside everything else.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]


def able(flags: tuple[str, ...], folder: Path) -> bool:
    """Return whether there is a g++ whose programs run under these sanitizers."""
    if shutil.which("g++") is None:
        return False
    source, made = folder / "able.cc", folder / "able"
    source.write_text("int main() { return 0; }")
    built = subprocess.run(
        ["g++", *flags, str(source), "-o", str(made)], capture_output=True, check=False
    )
    return (
        built.returncode == 0
        and subprocess.run([made], capture_output=True, check=False).returncode == 0
    )


def test_threads_that_encode_at_once_do_not_race(tmp_path: Path) -> None:
    if not able(sanitized.THREADS, tmp_path):
        pytest.skip("no g++ with ThreadSanitizer")
    flags = (*sanitized.THREADS, *sanitized.QUICK)
    objects = sanitized.encoder(tmp_path, "g++", flags, every_level=False)
    made = sanitized.program(
        tmp_path / "stress",
        [Path(__file__).parents[1] / "suites" / "stress.cc"],
        objects,
        "g++",
        flags,
    )
    sanitized.stress(made, 1.5, ["plain"], forks_too=False)
