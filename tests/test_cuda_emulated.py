"""The CUDA kernels without a GPU: their sources run on the host, a fiber for each thread (tests/emulator), and nvcc compiles them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import cuda_budget
import pytest

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "xla_ffi"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

HOST_ENCODER = ("encoder/delta.cc", "encoder/thread_pool.cc", "encoder/kernels.cc")
PROGRAMS = {
    "emulator_test": (),
    "encode_test": ("cuda/encode.cu", *HOST_ENCODER),
}

FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DDELTACHECK_EMULATOR"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
PLAIN_KERNELS = ["-DDELTACHECK_KERNELS=kKernelsPlain", '-DDELTACHECK_INSTRUCTION_SET="plain"']


def compiled(source: Path, folder: Path) -> Path:
    """The object file of one source; the host's encoder, which is tested elsewhere, without sanitizers."""
    to = folder / f"{source.stem}.o"
    if not to.exists():
        ours = PLAIN_KERNELS if source.parent.name == "encoder" else SANITIZE
        include = [f"-I{SOURCES}", f"-I{TESTS / 'emulator'}"]
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        subprocess.run([str(COMPILER), *FLAGS, *ours, *include, *language, "-c", str(source), "-o", str(to)], check=True)
    return to


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.mark.timeout(600)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, and none of c++, g++ and clang++ is on PATH")
@pytest.mark.parametrize("program", PROGRAMS)
def test_emulated_program_finds_nothing_wrong(program: str, objects: Path) -> None:
    sources = [TESTS / "emulator" / f"{program}.cc", *(SOURCES / source for source in PROGRAMS[program])]
    parts = [str(compiled(source, objects)) for source in sources]
    subprocess.run([str(COMPILER), *SANITIZE, *parts, "-pthread", "-o", str(objects / program)], check=True)
    done = subprocess.run([str(objects / program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, and none is on PATH")
def test_kernels_compile_for_every_architecture_within_their_budget() -> None:
    sources = sorted((SOURCES / "cuda").glob("*.cu"))
    uses = cuda_budget.measured(sources)
    assert {use.architecture for use in uses} == {f"sm_{number}" for number in cuda_budget.ARCHITECTURES}
    assert [use.excess() for use in uses if use.excess()] == []


def test_budget_is_read_from_what_ptxas_says() -> None:
    report = """ptxas info    : Compiling entry function '_ZN10deltacheck6device5placeILi2EEEvNS0_3JobE' for 'sm_90'
ptxas info    : Function properties for _ZN10deltacheck6device5placeILi2EEEvNS0_3JobE
    16 bytes stack frame, 100 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 65 registers, used 1 barriers, 16 bytes cumulative stack size, 49153 bytes smem
"""
    assert cuda_budget.uses_in(report) == [cuda_budget.Use("place", "sm_90", 65, 100, 49153)]
    assert cuda_budget.uses_in(report)[0].excess() == (
        "place on sm_90: 65 registers, at most 64 are wanted, 100 bytes of spills, at most 80 are wanted, "
        "49153 bytes of shared memory, at most 49152 are wanted"
    )
    assert cuda_budget.Use("place", "sm_90", 64, 80, 49152).excess() == ""
