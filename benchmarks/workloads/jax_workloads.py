"""Post-training runs in JAX: the same transformer, trained with Optax, its state a pytree.

Optax updates the float32 master. The bfloat16 weight is the rounded master.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.workloads import tasks
from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import VOCABULARY, Batches, Rows

Tree = Any  # nested dicts of arrays
State = dict[str, Any]


def pretrained(recipe: Recipe) -> Tree:
    """Return the weights that post-training starts from."""
    params = _initial(recipe, jax.random.key(recipe.seed))
    training = {
        "params": _rounded(params),
        "master": params,
        "optimizer": _pretraining_optimizer(recipe).init(params),
    }
    batches = Batches(tasks.pretraining_rows(recipe), recipe.pretrain_batch, recipe.seed)
    for _ in range(recipe.pretrain_steps):
        rows = next(batches)
        training = _pretraining_step(recipe, training, rows.tokens.astype(np.int32), rows.graded)
    return training["params"]


class Workload:
    """One post-training run.

    Its state is a pytree: ``training`` (``params`` bfloat16, ``master`` float32, ``optimizer`` of
    Optax), ``base`` (frozen weights, under "lora"), ``data``, ``key`` and ``step``.

    Args:
        recipe: Sizes and rates.
        weights: The model's weights, as ``pretrained`` returns them; ``None`` for new ones.
    """

    def __init__(self, recipe: Recipe, weights: Tree | None = None) -> None:
        self.recipe = recipe
        key, subkey = jax.random.split(jax.random.key(recipe.seed))
        weights = _rounded(_initial(recipe, subkey)) if weights is None else weights
        lora = recipe.task == "lora"
        params = _adapters(recipe, subkey) if lora else weights
        self.base = weights if lora else {}
        self.optimizer = _post_training_optimizer(recipe)
        master = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
        self.training = {
            "params": params,
            "master": master,
            "optimizer": self.optimizer.init(master),
        }
        self.key = key
        self.batches = tasks.training_batches(recipe)
        held_out = tasks.evaluation_rows(recipe)
        self.held_out = held_out.tokens.astype(np.int32), held_out.graded
        self.step = 0

    def train_step(self, rows: Rows | None = None) -> float:
        """Train one step on ``rows``, by default on the next batch, and return its loss.

        Under "rl", the loss is 1 - mean reward.
        """
        rows = next(self.batches) if rows is None else rows
        # A new key for each step. The state contains it, so that a resumed run draws the same.
        self.key, subkey = jax.random.split(self.key)
        if self.recipe.task == "rl":
            loss, tokens, weight = self._completed(rows, subkey)
            self.training, _ = _policy_step(self.recipe, self.training, tokens, weight)
        else:
            self.training, loss_array = _supervised_step(
                self.recipe,
                self.training,
                self.base,
                rows.tokens.astype(np.int32),
                rows.graded,
                subkey,
            )
            loss = float(loss_array)
        self.step += 1
        return loss

    def evaluate(self) -> float:
        """Return the loss of the right answers on fixed, held-out rows."""
        return float(_evaluated(self.recipe, self._weights(), *self.held_out))

    def logits(self) -> jax.Array:
        """Return the logits of the held-out rows, (rows, tokens, vocabulary) float32.

        Equal bits mean equal weights.
        """
        return _logits(self.recipe, self._weights(), self.held_out[0][:, :-1])

    def reorder(self, seed: int) -> None:
        """Continue with other batches, and with other draws of dropout and sampling."""
        self.batches = tasks.training_batches(replace(self.recipe, seed=seed))
        self.key = jax.random.key(seed)

    def state(self) -> State:
        """Return everything that decides how the run continues."""
        return {
            "base": self.base,
            "training": self.training,
            "data": self.batches.state_dict(),
            "key": self.key,
            "step": self.step,
        }

    def load(self, state: State) -> None:
        """Continue from a state that ``state`` has returned."""
        self.base, self.training = state["base"], state["training"]
        self.batches.load_state_dict(state["data"])
        self.key, self.step = state["key"], state["step"]

    def _weights(self) -> Tree:
        return _merged(self.base, self.training["params"])

    def _completed(self, rows: Rows, key: jax.Array) -> tuple[float, jax.Array, jax.Array]:
        """Sample answers; return 1 - mean reward, the completed rows, and their advantages."""
        prompts, answers = (
            np.repeat(part, self.recipe.group, axis=0) for part in tasks.prompts_of(rows)
        )
        tokens = _sampled(self.recipe, self._weights(), prompts.astype(np.int32), key)
        rewards = tasks.reward(np.asarray(tokens[:, prompts.shape[1] :]), answers)
        return (
            1.0 - float(rewards.mean()),
            tokens,
            jnp.asarray(tasks.advantages(rewards, self.recipe.group)),
        )


# --- the model: RMSNorm, rotary positions, causal attention, SwiGLU, tied embedding ---------------


def _initial(recipe: Recipe, key: jax.Array) -> Tree:
    """Draw new weights, float32, each matrix (inputs, outputs) at the scale of its inputs."""
    width, hidden = recipe.width, recipe.hidden
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 2 * hidden),
        "down": (hidden, width),
    }
    keys = iter(jax.random.split(key, 1 + 4 * recipe.layers))

    def layer() -> Tree:
        matrices = {
            name: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
            for name, shape in shapes.items()
        }
        return matrices | {"attn_norm": jnp.ones(width), "mlp_norm": jnp.ones(width)}

    embedding = jax.random.normal(next(keys), (VOCABULARY, width)) * 0.02
    return {
        "embed": embedding,
        "layers": {f"layer_{n}": layer() for n in range(recipe.layers)},
        "norm": jnp.ones(width),
    }


def _adapters(recipe: Recipe, key: jax.Array) -> Tree:
    """Create LoRA adapters (Hu et al., 2021) on the input of each attention.

    An adapter is a trained correction of low rank, which begins at zero.
    """
    layers = {}
    for number, subkey in enumerate(jax.random.split(key, recipe.layers)):
        down = jax.random.normal(subkey, (recipe.width, recipe.rank)) * recipe.width**-0.5
        layers[f"layer_{number}"] = {
            "qkv_down": down,
            "qkv_up": jnp.zeros((recipe.rank, 3 * recipe.width)),
        }
    return _rounded({"layers": layers})


def _merged(base: Tree, params: Tree) -> Tree:
    """Put the adapters beside the frozen matrices that they correct.

    Without a base, ``params`` are the weights themselves.
    """
    if not base:
        return params
    return base | {
        "layers": {name: layer | params["layers"][name] for name, layer in base["layers"].items()}
    }


def _logits(recipe: Recipe, weights: Tree, tokens: Any, key: jax.Array | None = None) -> jax.Array:
    """Map tokens (batch, length) to logits (batch, length, VOCABULARY) float32.

    Args:
        recipe: Sizes of the model.
        weights: Its weights, adapters included.
        tokens: Integers below ``VOCABULARY``.
        key: Random key of dropout; ``None``: no dropout.
    """
    weights = jax.tree.map(lambda weight: weight.astype(jnp.float32), weights)
    length, head_width = tokens.shape[1], recipe.width // recipe.heads
    angles = jnp.outer(jnp.arange(length), 10_000.0 ** -(jnp.arange(0, head_width, 2) / head_width))
    causal = jnp.tril(jnp.ones((length, length), bool))

    def rotated(x: jax.Array) -> jax.Array:
        x1, x2 = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    def dropped(x: jax.Array, place: int) -> jax.Array:
        if key is None or recipe.dropout == 0:
            return x
        mask = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - recipe.dropout, x.shape)
        return jnp.where(mask, x / (1 - recipe.dropout), 0.0)

    x = weights["embed"][tokens]
    for number in range(recipe.layers):
        layer = weights["layers"][f"layer_{number}"]
        normal = _normed(x, layer["attn_norm"])
        qkv = normal @ layer["qkv"]
        if "qkv_down" in layer:
            qkv += normal @ layer["qkv_down"] @ layer["qkv_up"]
        query, attended, value = (
            part.reshape(*part.shape[:2], recipe.heads, head_width)
            for part in jnp.split(qkv, 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(query), rotated(attended)) * head_width**-0.5
        mixed = jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), value
        )
        x += dropped(mixed.reshape(x.shape) @ layer["out"], 2 * number)
        gate, hidden = jnp.split(_normed(x, layer["mlp_norm"]) @ layer["up"], 2, axis=-1)
        x += dropped((jax.nn.silu(gate) * hidden) @ layer["down"], 2 * number + 1)
    logits: jax.Array = _normed(x, weights["norm"]) @ weights["embed"].T
    return logits


def _normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def _loss(
    recipe: Recipe, weights: Tree, tokens: Any, graded: Any, key: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy of the graded tokens, each predicted from its prefix."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        _logits(recipe, weights, tokens[:, :-1], key), tokens[:, 1:]
    )
    return jnp.sum(losses * graded[:, 1:]) / jnp.sum(graded[:, 1:])


# --- its training ---------------------------------------------------------------------------------


@functools.cache
def _pretraining_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    warmup, steps = max(1, recipe.pretrain_steps // 10), max(2, recipe.pretrain_steps)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.pretrain_rate, warmup, steps, 0.1 * recipe.pretrain_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


@functools.cache
def _post_training_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    beta1, beta2 = recipe.betas
    schedule = optax.linear_schedule(
        recipe.rate / max(1, recipe.warmup_steps), recipe.rate, max(1, recipe.warmup_steps - 1)
    )
    # Injected, so that the state contains the rate and the betas, as PyTorch's groups do.
    adamw = optax.inject_hyperparams(optax.adamw)(
        schedule, beta1, beta2, recipe.eps, weight_decay=recipe.weight_decay
    )
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _updated(optimizer: optax.GradientTransformation, training: State, gradients: Tree) -> State:
    gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
    updates, state = optimizer.update(gradients, training["optimizer"], training["master"])
    master = optax.apply_updates(training["master"], updates)
    return {"params": _rounded(master), "master": master, "optimizer": state}


def _rounded(weights: Tree) -> Tree:
    return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), weights)


@functools.partial(jax.jit, static_argnames="recipe")
def _pretraining_step(
    recipe: Recipe, training: State, tokens: jax.Array, graded: jax.Array
) -> State:
    gradients = jax.grad(lambda params: _loss(recipe, params, tokens, graded))(training["params"])
    return _updated(_pretraining_optimizer(recipe), training, gradients)


@functools.partial(jax.jit, static_argnames="recipe")
def _supervised_step(
    recipe: Recipe,
    training: State,
    base: Tree,
    tokens: jax.Array,
    graded: jax.Array,
    key: jax.Array,
) -> tuple[State, jax.Array]:
    def loss_of(params: Tree) -> jax.Array:
        return _loss(recipe, _merged(base, params), tokens, graded, key)

    loss, gradients = jax.value_and_grad(loss_of)(training["params"])
    return _updated(_post_training_optimizer(recipe), training, gradients), loss


@functools.partial(jax.jit, static_argnames="recipe")
def _policy_step(
    recipe: Recipe, training: State, tokens: jax.Array, weight: jax.Array
) -> tuple[State, jax.Array]:
    """Update by REINFORCE (Williams, 1992) with advantages relative to a prompt's group.

    The run is on-policy, so there is no ratio to clip.
    """

    def loss_of(params: Tree) -> jax.Array:
        logits = _logits(recipe, params, tokens[:, :-1])[:, -tasks.DIGITS :]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -tasks.DIGITS :])
        return jnp.mean(weight[:, None] * losses)

    loss, gradients = jax.value_and_grad(loss_of)(training["params"])
    return _updated(_post_training_optimizer(recipe), training, gradients), loss


@functools.partial(jax.jit, static_argnames="recipe")
def _sampled(recipe: Recipe, weights: Tree, prompts: jax.Array, key: jax.Array) -> jax.Array:
    tokens = prompts
    for subkey in jax.random.split(key, tasks.DIGITS):
        fresh = jax.random.categorical(subkey, _logits(recipe, weights, tokens)[:, -1])
        tokens = jnp.concatenate([tokens, fresh[:, None].astype(tokens.dtype)], axis=1)
    return tokens


@functools.partial(jax.jit, static_argnames="recipe")
def _evaluated(recipe: Recipe, weights: Tree, tokens: jax.Array, graded: jax.Array) -> jax.Array:
    return _loss(recipe, weights, tokens, graded)
