"""Run the steps of one part, and write their results as they finish.

`python -m tests.gpu_kit.part NUMBER --out DIR --folder DIR [--memory DIR] --seconds S [--rehearse]`
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deltacheck.evaluate import machine
from tests.gpu_kit import page
from tests.gpu_kit.steps import Context, Skipped, Step

MODULES = (
    "device_checks",
    "sanitizers",
    "torch_saves",
    "jax_saves",
    "post_training",
    "shared_device",
    "profile_kernels",
    "kernels",
    "comparisons",
)
PASSED, MISSED, FAILED, SKIPPED, RUNNING = "passed", "missed", "FAILED", "skipped", "running"


def perform(part: int, steps: Sequence[Step], context: Context) -> bool:
    """Run steps in order.

    Returns:
        ``True`` if none failed and no figure was missed.
    """
    records: list[dict[str, Any]] = []
    document = {
        "part": part,
        "rehearsal": context.rehearse,
        "machine": machine.describe(context.folder),
        "device_passed": True,
        "steps": records,
    }
    for step in steps:
        # Written before it runs: if the process is killed, the record names the step.
        records.append({"title": step.title, "status": RUNNING, "seconds": 0.0})
        page.write(context.out, document)
        start = time.monotonic()
        records[-1] |= _outcome(step, context)
        records[-1]["seconds"] = time.monotonic() - start
        if step.checks_device and records[-1]["status"] == FAILED:
            document["device_passed"] = False
        page.write(context.out, document)
        print(page.line(part, records[-1]), flush=True)
    return all(record["status"] in (PASSED, SKIPPED) for record in records)


def _outcome(step: Step, context: Context) -> dict[str, Any]:
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing:
        return {"status": SKIPPED, "reason": f"{missing[0]} is not installed"}
    if context.seconds_left() < step.seconds and not context.rehearse:
        left = f"{max(0.0, context.seconds_left()):.0f} s are left"
        return {"status": SKIPPED, "reason": f"takes about {step.seconds:.0f} s, and {left}"}
    try:
        result = step.run(context)
    except Skipped as reason:
        return {"status": SKIPPED, "reason": str(reason)}
    except Exception as error:  # noqa: BLE001 - recorded, and the next step runs
        traceback.print_exc()
        return {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    missed = [figure.name for figure in result.figures if not figure.holds]
    # The figures of a rehearsal have no meaning, so it misses none.
    missed = [] if context.rehearse else missed
    status = MISSED if missed else PASSED
    return {"status": status, "reason": "; ".join(missed), "result": result.as_json()}


def main() -> int:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    module = importlib.import_module(f"tests.gpu_kit.{MODULES[options.part - 1]}")
    deadline = time.monotonic() + options.seconds
    context = Context(options.folder, options.out, deadline, options.rehearse, options.memory)
    return int(not perform(options.part, module.STEPS, context))


if __name__ == "__main__":
    sys.exit(main())
