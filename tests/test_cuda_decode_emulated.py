"""The device kernels but the encoder, emulated on the host under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from test_cuda_emulated import COMPILER, HOST_ENCODER, SANITIZE, SOURCES, TESTS, compiled

pytestmark = [
    pytest.mark.timeout(600),  # most of it is compiling
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, and none of c++, g++ and clang++ is on PATH"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the test of a kernel; the host's encoder is built once."""
    folder = tmp_path_factory.mktemp("objects")

    def program(kernel: str, *others: str) -> Path:
        target = folder / f"decode_{kernel}"
        sources = [TESTS / "emulator" / f"{target.name}.cc", *(SOURCES / source for source in (f"cuda/{kernel}.cu", *others))]
        objects = [str(compiled(source, folder)) for source in sources]
        subprocess.run([str(COMPILER), *SANITIZE, *objects, "-pthread", "-o", str(target)], check=True)
        return target

    return program


@pytest.mark.parametrize("what", ["apply", "statistics", "lattice"])
def test_the_device_gives_the_bits_of_the_host(built: Callable[..., Path], what: str) -> None:
    done = subprocess.run([built(what, *HOST_ENCODER)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_digests_are_those_of_xxhash_for_every_length_and_address(built: Callable[..., Path], tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "content").write_bytes(content)
    lengths = [*range(260), 511, 512, 513, *(1024 * k + d for k in (1, 2, 3, 4, 5, 8) for d in (-1, 0, 1, 7, 8, 9, 63, 64, 65))]
    lengths += [65536, 70_001]
    parts = [(length % 17, length, address) for length in lengths for address in {0, length % 8, (length * 5 + 3) % 16}]
    # Each length class of a block at every address.
    parts += [(1, length, address) for length in (240, 241, 1025, 1031, 1032, 1033, 3000) for address in range(16)]
    text = "".join(f"{start} {length} {address}\n" for start, length, address in parts)
    told = subprocess.run(
        [built("digest"), tmp_path / "content"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = [xxhash.xxh3_128_hexdigest(content[start : start + length]) for start, length, _ in parts]
    assert told.returncode == 0, told.stderr
    assert told.stdout.split() == expected
