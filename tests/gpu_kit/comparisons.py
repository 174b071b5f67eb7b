"""Part 9: all ways of saving a PyTorch training, and the cost of the profiler."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.record import Result
from tests.gpu_kit.steps import Context, Step
from tests.gpu_kit.torch_saves import WAYS, blocking_steps, compare


def profile(context: Context) -> Result:
    """Measure the profiler's share of a training step."""
    from benchmarks import profiling, states

    if context.rehearse:
        return profiling.measure(states.QUICK, looks=1)
    model = replace(states.REAL, width=1024, layers=11, heads=16, device="cuda")
    return profiling.measure(model, looks=3)


STEPS = (
    Step("saves of 2 GB (adamw)", partial(compare, state="adamw"), needs=("torch",), seconds=60),
    *blocking_steps((8, 16), WAYS[:4], 1.5),
    Step("cost of the profiler", profile, needs=("torch",), seconds=20),
    Step(
        "saves of 2 GB (rl_like)", partial(compare, state="rl_like"), needs=("torch",), seconds=50
    ),
)
