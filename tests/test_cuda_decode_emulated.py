"""The device kernels but the encoder, emulated on the host under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash

REPOSITORY = Path(__file__).parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("c++")
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-DDELTACHECK_EMULATOR",
    "-DDELTACHECK_KERNELS=kKernelsPlain",
    '-DDELTACHECK_INSTRUCTION_SET="plain"',
    f"-I{REPOSITORY / 'xla_ffi'}",
    f"-I{REPOSITORY / 'tests/emulator'}",
]
# Not for the host's encoder, which is only compared with: it would take most of the time.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
pytestmark = [
    pytest.mark.timeout(400),  # most of it is compiling
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(not (REPOSITORY / "xla_ffi").exists(), reason="needs the sources"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds a test with the kernels that it is of; the host's encoder is built once."""
    folder = tmp_path_factory.mktemp("emulated")

    def run(*arguments):
        subprocess.run([COMPILER, *FLAGS, *arguments], check=True)

    def program(name, *kernels, host=True):
        emulated = [f"tests/emulator/{name}.cc", *(f"xla_ffi/cuda/{kernel}.cu" for kernel in kernels)]
        encoder = [f"xla_ffi/encoder/{part}.cc" for part in ("kernels", "delta", "thread_pool")] if host else []
        objects = {source: folder / (Path(source).name + ".o") for source in encoder + emulated}

        def compile(source):
            if not objects[source].exists():
                sanitizers = SANITIZERS if source in emulated else []
                run(*sanitizers, "-x", "c++", "-c", REPOSITORY / source, "-o", objects[source])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compile, objects))
        run(*SANITIZERS, *objects.values(), "-pthread", "-o", folder / name)
        return folder / name

    return program


@pytest.mark.parametrize("what", ["apply", "statistics", "lattice"])
def test_the_device_gives_the_bits_of_the_host(built, what):
    subprocess.run([built(f"decode_{what}", what)], check=True, timeout=100)


def test_digests_are_those_of_xxhash_for_every_length_and_address(built, tmp_path):
    content = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "content").write_bytes(content)
    lengths = [*range(260), 511, 512, 513, *(1024 * k + d for k in (1, 2, 3, 4, 5, 8) for d in (-1, 0, 1, 7, 8, 9, 63, 64, 65))]
    lengths += [65536, 70_001]
    parts = [(length % 17, length, address) for length in lengths for address in {0, length % 8, (length * 5 + 3) % 16}]
    # Each length class of a block at every address.
    parts += [(1, length, address) for length in (240, 241, 1025, 1031, 1032, 1033, 3000) for address in range(16)]
    text = "".join(f"{start} {length} {address}\n" for start, length, address in parts)
    told = subprocess.run(
        [built("decode_digest", "digest", host=False), tmp_path / "content"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    expected = [xxhash.xxh3_128_hexdigest(content[start : start + length]) for start, length, _ in parts]
    assert told.stdout.split() == expected
