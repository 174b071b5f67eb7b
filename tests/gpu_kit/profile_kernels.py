"""Part 7: where the kernels spend their time, by Nsight Compute."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.record import Result
from tests.gpu_kit.steps import Context, Skipped, Step

_USUAL_PLACE = Path("/usr/local/cuda/bin/ncu")


def profile(context: Context) -> Result:
    """Profile the kernels on both states of the goals, and leave the report in ``out``.

    It answers which stage costs most beyond the copy: the sample, the list of changed words, their
    packing, or the single bytes of planes.
    """
    program = [sys.executable, "-m", "tests.gpu_kit.small_kernels", "large"]
    if context.rehearse:
        done = subprocess.run(
            [*program, "--rehearse"], capture_output=True, text=True, check=True
        ).stdout
        raise Skipped(f"needs a GPU; its program ran on the emulator: {done.strip()}")
    profiler = shutil.which("ncu") or str(_USUAL_PLACE)
    if not Path(profiler).exists():
        raise Skipped("Nsight Compute (ncu) is not installed")
    report = context.out / "kernels.ncu-rep"
    # Only our kernels, and not those of the device's own test: each is run again for each group of
    # counters. The clocks stay as they are.
    options = ["--profile-from-start", "off"]
    options += ["--kernel-name-base", "mangled", "--kernel-name", "regex:deltacheck"]
    options += ["--clock-control", "none", "--set", "full"]
    options += ["--force-overwrite", "--export", str(report)]
    done = _run([profiler, *options, *program], context)
    if "ERR_NVGPUCTRPERM" in done:
        raise Skipped("this user may not read the counters of the device (ERR_NVGPUCTRPERM)")
    if not report.exists():
        raise RuntimeError("ncu wrote no report; see the log of this part")
    for page in ("details", "source"):
        text = _run([profiler, "--import", str(report), "--csv", "--page", page], context)
        (context.out / f"kernels-{page}.csv").write_text(text)
    return Result("a profile of the kernels", f"{report.name} and kernels-*.csv", [])


def _run(command: list[str], context: Context) -> str:
    """Run a command, and return what it prints."""
    limit = context.seconds_left()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    print((done.stdout + done.stderr)[-20_000:], file=sys.stderr)
    return done.stdout + done.stderr if done.returncode else done.stdout


STEPS = (Step("a profile of the kernels", profile, needs=("torch",), seconds=30),)
