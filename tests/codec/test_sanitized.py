"""The encoder under sanitizers, briefly, with the plain kernels: `make fuzz` and `make tsan` take
longer and take them all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.fixture(scope="module")
def fuzzers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    if not able(sanitized.MEMORY, folder):
        pytest.skip("no g++ with AddressSanitizer")
    flags = (*sanitized.MEMORY, *sanitized.QUICK)
    return sanitized.fuzzers(
        folder, "g++", flags, sanitized.encoder(folder, "g++", flags, every_level=False)
    )


@pytest.mark.parametrize("target", sanitized.TARGETS)
def test_random_inputs_break_no_promise_and_no_bound_of_memory(
    target: str, fuzzers: dict[str, Path]
) -> None:
    command = [
        fuzzers[target],
        "--seconds",
        "2",
        "--seed",
        "7",
        "--replay",
        sanitized.CORPUS / target,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    replayed, fuzzed = (int(line.split()[0]) for line in done.stdout.splitlines())
    assert replayed == len(list((sanitized.CORPUS / target).iterdir())) > 3
    assert fuzzed > 20


@pytest.mark.parametrize(("target", "runs"), [("documents", 300), ("roots", 12)])
def test_readers_take_mutated_documents_and_roots(target: str, runs: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz.readers", target, "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr  # says the seed, and how to run it again
    assert f"{runs} inputs" in done.stdout


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
