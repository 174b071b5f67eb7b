"""Rehearse the GPU kit without a GPU: `python -m tests.gpu_kit.rehearse [FOLDER]`.

The kit is made and run twice. In a new environment like that of a GPU machine, it may use its own
wheels only. There is no PyTorch in it, so the steps that need PyTorch run a second time, in this
environment. Steps that need a device say so; the emulator runs the kernels of all others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu_kit import goals
from tests.gpu_kit.build import PYTHON, REPOSITORY, find_python, pip_of

_HERE = Path(__file__).parent


def main() -> int:
    """Rehearse both runs, and return 1 if a step of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=REPOSITORY / "build/gpu-rehearsal")
    folder = parser.parse_args().folder.resolve()
    results = [_run([sys.executable, str(_HERE / "run.py"), "--installed"], folder / "installed")]
    try:
        python = find_python()
    except SystemExit as missing:
        print(f"gpu-kit: not made and not run, {missing}")
    else:
        results.append(_run([*_kit(folder, python)], folder / "kit"))
    return int(any(results))


def _kit(folder: Path, python: str) -> list[str]:
    """Make the kit and the environment, and return the command that runs the one in the other."""
    command = [sys.executable, "-m", "tests.gpu_kit.build", str(folder / "gpu-kit")]
    if not (os.environ.get("CUDACXX") or shutil.which("nvcc")):
        print("gpu-kit: without CUDA code, because there is no nvcc")
        command.append("--without-cuda")
    subprocess.run([*command, "--python", python], check=True, cwd=REPOSITORY)
    start = time.monotonic()
    machine = folder / "machine"
    pip = pip_of(python, machine)
    subprocess.run([*pip, "install", "--quiet", "-r", str(_HERE / "machine.txt")], check=True)
    print(f"an environment of Python {PYTHON} in {time.monotonic() - start:.0f} s", flush=True)
    return [str(machine / "bin" / "python"), str(folder / "gpu-kit" / "run.py")]


def _run(command: list[str], out: Path) -> int:
    """Run the kit, which may not ask a package index."""
    environment = os.environ | {"PIP_NO_INDEX": "1"}
    if "--installed" not in command:  # nothing of this environment
        environment.pop("PYTHONPATH", None)
    start = time.monotonic()
    # Results of an earlier rehearsal would stand in for missing ones.
    shutil.rmtree(out, ignore_errors=True)
    status = subprocess.run(
        [*command, "--rehearse", "--out", str(out)], env=environment, check=False
    ).returncode
    if "--installed" in command and (missing := _missing_goals(out)):
        print(f"figures that no step has measured: {missing}")
        status = 1
    print(f"rehearsed in {time.monotonic() - start:.0f} s, exit status {status}", flush=True)
    if status:
        for log in sorted(out.glob("*.log")):
            print(f"--- {log.name}", log.read_text(errors="replace")[-20_000:], sep="\n")
    return status


def _missing_goals(out: Path) -> list[str]:
    """Return the promised figures without a measurement: names that no step has."""
    text = (out / "goals.md").read_text()
    names = (name for name in goals.LAST_RUN if name not in goals.NEEDS_DEVICE)
    return [name for name in names if f"| {name} | {goals.NOT_MEASURED} |" in text]


if __name__ == "__main__":
    sys.exit(main())
