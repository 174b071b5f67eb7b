"""Fetch the sources of libzstd and c-blosc, which are compiled into the native module.

    python xla_ffi/libraries.py FOLDER

They are downloaded by hash (``library-sources.txt``) from the package index of pip. Nothing is done
if the folder holds them already. CMake calls this, and ``make wheel`` for the source distribution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_SOURCES = _HERE / "library-sources.txt"
_BUILD_CONSTRAINTS = _HERE.parent / "build-constraints.txt"
_NAMES = ("zstd", "blosc")


def main() -> None:
    """Fetch the sources into the folder that the command line names."""
    folder = Path(sys.argv[1])
    stamp = folder / _SOURCES.name
    if stamp.exists() and stamp.read_bytes() == _SOURCES.read_bytes():
        return
    print("downloading the sources of libzstd and c-blosc", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetched = Path(scratch) / "libraries"
        _download(fetched)
        shutil.copyfile(_SOURCES, fetched / _SOURCES.name)
        shutil.rmtree(folder, ignore_errors=True)
        # Another build that ends first has written the same.
        if not folder.exists():
            os.rename(fetched, folder)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", ",".join(_NAMES), "--dest", str(folder)]
    # pip compares the hashes before it runs anything of the packages.
    command += ["--require-hashes", "--requirement", str(_SOURCES)]
    if _BUILD_CONSTRAINTS.exists():
        command += ["--build-constraint", str(_BUILD_CONSTRAINTS)]
    subprocess.run(command, check=True)
    for name in _NAMES:
        (archive,) = folder.glob(f"{name}-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        os.rename(folder / archive.name.removesuffix(".tar.gz"), folder / name)
        archive.unlink()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
