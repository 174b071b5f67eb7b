"""The states that `compare` saves: a real post-training run, brought to where it is steady, once
for
all rivals.

A model is pre-trained for a few steps from weights of natural scale, then post-trained. Second
moments have a memory of 1,000 steps, too many to train here, so they are matured: after some steps
the moments become their unbiased estimates and the optimizer's count moves on by ``MATURED_STEPS``,
as though the run had gone on like this for so long. From there on every update is the optimizer's
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deltacheck
from benchmarks.ways import Chain, Run
from deltacheck import Policy
from deltacheck.evaluate.workloads.recipe import Recipe, recipe, tiny
from deltacheck.profile import Profile

STATES = {"adamw": "sft", "lora": "lora", "rl_like": "rl"}  # name -> task
MATURED_STEPS = 1000
# Of training and of the hungriest rival, which is Orbax: state, gradients, temporaries, four copies
_BYTES_A_PARAMETER = 100
_LOOK_EVERY, _LOOKS = 2, 9  # of the profiler


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is and how long it trains. ``every``: training steps between two
    saves.
    """

    width: int
    layers: int
    pretrain_steps: int
    pretrain_rate: float
    settle_steps: int
    every: int

    @property
    def parameters(self) -> int:
        """Of the layers; embeddings are few."""
        hidden = 64 * ((self.width * 8 // 3 + 63) // 64)
        return self.layers * (4 * self.width**2 + 3 * self.width * hidden)


SIZES = {
    "tiny": Size(64, 1, 4, 3e-3, 4, 1),  # whether it runs; figures without meaning
    "small": Size(256, 4, 40, 3e-3, 20, 8),
    "medium": Size(1024, 8, 16, 1e-3, 12, 4),
}


def size_of(name: str) -> Size:
    """``full``: as many layers, four times as wide in parameters, as the memory that is free now
    allows.
    """
    if name != "full":
        return SIZES[name]
    available = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    parameters = int(available.split()[1]) * 1024 // _BYTES_A_PARAMETER
    one = Size(2048, 1, 8, 5e-4, 8, 2)
    return Size(2048, max(1, parameters // one.parameters), 8, 5e-4, 8, 2)


def recipe_of(state: str, size: Size) -> Recipe:
    """The workload of a state at a size: the rates of the tasks, and little text a step."""
    task = STATES[state]
    if size == SIZES["tiny"]:
        return tiny(task)
    few: dict[str, Any] = (
        {"batch": 2, "group": 4, "pretrain_batch": 16}
        if task == "rl"
        else {"batch": 1, "context": 96}
    )
    return recipe(
        task,
        width=size.width,
        layers=size.layers,
        heads=size.width // 64,
        pretrain_steps=size.pretrain_steps,
        pretrain_rate=size.pretrain_rate,
        dropout=0.0,
        sources=60,
        **few,
    )


def prepare(framework: str, state: str, size: Size, folder: Path) -> None:
    """Train a run until it is steady, and leave it in ``folder`` with its profile."""
    from deltacheck import Profiler

    run = Run(framework, recipe_of(state, size))
    run.train(size.settle_steps)
    _mature(run)
    profiler = Profiler(interval_steps=_LOOK_EVERY, optimizer=run.rule)
    loss = 0.0
    for _ in range(_LOOK_EVERY * _LOOKS):
        loss = run.train(1)
        profiler.observe(
            run.workload.step, run.workload.state, loss=loss, learning_rate=run.recipe.rate
        )
    profiler.profile().write(folder / "profile.json")
    chain = Chain(framework, folder / "run", Policy.exact())
    chain.save(run.workload.step, run.workload.state(), run.metrics(loss))
    chain.close()


def loaded(framework: str, state: str, size: Size, folder: Path) -> tuple[Run, Profile]:
    """The run that ``prepare`` has left in ``folder``, as another process goes on with it."""
    run = Run(framework, recipe_of(state, size), pretrained=False)
    chain = Chain(framework, folder / "run", Policy.exact())
    step = deltacheck.open(folder / "run").steps()[-1]
    run.workload.load(chain.restore(step, run.workload.state()))
    chain.close()
    return run, Profile.read(folder / "profile.json")


def _mature(run: Run) -> None:
    """Make the moments what they would be after ``MATURED_STEPS`` more steps with gradients like
    those so far.
    """
    if run.framework == "torch":
        for group in run.workload.optimizer.param_groups:
            before, after = group["step"], group["step"] + MATURED_STEPS
            group["step"] = after
            for parameter in group["params"]:
                kept = run.workload.optimizer.state[parameter]
                for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                    kept[name].mul_(_matured(beta, before, after))
        return
    import jax
    import optax

    def matured(node: Any) -> Any:
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        before, after = int(node.count), int(node.count) + MATURED_STEPS
        means, squares = (_matured(beta, before, after) for beta in run.recipe.betas)
        return optax.ScaleByAdamState(
            node.count + MATURED_STEPS,
            jax.tree.map(lambda m: m * means, node.mu),
            jax.tree.map(lambda v: v * squares, node.nu),
        )

    training = run.workload.training
    moments = jax.tree.map(
        matured,
        training["optimizer"],
        is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState),
    )
    run.workload.training = training | {"optimizer": moments}


def _matured(beta: float, before: int, after: int) -> float:
    return float((1 - beta**after) / (1 - beta**before))
