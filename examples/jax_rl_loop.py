"""Reinforcement learning with Flax NNX under Orbax v1, with the place in the data in each step.

A policy answers sums. It is rewarded for correct answers, and kept near a frozen reference. A step
has the policy, the optimizer, the reference, the random key and the data iterator, so a run that
was killed skips and repeats no prompt. The reference takes space in the first step only.

    python examples/jax_rl_loop.py FOLDER --steps 100
    python examples/jax_rl_loop.py FOLDER --steps 200           # continues from step 100
    python examples/jax_rl_loop.py FOLDER --steps 200 --grain   # prompts from a grain pipeline
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from deltacheck.backends.orbax import v1

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
arguments.add_argument("--steps", type=int, default=100)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
arguments.add_argument("--grain", action="store_true", help="needs `pip install grain`")
options = arguments.parse_args()
BATCH, ANSWERS = 16, 8


class Prompts:
    """An iterator over random prompts that Orbax saves as it saves an iterator of grain."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> np.ndarray:
        self.position += 1
        return np.random.default_rng(self.position).integers(100, size=BATCH)

    async def save(self, directory: Any) -> Awaitable[None]:
        position = self.position  # read at once: the training goes on

        async def write() -> None:
            folder = await directory.await_creation()
            (folder / "position.json").write_text(json.dumps(position))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.position = json.loads((directory / "position.json").read_text())

        return read()


class Policy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(100, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, prompts: jax.Array) -> jax.Array:
        """Return the log probabilities of the ten answers."""
        return nnx.log_softmax(self.head(nnx.relu(self.table(prompts))))


graph, parameters = nnx.split(Policy(nnx.Rngs(0)))
optimizer = optax.adamw(3e-3)
state = {
    "policy": parameters,
    "optimizer": optimizer.init(parameters),
    "reference": jax.tree.map(jnp.copy, parameters),
    "key": jax.random.key(1),
}


@jax.jit
def train_step(state: dict[str, Any], prompts: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Sample answers, train on their rewards, and return the new state and the mean reward."""
    key, subkey = jax.random.split(state["key"])
    log_p = nnx.merge(graph, state["policy"])(prompts)
    answers = jax.random.categorical(subkey, log_p, shape=(ANSWERS, BATCH))
    rewards = (answers == (prompts // 10 + prompts) % 10).astype(jnp.float32)
    advantages = rewards - rewards.mean(axis=0)

    def loss_of(policy: nnx.State) -> jax.Array:
        log_p = nnx.merge(graph, policy)(prompts)
        reference = nnx.merge(graph, state["reference"])(prompts)
        chosen = jnp.take_along_axis(log_p[None], answers[..., None], axis=-1)[..., 0]
        divergence = (jnp.exp(log_p) * (log_p - reference)).sum(axis=-1)
        return 0.01 * divergence.mean() - (advantages * chosen).mean()

    gradients = jax.grad(loss_of)(state["policy"])
    updates, moments = optimizer.update(gradients, state["optimizer"], state["policy"])
    policy = optax.apply_updates(state["policy"], updates)
    return {**state, "policy": policy, "optimizer": moments, "key": key}, rewards.mean()


prompts: Any = Prompts()
if options.grain:
    import grain

    prompts = iter(grain.MapDataset.range(100).shuffle(3).repeat().batch(BATCH).to_iter_dataset())

policies = ocp.training.save_decision_policies
save_policy = policies.AnySavePolicy(
    # The second one saves when the machine is about to be taken away. It needs
    # ``jax.distributed.initialize``.
    [policies.FixedIntervalPolicy(options.every), policies.PreemptionCheckpointingPolicy()]
)
folder = options.folder.resolve()
with (
    v1.context(folder),
    ocp.training.Checkpointer(
        folder,
        save_decision_policy=save_policy,
        preservation_policy=ocp.training.preservation_policies.LatestN(3),
    ) as checkpoints,
):
    last_step = 0
    if checkpoints.latest is not None:
        last_step = checkpoints.latest.step
        # The iterator moves to its saved place. The tree has the types of its target.
        loaded = checkpoints.load_checkpointables(last_step, {"state": state, "prompts": prompts})
        state = loaded["state"]
        print(f"resumed from step {last_step}")

    for step in range(last_step + 1, options.steps + 1):
        batch = next(prompts)
        state, reward = train_step(state, batch)
        # Returns at once, and does nothing if no step is due.
        if checkpoints.save_checkpointables_async(step, {"state": state, "prompts": prompts}):
            print(f"step {step}: prompts {batch[:3]}..., reward {reward:.3f}")
# Leaving the block waits for the last save.
