"""Part 2: compute-sanitizer's four tools on small inputs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.record import Cell, Result, Table
from tests.gpu_kit.steps import Context, Skipped, Step

# The slowest last. It gets fewer inputs, and runs through JAX only: through PyTorch it did not end
# in 265 s on one machine, and not in 60 s on another. The kernels are the same.
TOOLS = ("memcheck", "synccheck", "racecheck", "initcheck")
MOST_SECONDS = 60.0
# Programs of `small_kernels.py`
TORCH, JAX = "torch", "jax"
ERROR_STATUS = 86
_USUAL_PLACE = Path("/usr/local/cuda/bin/compute-sanitizer")


def check(context: Context, tool: str, framework: str) -> Result:
    """Run one tool on the kernels that one framework launches."""
    program = [sys.executable, "-m", "tests.gpu_kit.small_kernels", framework]
    if tool == TOOLS[-1]:
        program.append("--few")
    # Every allocation for itself, so that a read beyond its end is noticed.
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    if context.rehearse:
        if tool != TOOLS[0]:
            raise Skipped("needs a GPU")
        program.append("--rehearse")
    else:
        sanitizer = shutil.which("compute-sanitizer") or str(_USUAL_PLACE)
        if not Path(sanitizer).exists():
            raise Skipped("compute-sanitizer is not installed")
        # Only our kernels: the frameworks' own would take minutes, and are not ours to mend.
        options = ["--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
        options += ["--kernel-name", "kernel_substring=deltacheck"]
        if tool == TOOLS[-1]:
            # XLA copies whole buffers to the host, of which a call fills a part.
            options += ["--check-api-memory-access", "no"]
        program = [sanitizer, *options, *program]
    limit = min(MOST_SECONDS, context.seconds_left())
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=limit)
    output = done.stdout + done.stderr
    print(output[-20_000:], file=sys.stderr)
    if "Device not supported" in output:
        raise Skipped("compute-sanitizer does not support this machine's device")
    launches = re.search(r"launched: (.*)", done.stdout)
    if done.returncode != 0 or launches is None:
        errors = re.findall(r"={9} (?!COMPUTE)(\S.*)", output)
        about = errors[0] if errors else f"exit status {done.returncode}"
        raise AssertionError(f"{tool}: {about}; see the log of this part")
    row: list[Cell] = [framework, tool, launches[1]]
    if context.rehearse:
        raise Skipped(f"needs a GPU; its program ran on the emulator: {launches[1]}")
    units = {"framework": "text", "tool": "text", "calls": "text"}
    return Result(f"{tool}, {framework}", "no error", [Table("calls under it", units, [row])])


def check_control(context: Context) -> Result:
    """Make sure that memcheck notices a read beyond an allocation."""
    if context.rehearse:
        raise Skipped("needs a GPU")
    try:
        check(context, TOOLS[0], "planted")
    except AssertionError as error:
        if "Invalid __global__ read" not in str(error):  # the program failed for another reason
            raise
        return Result("a planted error", f"noticed: {error}", [])
    raise AssertionError("memcheck reports nothing for a read beyond an allocation")


STEPS = (
    Step("a planted error is noticed", check_control, needs=(TORCH,), seconds=20),
    *(
        Step(
            f"{tool}, kernels through {framework}",
            partial(check, tool=tool, framework=framework),
            needs=(framework,),
            seconds=20,
        )
        for framework in (TORCH, JAX)
        for tool in TOOLS
        if (framework, tool) != (TORCH, TOOLS[-1])
    ),
)
