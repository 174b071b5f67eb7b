"""JAX training with Flax and Optax, with delta checkpoints under Orbax's CheckpointManager.

The next run continues from the newest checkpoint.

    python examples/jax_training_loop.py FOLDER --steps 100
    python examples/jax_training_loop.py FOLDER --steps 200    # continues from step 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState

from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
arguments.add_argument("--steps", type=int, default=100)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
options = arguments.parse_args()


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.gelu(nn.Dense(256)(x))
        return nn.Dense(8)(x)


model = Model()
teacher = jax.random.normal(jax.random.key(1), (32, 8)) / 6  # the function to learn


@jax.jit
def train_step(training: TrainState, key: jax.Array) -> tuple[TrainState, jax.Array, jax.Array]:
    """Train one step, and return the new state, the next key and the loss."""
    key, subkey = jax.random.split(key)
    inputs = jax.random.normal(subkey, (64, 32))

    def loss_of(params: optax.Params) -> jax.Array:
        return jnp.mean((training.apply_fn(params, inputs) - jnp.tanh(inputs @ teacher)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(training.params)
    return training.apply_gradients(grads=gradients), key, loss


training = TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), jnp.ones((1, 32))),
    tx=optax.adamw(1e-3),
)
key = jax.random.key(2)

with manager(
    options.folder.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=5)
) as checkpoints:
    last_step = checkpoints.latest_step() or 0
    if last_step:
        # The target says which types to build. Without it the tree is restored as dicts, lists and
        # arrays.
        restored = checkpoints.restore(
            last_step, args=DeltaRestoreArgs({"training": training, "key": key})
        )
        training, key = restored["training"], restored["key"]
        print(f"resumed from step {last_step}")

    for step in range(last_step + 1, options.steps + 1):
        training, key, loss = train_step(training, key)
        if step % options.every == 0 or step == options.steps:
            # The save continues in the background.
            checkpoints.save(step, args=DeltaSaveArgs({"training": training, "key": key}))
            print(f"step {step}: loss {loss:.6f}")
# Leaving the block waits for the last save.
