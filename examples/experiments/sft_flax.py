"""Supervised fine-tuning in JAX, Flax nnx and Orbax: profile, checkpoint, kill, resume, compare.

A small model, trained on the spot:

    python -m examples.experiments.sft_flax

A local transformers checkpoint (Llama) and your data:

    python -m examples.experiments.sft_flax --model PATH --data FILE.jsonl

Weights are bfloat16, with AdamW and masters in float32: 14 bytes per parameter, all of them in
every checkpoint. This file contains the model, the training and its checkpoints; the course of the
experiment is in `examples/experiments/experiment.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from benchmarks.workloads import text
from benchmarks.workloads.text import Batches, Rows
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from examples.experiments import experiment
from examples.experiments.experiment import Experiment

arguments = experiment.argument_parser(__doc__, lr=1e-5)
experiment.add_row_arguments(arguments)


# --- The model: a Llama, its modules named as transformers name them ------------------------------


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    dropout: float = 0.0
    theta: float = 10_000.0  # of the rotary positions
    eps: float = 1e-6
    tied: bool = True  # the embedding is the last matrix, too


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Create a matrix that is stored in bfloat16 and applied in float32.

    Processors without bfloat16 units are faster with float32.
    """
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs
    )


def normalization(sizes: Sizes, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        sizes.width, epsilon=sizes.eps, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs
    )


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Apply rotary positions (Su et al., 2021) to (batch, length, heads, head width)."""
    rates = theta ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = jnp.outer(jnp.arange(x.shape[1]), rates)[:, None]
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.sizes = sizes
        self.q_proj = linear(sizes.width, sizes.heads * sizes.head_width, rngs)
        self.k_proj = linear(sizes.width, sizes.kv_heads * sizes.head_width, rngs)
        self.v_proj = linear(sizes.width, sizes.kv_heads * sizes.head_width, rngs)
        self.o_proj = linear(sizes.heads * sizes.head_width, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = (
            projected.reshape(*x.shape[:2], -1, self.sizes.head_width)
            for projected in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = rotated(query, self.sizes.theta), rotated(key, self.sizes.theta)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class FeedForward(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.gate_proj = linear(sizes.width, sizes.hidden, rngs)
        self.up_proj = linear(sizes.width, sizes.hidden, rngs)
        self.down_proj = linear(sizes.hidden, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.input_layernorm, self.self_attn = normalization(sizes, rngs), Attention(sizes, rngs)
        self.post_attention_layernorm, self.mlp = (
            normalization(sizes, rngs),
            FeedForward(sizes, rngs),
        )
        self.dropout = nnx.Dropout(sizes.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)), deterministic=deterministic)
        return x + self.dropout(
            self.mlp(self.post_attention_layernorm(x)), deterministic=deterministic
        )


class Llama(nnx.Module):
    """A map of tokens (batch, length) to logits (batch, length, vocabulary) float32."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        initial = nnx.initializers.normal(0.02)
        self.embed_tokens = nnx.Embed(
            sizes.vocabulary,
            sizes.width,
            dtype=jnp.float32,
            param_dtype=jnp.bfloat16,
            embedding_init=initial,
            rngs=rngs,
        )
        self.layers = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = normalization(sizes, rngs)
        self.lm_head = None if sizes.tied else linear(sizes.width, sizes.vocabulary, rngs)

    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, deterministic)
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def from_transformers(path: Path) -> Llama:
    """Load a local checkpoint of transformers; exit if it is not a plain Llama."""
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", local_files_only=True)
    config = source.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default":
        sys.exit(
            f"{path} is a {config.model_type} with {config.rope_parameters} positions; this file"
            " supports the first Llamas only"
        )
    sizes = Sizes(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
    )
    model = Llama(sizes, nnx.Rngs(0))
    weights = {name.removeprefix("model."): tensor for name, tensor in source.state_dict().items()}
    if sizes.tied:
        del weights["lm_head.weight"]
    params = nnx.state(model, nnx.Param)
    for path_in_model, param in nnx.to_flat_state(params):
        *modules, kind = path_in_model
        weight = jnp.asarray(
            weights.pop(".".join(map(str, [*modules, "weight"]))).float().numpy(), jnp.bfloat16
        )
        param[...] = weight.T if kind == "kernel" else weight
    if weights:
        sys.exit(f"{path} has weights that this file does not use: {', '.join(weights)}")
    nnx.update(model, params)
    return model


# --- The run --------------------------------------------------------------------------------------


def loss_of(model: Llama, tokens: jax.Array, graded: jax.Array, deterministic: bool) -> jax.Array:
    """Return the mean cross-entropy of the graded tokens, each predicted from its prefix."""
    logits = model(tokens[:, :-1], deterministic)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * graded[:, 1:]) / jnp.sum(graded[:, 1:])


