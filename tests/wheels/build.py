"""Build a source distribution and wheels: `python -m tests.wheels.build FOLDER`.

The wheels are built from the source distribution, one for Python 3.11 and one for the stable ABI of
Python 3.12, for the processor of this machine and, by zig, for AArch64. auditwheel gives each the
oldest manylinux tag that its symbols permit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_kit.build import REPOSITORY, build_wheel, find_python, nvcc_release, pip_of

# The first Python of the stable ABI: its wheel serves every later one.
STABLE = (3, 12)
KNOWN = ("3.11", "3.12", "3.13", "3.14")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
# What zig compiles for. RHEL 8, Ubuntu 20.04 and newer have this glibc.
AARCH64 = "aarch64-linux-gnu.2.28"
MOST_BYTES = {False: 15 << 20, True: 40 << 20}  # without and with the CUDA encoder


def main() -> None:
    """Build the release's files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pythons", default="", help="versions to build for (default: see docs)")
    parser.add_argument("--cuda", default="AUTO", help="ON, OFF, or AUTO: if there is nvcc")
    parser.add_argument(
        "--tools", type=Path, default=REPOSITORY / "build/wheels/tools", help="with auditwheel"
    )
    options = parser.parse_args()
    with_cuda = wants_cuda(options.cuda, has_nvcc=_nvcc() is not None)
    if with_cuda:
        print(f"with the CUDA encoder, by nvcc {nvcc_release()}", flush=True)
    versions = chosen(options.pythons.split(), RUNNING, available())
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in (*folder.glob("deltacheck-*.whl"), *folder.glob("deltacheck-*.tar.gz")):
        earlier.unlink()
    source = build_source(folder, options.tools)
    work = options.tools.parent
    settings = {
        "DELTACHECK_CUDA": "ON" if with_cuda else "OFF",
        "DELTACHECK_STATIC_RUNTIME": "ON",
    }
    builds = [Build(version) for version in versions]
    if (zig := options.tools / "ziglang/zig").exists():
        builds += [Build(version, zig) for version in versions]
    else:
        print(f"no wheels for AArch64: zig is not in {options.tools}", flush=True)
    for build in builds:
        start = time.monotonic()
        raw = work / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        build.write_compilers()
        pip = pip_of(find_python(build.version), work / f"venv-{build.version}")
        build_wheel(
            pip, source, raw, settings | build.settings(), build.options(), build.environment()
        )
        wheel = repair(next(raw.glob("*.whl")), folder, options.tools)
        with zipfile.ZipFile(wheel) as archive:
            if problem := module_problem(wheel.name, archive.namelist()):
                sys.exit(problem)
        size = wheel.stat().st_size
        seconds = time.monotonic() - start
        print(f"{wheel.name}: {size / 2**20:.1f} MiB, made in {seconds:.0f} s", flush=True)
        has_cuda = (settings | build.settings())["DELTACHECK_CUDA"] == "ON"
        if problem := size_problem(wheel.name, size, with_cuda=has_cuda):
            sys.exit(problem)


@dataclass(frozen=True)
class Build:
    """One wheel to build.

    Attributes:
        version: The version of the Python that builds it.
        zig: The compiler of a wheel for AArch64; ``None``: a wheel for this machine.
    """

    version: str
    zig: Path | None = None

    def settings(self) -> dict[str, str]:
        """Return settings of CMake besides those of all wheels."""
        if self.zig is None:
            return {}
        # CMake's own strip knows the objects of this machine only; the linker strips instead.
        # nanobind prints to stderr without a header for it. Python's own, which is not in the
        # stable ABI, and libstdc++ bring one, and zig's libc++ does not.
        return {
            "CMAKE_CXX_FLAGS": "-include cstdio",
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": "aarch64",
            "CMAKE_MODULE_LINKER_FLAGS": "-s",
            "DELTACHECK_CUDA": "OFF",
        }

    def options(self) -> list[str]:
        """Return settings of scikit-build-core."""
        if self.zig is None:
            return []
        tag = f"cp{self.version.replace('.', '')}"
        python_and_abi = "cp312-abi3" if _parsed(self.version) >= STABLE else f"{tag}-{tag}"
        return [f"wheel.tags={python_and_abi}-linux_aarch64", "install.strip=false"]

    def environment(self) -> dict[str, str]:
        """Return variables of the environment: the compilers, and the name of a module."""
        if self.zig is None:
            return {}
        tag = self.version.replace(".", "")
        return {
            "CC": str(self.zig.with_name("aarch64-cc")),
            "CXX": str(self.zig.with_name("aarch64-c++")),
            "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag}-aarch64-linux-gnu.so",
        }

    def write_compilers(self) -> None:
        """Write the compilers that ``environment`` names: CMake wants a file for each."""
        if self.zig is None:
            return
        for language in ("cc", "c++"):
            script = self.zig.with_name(f"aarch64-{language}")
            script.write_text(f'#!/bin/sh\nexec "{self.zig}" {language} -target {AARCH64} "$@"\n')
            script.chmod(0o755)


