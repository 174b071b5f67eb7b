"""Run the GPU kit: `python3 run.py [--part N]... [--out DIR]`.

It needs Python 3.12 or newer with pip, and PyTorch or JAX with a CUDA device. It needs no network,
no compiler, no root access and no virtual environment. Exit status 0: every step passed. 1: a step
failed or a figure was missed. 3: this machine cannot run the kit.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

KIT = Path(__file__).resolve().parent
FAILED, UNSUITABLE = 1, 3
# The longest time of each part if all are run, in seconds, and the order of the parts: first what
# is least known.
PARTS = {1: 85.0, 3: 165.0, 4: 95.0, 5: 110.0, 6: 60.0, 8: 45.0, 9: 240.0, 2: 120.0, 7: 60.0}
# A machine may be lent for ten minutes. The parts before the ninth fit.
ALL_SECONDS = 570.0
_REHEARSAL_SECONDS = 480.0  # of a part
# A part itself skips what it has no time for. The rest is for a step that hangs.
_GRACE_SECONDS = 10.0
_MEMORY = Path("/dev/shm")
# The device self-check. The later parts would measure something else without it.
SELF_CHECK_PART = 1
# With less, the smallest state and its rivals do not fit.
MIN_DEVICE_BYTES = 12 << 30
# Ampere: the oldest architecture that the wheel has code for.
MIN_CAPABILITY = (8, 0)


def main() -> int:
    """Check the machine, install the wheels, and run the parts."""
    started = time.monotonic()
    options = _options()
    kit = json.loads((KIT / "kit.json").read_text()) if not options.installed else {}
    problem = _other_python(kit) or ("" if options.rehearse else _other_device(kit))
    if problem:
        print(f"gpu-kit: {problem}", file=sys.stderr)
        return UNSUITABLE
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-", dir=options.scratch) as scratch:
        paths = [str(_source(options.installed))]
        if not options.installed:
            begin = time.monotonic()
            names = _install(Path(scratch, "site"))
            print(f"installed {', '.join(names)} in {time.monotonic() - begin:.0f} s", flush=True)
            # Before the machine's own packages, but only what it lacks was installed.
            paths.insert(0, str(Path(scratch, "site")))
        return _run_parts(options, out, Path(scratch), paths, started + options.seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--part", type=int, action="append", choices=PARTS, help="only this part; may be repeated")
    add("--out", type=Path, default=Path("gpu-kit-results"), help="folder for the results")
    add("--scratch", type=Path, help="folder for checkpoints, on the disk to measure")
    add("--seconds", type=float, default=ALL_SECONDS, help="the longest time of all parts")
    add("--rehearse", action="store_true", help="run without a GPU: tiny states on the processor")
    add("--installed", action="store_true", help="use the packages of this Python, install nothing")
    return parser.parse_args()


def _other_python(kit: dict[str, str]) -> str:
    """Return why this Python cannot run the kit; empty if it can."""
    if not kit:
        return ""
    least = tuple(map(int, kit["python"].split(".")))
    if sys.version_info[: len(least)] < least:
        needed = f"Python {kit['python']} or newer"
        return f"this is Python {platform.python_version()}; the kit needs {needed}"
    if (platform.system(), platform.machine()) != ("Linux", kit["machine"]):
        here = f"{platform.system()} on {platform.machine()}"
        return f"this is {here}; the kit was built for Linux on {kit['machine']}"
    return ""


def _other_device(kit: dict[str, str]) -> str:
    """Return why the first CUDA device cannot run the kit, asked of the driver alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no GPU: there is no CUDA driver (libcuda.so.1)"
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "no GPU: the CUDA driver offers no device"
    driver.cuDriverGetVersion(ctypes.byref(version))
    supported = (version.value // 1000, version.value % 1000 // 10)
    if kit and supported < tuple(map(int, kit["cuda"].split("."))):
        here = f"{supported[0]}.{supported[1]}"
        return f"an old driver: it supports CUDA {here}, and the kit was built with {kit['cuda']}"
    driver.cuDeviceGet(ctypes.byref(device), 0)
    capability, memory = [ctypes.c_int(), ctypes.c_int()], ctypes.c_size_t()
    for number, attribute in enumerate((75, 76)):  # compute capability, major and minor
        driver.cuDeviceGetAttribute(ctypes.byref(capability[number]), attribute, device)
    major_minor = (capability[0].value, capability[1].value)
    if major_minor < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        here = ".".join(map(str, major_minor))
        return f"the device has compute capability {here}; the kit needs {needed} or more"
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    if memory.value < MIN_DEVICE_BYTES:
        sizes = f"{memory.value / 2**30:.0f} GiB; the kit needs {MIN_DEVICE_BYTES >> 30} GiB"
        return f"too little device memory: {sizes}"
    return ""


def _source(installed: bool) -> Path:
    """Return the folder that holds ``tests`` and ``benchmarks``."""
    return KIT.parents[1] if installed else KIT / "source"


def _install(site: Path) -> list[str]:
    """Install into ``site`` the product, and what this machine lacks."""
    wheels = [
        wheel
        for wheel in sorted((KIT / "wheels").glob("*.whl"))
        if wheel.name.startswith("deltacheck-") or not _is_installed(wheel)
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    subprocess.run([*pip, *options, *map(str, wheels)], check=True)
    return [wheel.name.split("-")[0] for wheel in wheels]


def _is_installed(wheel: Path) -> bool:
    try:
        importlib.metadata.distribution(re.split(r"-\d", wheel.name)[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run_parts(
    options: argparse.Namespace, out: Path, scratch: Path, paths: list[str], deadline: float
) -> int:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # so that training on the device repeats
        # Most of the memory by default, which torch in the same process then lacks
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if options.rehearse:
        # Read by JAX at its first import; several devices are what sharded arrays need. Half of
        # the processor time would be XLA's optimization.
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = (
            "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
        )
        environment["OMP_NUM_THREADS"] = "1"
    status = 0
    for part in (number for number in PARTS if number in (options.part or PARTS)):
        if status == FAILED and not _device_passed(out):
            print(f"part {part}  skipped: the device check of part {SELF_CHECK_PART} failed")
            continue
        left = deadline - time.monotonic() - _GRACE_SECONDS
        # Who asks for some parts has the time for them.
        most = left if options.part else PARTS[part]
        seconds = _REHEARSAL_SECONDS if options.rehearse else min(most, left)
        if seconds <= 0:
            print(f"part {part}  skipped: no time is left, run it with --part {part}")
            continue
        folder = scratch / f"part-{part}"
        folder.mkdir()
        with _memory() as memory:
            command = [sys.executable, "-m", "tests.gpu_kit.part", str(part)]
            command += ["--out", str(out), "--folder", str(folder), "--seconds", str(seconds)]
            command += ["--memory", memory] if memory else []
            command += ["--rehearse"] if options.rehearse else []
            if _run(command, environment, out / f"part-{part}.log", seconds):
                status = FAILED
        shutil.rmtree(folder, ignore_errors=True)
    goals = out / "goals.md"
    if goals.exists():
        print(goals.read_text())
    print(f"results: {out / 'results.md'}")
    return status


def _memory() -> AbstractContextManager[str]:
    """Return a context with a new folder in memory; empty if there is none."""
    if not os.access(_MEMORY, os.W_OK):
        return nullcontext("")
    return tempfile.TemporaryDirectory(prefix="gpu-kit-", dir=_MEMORY, ignore_cleanup_errors=True)


def _run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> int:
    """Run a part, its warnings in a log, and end all its processes when its time is up."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment, stderr=errors, start_new_session=True, cwd=log.parent
        )
        try:
            return process.wait(seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            limit = seconds + _GRACE_SECONDS
            print(f"part {command[3]}  STOPPED after {limit:.0f} s; see {log.name}")
            return FAILED


def _device_passed(out: Path) -> bool:
    """Return ``False`` if the device self-check of this or an earlier run in ``out`` failed."""
    file = out / f"part-{SELF_CHECK_PART}.json"
    if not file.exists():
        return True
    return bool(json.loads(file.read_text())["device_passed"])


if __name__ == "__main__":
    sys.exit(main())
