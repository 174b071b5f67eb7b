"""Supervised fine-tuning in JAX, Flax nnx and Orbax: profile a run, choose a policy, checkpoint,
kill,
resume, and compare.

python examples/supervised_finetuning/train_flax.py                                   # a small
model, trained on the spot python examples/supervised_finetuning/train_flax.py --model PATH --data
FILE.jsonl    # a local transformers checkpoint (Llama), your data

Weights are bfloat16, with AdamW and masters in float32: 14 bytes a parameter, all of them in every
checkpoint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import deltacheck
from deltacheck import Policy, Profile, Profiler
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from deltacheck.evaluate.demo import checks
from deltacheck.evaluate.workloads import pairs, text
from deltacheck.evaluate.workloads.text import Batches, Rows

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument(
    "folder",
    type=Path,
    nargs="?",
    help="an empty one for all that is written (default: a temporary one)",
)
arguments.add_argument(
    "--model",
    type=Path,
    help="a local transformers checkpoint (default: a small model trained on the spot)",
)
arguments.add_argument(
    "--data",
    type=Path,
    help="text, or .jsonl with text or prompt and completion (default: Python functions)",
)
arguments.add_argument(
    "--policy", nargs="+", choices=("exact", "post_training"), default=["exact", "post_training"]
)
arguments.add_argument("--steps", type=int, default=240)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
arguments.add_argument(
    "--kill-in", type=int, help="the step that the run is killed in (default: in the last fifth)"
)
arguments.add_argument("--lr", type=float, default=1e-5)
arguments.add_argument("--batch", type=int, default=4, help="rows a step")
arguments.add_argument("--context", type=int, default=128, help="tokens a row")
arguments.add_argument("--seed", type=int, default=1)
arguments.add_argument(
    "--quick", action="store_true", help="a model too small to say anything about sizes, in seconds"
)


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
    """Stored in bfloat16, applied in float32: processors without bfloat16 units are faster so."""
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs
    )


def norm(sizes: Sizes, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        sizes.width, epsilon=sizes.eps, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs
    )


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al., 2021) of (batch, length, heads, head width)."""
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
            made.reshape(*x.shape[:2], -1, self.sizes.head_width)
            for made in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key = rotated(query, self.sizes.theta), rotated(key, self.sizes.theta)
        return self.o_proj(
            jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(
                *x.shape[:2], -1
            )
        )


class FeedForward(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.gate_proj = linear(sizes.width, sizes.hidden, rngs)
        self.up_proj = linear(sizes.width, sizes.hidden, rngs)
        self.down_proj = linear(sizes.hidden, sizes.width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.input_layernorm, self.self_attn = norm(sizes, rngs), Attention(sizes, rngs)
        self.post_attention_layernorm, self.mlp = norm(sizes, rngs), FeedForward(sizes, rngs)
        self.dropout = nnx.Dropout(sizes.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)), deterministic=deterministic)
        return x + self.dropout(
            self.mlp(self.post_attention_layernorm(x)), deterministic=deterministic
        )


