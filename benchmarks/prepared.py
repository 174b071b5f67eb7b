"""The states that `compare` saves: a steady post-training run, prepared once for all rivals.

A model is pre-trained for a few steps from weights of natural scale, then post-trained. Second
moments have a memory of 1,000 steps, too many to train here. After some steps the moments are
therefore replaced by their unbiased estimates, and the optimizer's count is advanced by
``MATURED_STEPS``, as if the run had continued for so long. All later updates are the optimizer's
own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deltacheck
from benchmarks.ways import Chain, Run
from benchmarks.workloads.recipe import Recipe, recipe, tiny
from deltacheck import Policy
from deltacheck.profile import Profile

# The memory of AdamW's second moment.
MATURED_STEPS = 1000
STATES = {"adamw": "sft", "lora": "lora", "rl_like": "rl"}  # name -> task
# Of training and of Orbax, which needs the most: state, gradients, temporaries, four copies
_BYTES_A_PARAMETER = 100
_LOOK_EVERY, _LOOKS = 2, 9  # of the profiler


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model and of its training. ``every``: training steps between two saves."""

    width: int
    layers: int
    pretrain_steps: int
    pretrain_rate: float
    settle_steps: int
    every: int

    @property
    def parameters(self) -> int:
        """Parameters of the layers; embeddings add few."""
        hidden = 64 * ((self.width * 8 // 3 + 63) // 64)
        return self.layers * (4 * self.width**2 + 3 * self.width * hidden)


SIZES = {
    "tiny": Size(64, 1, 4, 3e-3, 4, 1),  # a check that it runs; figures without meaning
    "small": Size(256, 4, 40, 3e-3, 20, 8),
    "medium": Size(1024, 8, 16, 1e-3, 12, 4),
}


def size_of(name: str) -> Size:
    """Return a size by its name.

    ``full`` has layers four times as large as those of ``medium``, as many as free memory allows.
    """
    if name != "full":
        return SIZES[name]
    available = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    parameters = int(available.split()[1]) * 1024 // _BYTES_A_PARAMETER
    single_layer = Size(2048, 1, 8, 5e-4, 8, 2)
    return replace(single_layer, layers=max(1, parameters // single_layer.parameters))


def recipe_of(state: str, size: Size, device: str = "cpu") -> Recipe:
    """Return the recipe of a state at a size: the rate of its task, and little text per step."""
    task = STATES[state]
    if size == SIZES["tiny"]:
        return tiny(task, device=device)
    small_batch: dict[str, Any] = (
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
        device=device,
        **small_batch,
    )


def prepare(framework: str, state: str, size: Size, folder: Path) -> None:
    """Train a run until it is steady, and leave it in ``folder`` with its profile."""
    run = Run(framework, recipe_of(state, size))
    profile, loss = settle(run, size)
    profile.write(folder / "profile.json")
    chain = Chain(framework, folder / "run", Policy.exact())
    chain.save(run.workload.step, run.workload.state(), run.metrics(loss))
    chain.close()


def settle(run: Run, size: Size) -> tuple[Profile, float]:
    """Train a run until it is steady, and return its profile and the last loss."""
    from deltacheck import Profiler

    run.train(size.settle_steps)
    _mature(run)
    profiler = Profiler(interval_steps=_LOOK_EVERY, optimizer=run.rule)
    loss = 0.0
    for _ in range(_LOOK_EVERY * _LOOKS):
        loss = run.train(1)
        profiler.observe(
            run.workload.step, run.workload.state, loss=loss, learning_rate=run.recipe.rate
        )
    return profiler.profile(), loss


def load(framework: str, state: str, size: Size, folder: Path) -> tuple[Run, Profile]:
    """Load the run that ``prepare`` has left in ``folder``, in another process."""
    run = Run(framework, recipe_of(state, size), pretrained=False)
    chain = Chain(framework, folder / "run", Policy.exact())
    step = deltacheck.open(folder / "run").steps()[-1]
    run.workload.load(chain.restore(step, run.workload.state()))
    chain.close()
    return run, Profile.read(folder / "profile.json")


def _mature(run: Run) -> None:
    """Set the moments to their values after ``MATURED_STEPS`` more steps with similar gradients."""
    if run.framework == "torch":
        mature(run.workload.optimizer, MATURED_STEPS)
        return
    import jax
    import optax

    def matured(node: Any) -> Any:
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        before, after = int(node.count), int(node.count) + MATURED_STEPS
        means, squares = (moment_growth(beta, before, after) for beta in run.recipe.betas)
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


def mature(optimizer: Any, steps: int) -> None:
    """Set the moments as after ``steps`` more steps with gradients like those so far.

    The moments become what their unbiased estimates predict, and the count is increased. Weights
    and masters stay.

    Args:
        optimizer: A ``MixedPrecisionAdamW`` that has made at least one step.
        steps: The number of steps.
    """
    for group in optimizer.param_groups:
        before, after = group["step"], group["step"] + steps
        group["step"] = after
        for parameter in group["params"]:
            for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                optimizer.state[parameter][name].mul_(moment_growth(beta, before, after))


def moment_growth(beta: float, before: int, after: int) -> float:
    """Return the factor from a moment of Adam to its value after more steps.

    A moment begins at zero and grows towards the mean of the gradients, or of their squares. The
    factor assumes that later gradients are like the first.

    Args:
        beta: The decay of the moment.
        before: The number of steps so far.
        after: The number of steps then.
    """
    return float((1 - beta**after) / (1 - beta**before))