class Run:
    """A training run. ``state()`` is everything that decides how it continues, a pytree.

    Optax updates the master; the weight is the rounded master.
    """

    def __init__(self, model: Llama, rows: Rows, lr: float, batch: int, seed: int) -> None:
        self.definition, self.params, self.rngs = nnx.split(model, nnx.Param, nnx.RngState)
        schedule = optax.linear_schedule(lr / 10, lr, 9)
        # Injected, so that the state contains the rate and the betas: a profile and a policy need
        # them.
        self.adamw = optax.inject_hyperparams(optax.adamw)(schedule, 0.9, 0.999, weight_decay=0.1)
        self.master = jax.tree.map(lambda weight: weight.astype(jnp.float32), self.params)
        self.optimizer = self.adamw.init(self.master)
        self.batches = Batches(rows, batch, seed)
        self.step = 0
        self._compiled_update = jax.jit(self._update)
        self._compiled_loss = jax.jit(self._loss)

    def train_step(self) -> dict[str, float]:
        rows = next(self.batches)
        self.params, self.master, self.optimizer, self.rngs, loss, norm = self._compiled_update(
            self.params,
            self.master,
            self.optimizer,
            self.rngs,
            rows.tokens.astype(np.int32),
            rows.graded,
        )
        self.step += 1
        return {"loss": float(loss), "gradient_norm": float(norm)}

    def loss(self, rows: Rows) -> float:
        """Return the loss without dropout."""
        return float(self._compiled_loss(self.params, rows.tokens.astype(np.int32), rows.graded))

    def state(self) -> dict[str, Any]:
        return {
            "params": self.params,
            "master": self.master,
            "optimizer": self.optimizer,
            "rngs": self.rngs,
            "data": self.batches.state_dict(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.params, self.master = state["params"], state["master"]
        self.optimizer, self.rngs = state["optimizer"], state["rngs"]
        self.batches.load_state_dict(state["data"])
        self.step = state["step"]

    def _loss(self, params: Any, tokens: Any, graded: Any) -> jax.Array:
        return loss_of(nnx.merge(self.definition, params, self.rngs), tokens, graded, True)

    def _update(
        self, params: Any, master: Any, optimizer: Any, rngs: Any, tokens: Any, graded: Any
    ) -> Any:
        def loss_and_rngs(params: Any) -> Any:
            # A copy, because dropout changes the generator variables of this trace.
            model = nnx.merge(self.definition, params, rngs, copy=True)
            loss = loss_of(model, tokens, graded, deterministic=False)
            return loss, nnx.state(model, nnx.RngState)

        (loss, rngs), gradients = jax.value_and_grad(loss_and_rngs, has_aux=True)(params)
        gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
        norm = optax.global_norm(gradients)
        gradients = jax.tree.map(lambda gradient: gradient / jnp.maximum(1.0, norm), gradients)
        updates, optimizer = self.adamw.update(gradients, optimizer, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), master)
        return params, master, optimizer, rngs, loss, norm


class FineTuning(Experiment):
    """The fine-tuning of all weights."""

    name = "sft"
    peer = "plain Orbax steps"

    def create_run(self) -> Run:
        options, rows = self.options, Rows.read(self.folder / experiment.TRAINING_ROWS)
        return Run(self.load_model(), rows, options.lr, options.batch, options.seed)

    def train_with_checkpoints(self, policy: str, kill_in: int | None) -> None:
        run = self.create_run()
        chosen = experiment.policy_of(policy, self.folder)
        with manager(self.folder / policy, policy=chosen) as checkpoints:
            latest = checkpoints.latest_step()
            if latest is not None:
                # The target says which types to build.
                run.load(checkpoints.restore(latest, args=DeltaRestoreArgs(run.state())))
                experiment.say(f"  resumed from step {run.step}")
            for metrics in experiment.train_to_checkpoints(run, self.options, kill_in):
                # The save continues in the background.
                checkpoints.save(run.step, args=DeltaSaveArgs(run.state(), metrics=metrics))
                experiment.say(f"  step {run.step}: loss {metrics['loss']:.4f}")

    # --- Model and data ---

    def prepare(self) -> None:
        options = self.options
        experiment.write_rows(options, self.folder)
        if options.model is None:
            sources = text.standard_library(experiment.files(options))
            rows = text.pretraining_rows(sources, options.context)
            run = Run(self.new_model(), rows, lr=3e-3, batch=4, seed=options.seed)
            for _ in range(0 if options.quick else 300):
                run.train_step()
            with manager(self.folder / "model") as checkpoints:
                checkpoints.save(0, args=DeltaSaveArgs(run.params))

    def new_model(self) -> Llama:
        """Create a small model with dropout, whose random keys are a part of a correct resume."""
        width, layers = (64, 1) if self.options.quick else (256, 4)
        hidden, heads = 64 * ((width * 8 // 3 + 63) // 64), width // 64
        sizes = Sizes(text.VOCABULARY, width, hidden, layers, heads, heads, 64, dropout=0.1)
        return Llama(sizes, nnx.Rngs(self.options.seed))

    def load_model(self) -> Llama:
        if self.options.model:
            return from_transformers(self.options.model)
        model = self.new_model()
        with manager(self.folder / "model") as checkpoints:
            target = nnx.state(model, nnx.Param)
            nnx.update(model, checkpoints.restore(0, args=DeltaRestoreArgs(target)))
        return model

    def held_out_loss(self, run: Run) -> float:
        return run.loss(Rows.read(self.folder / experiment.HELD_OUT_ROWS))

    # --- Comparison ---

    def parameters(self, run: Run) -> str:
        count = sum(weight.size for weight in jax.tree.leaves(run.params))
        return f"{count / 1e6:.2f} M parameters"

    def save_plain(self, run: Run) -> int:
        with ocp.CheckpointManager(self.folder / "plain") as plain:
            plain.save(run.step, args=ocp.args.StandardSave(run.state()))
        return experiment.bytes_under(self.folder / "plain")

    def final_state(self, run: Run) -> dict[str, Any]:
        return arrays_of(run.state())

    def restore(self, run: Run, policy: str) -> dict[str, Any]:
        with manager(self.folder / policy) as checkpoints:
            last = self.options.steps
            run.load(checkpoints.restore(last, args=DeltaRestoreArgs(run.state())))
        return arrays_of(run.state())


def arrays_of(state: Any) -> dict[str, Any]:
    """Return every leaf by its path, random keys as their data."""
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


if __name__ == "__main__":
    experiment.main(arguments, FineTuning, steps=120, context=96, batch=2)