class Llama(nnx.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary) float32."""

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
        self.norm = norm(sizes, rngs)
        self.lm_head = None if sizes.tied else linear(sizes.width, sizes.vocabulary, rngs)

    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, deterministic)
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def from_transformers(path: Path) -> Llama:
    """A local checkpoint of transformers. Refuses what is not a plain Llama, rather than to compute
    something else.
    """
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", local_files_only=True)
    config = source.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default":
        sys.exit(
            f"{path} is a {config.model_type} with {config.rope_parameters} positions; this file"
            " knows the first Llamas only"
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
        sys.exit(f"{path} has weights that this file has no place for: {', '.join(weights)}")
    nnx.update(model, params)
    return model


# --- What is trained, and on what -----------------------------------------------------------------


def small_sizes(options: argparse.Namespace) -> Sizes:
    """With dropout, so that its random keys are a part of a correct resume."""
    width, layers = (64, 1) if options.quick else (256, 4)
    hidden = 64 * ((width * 8 // 3 + 63) // 64)
    return Sizes(text.VOCABULARY, width, hidden, layers, width // 64, width // 64, 64, dropout=0.1)


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """What all runs begin with: rows of tokens, some held out, and where no weights are given,
    those of a small model.
    """
    coding, files = pairs.BYTES, 30 if options.quick else None
    if options.model:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        coding = pairs.Coding(
            lambda line: tokenizer.encode(line, add_special_tokens=False),
            begin,
            tokenizer.eos_token_id,
        )
    found = pairs.read(options.data) if options.data else pairs.standard_library(files)
    pairs.rows(found[::8][:32], coding, options.context).write(folder / "held_out.npz")
    pairs.rows((pair for at, pair in enumerate(found) if at % 8), coding, options.context).write(
        folder / "train.npz"
    )
    if not options.model:
        rows = text.pretraining_rows(text.standard_library(files), options.context)
        run = Run(
            Llama(small_sizes(options), nnx.Rngs(options.seed)),
            rows,
            lr=3e-3,
            batch=4,
            seed=options.seed,
        )
        for _ in range(0 if options.quick else 300):
            run.train_step()
        with manager((folder / "model").resolve()) as saved:
            saved.save(0, args=DeltaSaveArgs(run.params))


def load_model(options: argparse.Namespace, folder: Path) -> Llama:
    if options.model:
        return from_transformers(options.model)
    model = Llama(small_sizes(options), nnx.Rngs(options.seed))
    with manager((folder / "model").resolve()) as saved:
        nnx.update(model, saved.restore(0, args=DeltaRestoreArgs(nnx.state(model, nnx.Param))))
    return model


def loss_of(model: Llama, tokens: jax.Array, graded: jax.Array, deterministic: bool) -> jax.Array:
    """Mean cross-entropy of the graded tokens, each predicted from those before it."""
    logits = model(tokens[:, :-1], deterministic)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * graded[:, 1:]) / jnp.sum(graded[:, 1:])


# --- The run --------------------------------------------------------------------------------------


class Run:
    """A training. ``state()`` is everything that decides how it goes on, a pytree. Optax updates
    the master; the weight is the master, rounded.
    """

    def __init__(self, model: Llama, rows: Rows, lr: float, batch: int, seed: int) -> None:
        self.definition, self.params, self.rngs = nnx.split(model, nnx.Param, nnx.RngState)
        schedule = optax.linear_schedule(lr / 10, lr, 9)
        # Injected, so that the state tells the rate and the betas: a profile and a policy need
        # them.
        self.adamw = optax.inject_hyperparams(optax.adamw)(schedule, 0.9, 0.999, weight_decay=0.1)
        self.master = jax.tree.map(lambda weight: weight.astype(jnp.float32), self.params)
        self.optimizer = self.adamw.init(self.master)
        self.batches = Batches(rows, batch, seed)
        self.step = 0
        self._update = jax.jit(self._updated)
        self._held_out_loss = jax.jit(
            lambda params, *rows: loss_of(
                nnx.merge(self.definition, params, self.rngs), *rows, True
            )
        )

    def _updated(
        self, params: Any, master: Any, optimizer: Any, rngs: Any, tokens: Any, graded: Any
    ) -> Any:
        def loss_and_rngs(params: Any) -> Any:
            model = nnx.merge(self.definition, params, rngs, copy=True)  # variables of this trace
            return loss_of(model, tokens, graded, deterministic=False), nnx.state(
                model, nnx.RngState
            )

        (loss, rngs), gradients = jax.value_and_grad(loss_and_rngs, has_aux=True)(params)
        gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
        gradient_norm = optax.global_norm(gradients)
        gradients = jax.tree.map(
            lambda gradient: gradient / jnp.maximum(1.0, gradient_norm), gradients
        )
        updates, optimizer = self.adamw.update(gradients, optimizer, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), master)
        return params, master, optimizer, rngs, loss, gradient_norm

    def train_step(self) -> dict[str, float]:
        rows = next(self.batches)
        self.params, self.master, self.optimizer, self.rngs, loss, gradient_norm = self._update(
            self.params,
            self.master,
            self.optimizer,
            self.rngs,
            rows.tokens.astype(np.int32),
            rows.graded,
        )
        self.step += 1
        return {"loss": float(loss), "gradient_norm": float(gradient_norm)}

    def held_out_loss(self, folder: Path) -> float:
        rows = Rows.read(folder / "held_out.npz")
        return float(self._held_out_loss(self.params, rows.tokens.astype(np.int32), rows.graded))

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
        self.params, self.master, self.optimizer = (
            state["params"],
            state["master"],
            state["optimizer"],
        )
        self.rngs, self.step = state["rngs"], state["step"]
        self.batches.load_state_dict(state["data"])


def start(options: argparse.Namespace, folder: Path) -> Run:
    return Run(
        load_model(options, folder),
        Rows.read(folder / "train.npz"),
        options.lr,
        options.batch,
        options.seed,
    )


def checkpointed(options: argparse.Namespace, folder: Path, name: str, kill_in: int | None) -> None:
    """The run with checkpoints, from the newest if there is one. It may be killed, as a machine
    that fails would do it.
    """
    policy = (
        Policy.exact()
        if name == "exact"
        else Policy.post_training(Profile.read(folder / "profile.json"))
    )
    run = start(options, folder)
    with manager((folder / name).resolve(), policy=policy) as checkpoints:
        done = checkpoints.latest_step()
        if done is not None:
            run.load(
                checkpoints.restore(done, args=DeltaRestoreArgs(run.state()))
            )  # the target tells which types to build
            print(f"  resumed from step {run.step}")
        while run.step < options.steps:
            told = run.train_step()
            if run.step == kill_in:
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # nothing is flushed, no handler runs, a save under way is lost
            if run.step % options.every == 0 or run.step == options.steps:
                checkpoints.save(
                    run.step, args=DeltaSaveArgs(run.state(), metrics=told)
                )  # goes on in the background
                print(f"  step {run.step}: loss {told['loss']:.4f}", flush=True)


# --- The story ------------------------------------------------------------------------------------


def in_child(*told: Any) -> int:
    """Call ``checkpointed`` in a new process; its exit status, which is -9 after a SIGKILL."""
    child = multiprocessing.get_context("spawn").Process(target=checkpointed, args=told)
    child.start()
    child.join()
    return child.exitcode


def arrays_of(state: Any) -> dict[str, Any]:
    """Every leaf by its path, random keys as their data."""
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    options = arguments.parse_args()
    if options.quick:
        arguments.set_defaults(steps=120, context=96, batch=2)
        options = arguments.parse_args()  # what is given counts all the same
    kill_in = options.kill_in or options.steps * 5 // 6 + options.every // 2 + 1
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deltacheck-sft-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")

    began = time.perf_counter()
    prepare(options, folder)
    print(f"prepared in {time.perf_counter() - began:.0f} s in {folder}")

    print("1. A run that nobody stops, watched by a profiler")
    began = time.perf_counter()
    run, profiler = start(options, folder), Profiler(interval_steps=options.every)
    before = run.held_out_loss(folder)
    while run.step < options.steps:
        told = run.train_step()
        profiler.observe(run.step, run.state, **told)
    after, end = run.held_out_loss(folder), arrays_of(run.state())
    parameters = sum(weight.size for weight in jax.tree.leaves(run.params))
    print(
        f"  {parameters / 1e6:.2f} M parameters, {options.steps} steps in"
        f" {time.perf_counter() - began:.0f} s"
    )
    print(f"  held-out loss {before:.4f} before, {after:.4f} after")

    print("2. Its profile")
    profile = profiler.write(folder / "profile.json")
    kinds = [leaf.kind for leaf in profile.leaves.values()]
    print(
        f"  {', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))} of"
        f" {len(kinds)} leaves"
    )
    print(
        "  stable from"
        f" {'no step on' if profile.stable_start is None else f'step {profile.stable_start} on'}"
    )

    with ocp.CheckpointManager((folder / "plain").resolve()) as plain:
        plain.save(run.step, args=ocp.args.StandardSave(run.state()))
    plain_bytes = bytes_under(folder / "plain")
    for name in options.policy:
        print(f"3. The same run under Policy.{name}, killed in step {kill_in}")
        status = in_child(options, folder, name, kill_in)
        if status != -signal.SIGKILL:
            sys.exit(f"the run was to be killed, but ended with status {status}")
        print("  killed by SIGKILL")
        if in_child(options, folder, name, None) != 0:
            sys.exit("the resumed run failed")

        print("4. The resumed run against the uninterrupted one")
        with manager((folder / name).resolve()) as checkpoints:
            run.load(checkpoints.restore(options.steps, args=DeltaRestoreArgs(run.state())))
        resumed, verdict = (
            run.held_out_loss(folder),
            checks.compare("", end, arrays_of(run.state())),
        )
        print(
            f"  held-out loss {resumed:.6f}, uninterrupted {after:.6f}: difference"
            f" {resumed - after:+.1e}"
        )
        if verdict.holds:
            print(f"  every bit equal: {verdict.detail.removesuffix(', equal')}")
        elif name == "exact":
            sys.exit(f"every bit must be equal under Policy.exact, but {verdict.detail}")
        else:
            print(
                "  not every bit, which this policy does not promise:"
                f" {verdict.detail.partition(',')[0]}"
            )
        count, stored = len(deltacheck.open(folder / name).steps()), bytes_under(folder / name)
        print(
            f"  {count} checkpoints: {stored / 1e6:.2f} MB, as plain Orbax steps"
            f" {count * plain_bytes / 1e6:.2f} MB",
            end="",
        )
        print(f" ({stored / count / plain_bytes:.1%})")


if __name__ == "__main__":
    main()