def wants_cuda(wish: str, *, has_nvcc: bool) -> bool:
    """Return whether wheels get the CUDA encoder.

    Raises:
        SystemExit: The wish is none of ON, OFF and AUTO, or ON without nvcc.
    """
    wish = wish.upper()
    if wish not in ("ON", "OFF", "AUTO"):
        sys.exit(f"DELTACHECK_CUDA is {wish}, but must be ON, OFF or AUTO")
    if wish == "ON" and not has_nvcc:
        sys.exit("DELTACHECK_CUDA is ON, but there is no nvcc: set CUDACXX, or DELTACHECK_CUDA=OFF")
    return has_nvcc and wish != "OFF"


def chosen(wishes: list[str], running: str, present: Collection[str]) -> list[str]:
    """Return the Pythons to build with: one for each wheel, in order.

    Args:
        wishes: Versions that were asked for. Empty: 3.11, the first of the stable ABI that is
            present, and ``running``.
        running: Version of the Python that runs this program.
        present: Versions that are on this machine.
    """
    versions = wishes or [version for version in KNOWN if version in present or version == running]
    ordered = sorted(set(versions), key=_parsed)
    stable = [version for version in ordered if _parsed(version) >= STABLE]
    return [version for version in ordered if version not in stable[1:]]


def available() -> list[str]:
    """Return the Pythons on this machine for which a wheel can be built or tested."""
    versions = []
    for version in KNOWN:
        with contextlib.suppress(SystemExit):
            find_python(version)
            versions.append(version)
    return versions


def size_problem(name: str, size: int, *, with_cuda: bool) -> str:
    """Return one sentence if a wheel is too large, and an empty text otherwise."""
    limit = MOST_BYTES[with_cuda]
    if size <= limit:
        return ""
    kind = "with" if with_cuda else "without"
    return (
        f"{name} has {size / 2**20:.1f} MiB, and a wheel {kind} the CUDA encoder may have"
        f" {limit >> 20} MiB"
    )


def module_problem(name: str, files: Collection[str]) -> str:
    """Return one sentence if the Python of a wheel would not import its module; empty: none.

    A module that is compiled for another machine may have the name of this one.
    """
    tag, abi, system = name.removesuffix(".whl").split("-")[2:5]
    machine = "aarch64" if system.endswith("aarch64") else "x86_64"
    suffix = "abi3" if abi == "abi3" else f"cpython-{tag[2:]}-{machine}-linux-gnu"
    module = f"deltacheck/_native.{suffix}.so"
    return "" if module in files else f"{name} has no {module}"


def build_source(folder: Path, tools: Path) -> Path:
    """Write the source distribution, which holds the sources of libzstd and c-blosc."""
    fetch = [sys.executable, "xla_ffi/libraries.py", "build/libraries"]
    subprocess.run(fetch, cwd=REPOSITORY, check=True)
    build = "import sys; from scikit_build_core.build import build_sdist as b; b(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)],
        cwd=REPOSITORY,
        env=_environment(tools),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return next(folder.glob("deltacheck-*.tar.gz"))


def repair(wheel: Path, folder: Path, tools: Path) -> Path:
    """Let auditwheel check a wheel, give it its manylinux tag and write it to a folder.

    Raises:
        SystemExit: The wheel needs a library that no manylinux tag permits.
    """
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder)]
    done = subprocess.run(
        [*command, str(wheel)], env=_environment(tools), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"auditwheel refuses {wheel.name}: {done.stderr.strip()}")
    *_, tag, _, system = wheel.stem.split("-")
    [repaired] = folder.glob(f"*-{tag}-*_{system.removeprefix('linux_')}.whl")
    if not re.search(r"-manylinux_\d+_\d+_\w+\.whl$", repaired.name):
        sys.exit(f"{repaired.name} has no manylinux tag")
    return repaired


def _nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def _environment(tools: Path) -> dict[str, str]:
    path = f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PYTHONPATH": str(tools), "PATH": path}


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    main()
