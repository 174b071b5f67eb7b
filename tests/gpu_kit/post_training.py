"""Part 5: a post-training saved under each policy, killed, resumed, and judged by `eval`."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

from benchmarks.record import Cell, Result, Table
from tests.gpu_kit.stand_in import require_device
from tests.gpu_kit.steps import Context, Skipped, Step

_FACTORY = "tests.gpu_kit.finetuning"
PROFILED = "auto, profile"
# Steps, steps between saves, and seeds: five are the fewest for a statement on quality, which an
# exact policy does not need.
_RUNS = {"exact": (40, 10, 2), "auto": (100, 20, 5), PROFILED: (100, 20, 5)}
_QUICK = (12, 3, 2)


def evaluate(context: Context, policy: str) -> Result:
    """Evaluate one policy, and raise if a restore was wrong."""
    from deltacheck.evaluate.judge import judge
    from deltacheck.evaluate.records import MEASURED, EvaluationPlan
    from deltacheck.evaluate.run import evaluate as run

    if context.rehearse and policy == "auto":
        raise Skipped("the rehearsal evaluates one exact and one other policy")
    if not context.rehearse:
        require_device(context)
    steps, every, seeds = _QUICK if context.rehearse else _RUNS[policy]
    plan = EvaluationPlan(
        factory=f"{_FACTORY}:{'on_processor' if context.rehearse else 'on_device'}",
        policy=policy.removesuffix(", profile"),
        profile=MEASURED if policy == PROFILED else "",
        steps=steps,
        every=every,
        kills=1,
        seeds=1,
        noise_seeds=seeds,
    )
    folder = context.folder / policy
    folder.mkdir()
    try:
        judgement = judge(run(plan, folder))
    finally:
        shutil.rmtree(folder)
    reasons = judgement.reasons
    if policy == "exact":
        reasons = judgement.correctness.reasons
    if context.rehearse:
        # Its runs are too few to tell the quality, and its steps too few to test every contract.
        reasons = tuple(r for r in judgement.correctness.reasons if "not tested" not in r)
    if reasons:
        raise AssertionError(f"{policy}: {'; '.join(reasons)}")
    size, latency, correctness = judgement.size, judgement.latency, judgement.correctness
    row: list[Cell] = [
        size.raw_bytes,
        size.first,
        size.later.median,
        latency.blocking_seconds.median,
        latency.blocking.median,
        latency.durable_seconds.median,
        f"{correctness.held} of {correctness.trials}",
        correctness.equal_endings,
        judgement.quality.final.verdict,
    ]
    units: Any = {
        "state": "bytes",
        "first save": "ratio",
        "later saves": "ratio",
        "blocking": "seconds",
        "of torch.save": "ratio",
        "until durable": "seconds",
        "recovered": "text",
        "equal endings": "count",
        "quality": "text",
    }
    about = (
        f"{steps} steps, a save every {every}, one SIGKILL; saves relative to torch.save with a"
        f" sync; the run repeats bit for bit: {'yes' if correctness.deterministic else 'no'}"
    )
    return Result(f"policy {policy}", about, [Table("evaluation", units, [row])])


STEPS = tuple(
    Step(
        f"killed and resumed under {policy}",
        partial(evaluate, policy=policy),
        needs=("torch",),
        seconds=seconds,
    )
    for policy, seconds in (("exact", 100.0), (PROFILED, 130.0), ("auto", 130.0))
)
