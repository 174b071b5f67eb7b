"""Make the GPU kit: `python -m tests.gpu_kit.build FOLDER [--python PYTHON]`.

The folder holds our wheel with CUDA code, the wheels of what a GPU machine may lack, the tests and
benchmarks, and ``run.py``, which needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MOST_BYTES = 60 << 20
# Its stable ABI serves every later Python.
PYTHON = "3.12"
REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
_SOURCES = ("tests", "benchmarks")
# Installed for the rivals, without their requirements: PyTorch is the machine's own.
_WITHOUT_REQUIREMENTS = "torch_checkpointing"
_NOT_CARRIED = ("numpy",)


def main() -> None:
    """Make the kit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help=f"a Python {PYTHON} with headers (default: search)")
    parser.add_argument(
        "--without-cuda", action="store_true", help="no CUDA code: for a rehearsal without nvcc"
    )
    options = parser.parse_args()
    start = time.monotonic()
    work = options.folder.resolve().with_name(f"{options.folder.name}-work")
    pip = pip_of(options.python or find_python(), work / "venv")
    kit = options.folder.resolve()
    shutil.rmtree(kit, ignore_errors=True)
    (kit / "wheels").mkdir(parents=True)
    cuda = "0.0" if options.without_cuda else nvcc_release()
    settings = {
        "DELTACHECK_CUDA": "OFF" if options.without_cuda else "ON",
        "DELTACHECK_EMULATOR": "ON",  # lets the rehearsal run the kernels
    }
    build_wheel(pip, REPOSITORY, kit / "wheels", settings)
    download_wheels(pip, kit / "wheels")
    for name in _SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(REPOSITORY / name, kit / "source" / name, ignore=ignored)
    shutil.copy(HERE / "run.py", kit)
    facts = {"python": PYTHON, "machine": platform.machine(), "cuda": cuda}
    (kit / "kit.json").write_text(json.dumps(facts, indent=1) + "\n")
    size = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file())
    wheels = len(list((kit / "wheels").iterdir()))
    seconds = time.monotonic() - start
    print(f"{options.folder}: {size / 2**20:.1f} MiB, {wheels} wheels, made in {seconds:.0f} s")
    if size > MOST_BYTES:
        sys.exit(f"the kit may have {MOST_BYTES >> 20} MiB")


def find_python(version: str = PYTHON) -> str:
    """Return a Python of a version, by default the one that the kit's wheel is built for.

    Raises:
        SystemExit: There is none.
    """
    for candidate in _candidates(version):
        try:
            done = subprocess.run(
                [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            continue
        if done.stdout.strip() == version:  # a launcher of pyenv may exist without its Python
            return candidate
    sys.exit(f"there is no python{version} on PATH or in pyenv")


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    yield f"python{version}"
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from map(str, sorted(versions.glob(f"{version}.*/bin/python{version}")))


def pip_of(python: str, folder: Path) -> list[str]:
    """Return the pinned pip of a virtual environment, which is created if it is missing."""
    own_python = folder / "bin" / "python"
    if not own_python.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(own_python), "-m", "pip", "--disable-pip-version-check"]
    pins = (REPOSITORY / "constraints.txt").read_text()
    pinned = re.search(r"^pip==\S+", pins, re.MULTILINE)
    assert pinned is not None, "constraints.txt pins pip"
    subprocess.run([*pip, "install", "--quiet", pinned[0]], check=True)
    return pip


def nvcc_release() -> str:
    """Return the release of CUDA that nvcc belongs to, for example ``13.0``.

    Raises:
        SystemExit: There is no nvcc.
    """
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        sys.exit("there is no nvcc, so the kit would have no CUDA code (see --without-cuda)")
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+\.\d+)", output)
    assert release is not None, output
    return release[1]


def build_wheel(
    pip: list[str],
    source: Path,
    folder: Path,
    settings: Mapping[str, str],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Build our wheel from a checkout or a source distribution.

    Args:
        pip: The command.
        source: The checkout or source distribution.
        folder: Gets the wheel.
        settings: Settings of CMake.
        options: Other settings of scikit-build-core, as ``name=value``.
        environment: Variables besides those of this process.
    """
    command = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    command += ["--build-constraint", str(REPOSITORY / "build-constraints.txt")]
    command += [
        f"--config-settings=cmake.define.{name}={value}" for name, value in settings.items()
    ]
    command += [f"--config-settings={option}" for option in options]
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})})


def download_wheels(pip: list[str], folder: Path) -> None:
    """Download the wheels that a GPU machine may lack."""
    command = [*pip, "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--constraint", str(REPOSITORY / "constraints.txt")]
    subprocess.run([*command, "--requirement", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*command, "--no-deps", _WITHOUT_REQUIREMENTS], check=True)
    for name in _NOT_CARRIED:
        for wheel in folder.glob(f"{name}-*.whl"):
            wheel.unlink()


if __name__ == "__main__":
    main()
