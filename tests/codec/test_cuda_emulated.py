"""The CUDA kernels without a GPU: their sources run on the host, a fiber for each thread
(tests/emulator), and nvcc compiles them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.suites import cuda_budget, sanitized

# Most of the time is compiling.
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

KERNELS = sanitized.SOURCES / "cuda"
COMPILER = (
    os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
)
FLAGS = ("-Wno-unknown-pragmas", "-fopenmp-simd", "-ffp-contract=off", "-DDELTACHECK_EMULATOR")


class Programs:
    """Builds the tests in tests/emulator with the kernels that they are of, under the address and
    undefined-behaviour sanitizers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Not sanitized: it is only compared with, and would take most of the time.
        self._host = sanitized.encoder(
            folder, str(COMPILER), ("-fopenmp-simd", "-ffp-contract=off"), every_level=False
        )

    def built(self, name: str, kernel: str | None) -> Path:
        sources: list[str | Path] = [sanitized.TESTS / "emulator" / f"{name}.cc"]
        if kernel is not None:
            sources += ["-x", "c++", KERNELS / f"{kernel}.cu", "-x", "none"]
        flags = (*sanitized.MEMORY, *FLAGS, f"-I{sanitized.TESTS / 'emulator'}")
        return sanitized.program(self._folder / name, sources, self._host, str(COMPILER), flags)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("emulated"))


@pytest.mark.skipif(
    COMPILER is None, reason="needs a C++ compiler, and none of c++, g++ and clang++ is on PATH"
)
class TestEmulated:
    @pytest.mark.parametrize(
        ("name", "kernel"),
        [
            ("emulator_test", None),
            ("encode_test", "encode"),
        ],
    )
    def test_the_device_gives_the_bits_of_the_host(
        self, name: str, kernel: str | None, programs: Programs
    ) -> None:
        done = subprocess.run(
            [programs.built(name, kernel)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def test_digests_are_those_of_xxhash_for_every_length_and_address(
        self, programs: Programs, tmp_path: Path
    ) -> None:
        content = np.random.default_rng(0).bytes(100_000)
        (tmp_path / "content").write_bytes(content)
        lengths = [*range(260), 511, 512, 513]
        lengths += [
            1024 * k + d for k in (1, 2, 3, 4, 5, 8) for d in (-1, 0, 1, 7, 8, 9, 63, 64, 65)
        ]
        lengths += [65536, 70_001]
        parts = [
            (length % 17, length, address)
            for length in lengths
            for address in {0, length % 8, (length * 5 + 3) % 16}
        ]
        # Each length class of a block at every address.
        parts += [
            (1, length, address)
            for length in (240, 241, 1025, 1031, 1032, 1033, 3000)
            for address in range(16)
        ]
        told = subprocess.run(
            [programs.built("decode_digest", "digest"), tmp_path / "content"],
            input="".join(f"{start} {length} {address}\n" for start, length, address in parts),
            capture_output=True,
            text=True,
            check=True,
        )
        expected = [
            xxhash.xxh3_128_hexdigest(content[start : start + length]) for start, length, _ in parts
        ]
        assert told.stdout.split() == expected


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, and none is on PATH")
def test_kernels_compile_for_every_architecture_within_their_budget() -> None:
    uses = cuda_budget.measured(sorted(KERNELS.glob("*.cu")))
    assert {use.architecture for use in uses} == {
        f"sm_{number}" for number in cuda_budget.ARCHITECTURES
    }
    assert [use.excess() for use in uses if use.excess()] == []


def test_budget_is_read_from_what_ptxas_says() -> None:
    kernel = "_ZN10deltacheck6device5placeILi2EEEvNS0_3JobE"
    report = f"""ptxas info    : Compiling entry function '{kernel}' for 'sm_90'
ptxas info    : Function properties for _ZN10deltacheck6device5placeILi2EEEvNS0_3JobE
    16 bytes stack frame, 100 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 65 registers, used 1 barriers, 16 bytes cumulative stack size, 49153 bytes smem
"""
    assert cuda_budget.uses_in(report) == [cuda_budget.Use("place", "sm_90", 65, 100, 49153)]
    assert (
        cuda_budget.uses_in(report)[0].excess()
        == "place on sm_90: 65 registers, at most 64 are wanted, 100 bytes of spills, at most 96"
        " are wanted, 49153 bytes of shared memory, at most 49152 are wanted"
    )
    assert cuda_budget.Use("place", "sm_90", 64, 96, 49152).excess() == ""
