"""Supervised fine-tuning in PyTorch: profile a run, choose a policy, checkpoint, kill, resume, and
compare.

python examples/supervised_finetuning/train_torch.py                                   # a small
model, trained on the spot python examples/supervised_finetuning/train_torch.py --model PATH --data
FILE.jsonl    # a local transformers checkpoint, your data

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

import deltacheck
from deltacheck import Policy, Profile, Profiler
from deltacheck.backends.torch import Engine, load
from deltacheck.evaluate.demo import checks
from deltacheck.evaluate.workloads import pairs, text
from deltacheck.evaluate.workloads.model import LanguageModel
from deltacheck.evaluate.workloads.optimizer import MixedPrecisionAdamW
from deltacheck.evaluate.workloads.plan import Plan
from deltacheck.evaluate.workloads.text import Batches, Rows
from deltacheck.evaluate.workloads.train import be_deterministic, small_model

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
    "--threads",
    type=int,
    default=2,
    help="a number, as the sums that a resume must repeat depend on it",
)
arguments.add_argument(
    "--quick", action="store_true", help="a model too small to say anything about sizes, in seconds"
)


# --- What is trained, and on what -----------------------------------------------------------------


def plan_of(options: argparse.Namespace) -> Plan:
    """The sizes of the small model. With dropout, so that the generator's state is a part of a
    correct resume.
    """
    sizes = (
        {"width": 64, "layers": 1, "heads": 2, "pretrain_steps": 20}
        if options.quick
        else {"pretrain_steps": 300}
    )
    return Plan(
        options.seed, options.threads, context=options.context, batch=4, pretrain_rate=3e-3, **sizes
    )


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
        sources = text.standard_library(files)
        model = small_model(plan_of(options), text.pretraining_rows(sources, options.context))
        torch.save(model.state_dict(), folder / "model.pt")


def load_model(options: argparse.Namespace, folder: Path) -> nn.Module:
    if options.model:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, local_files_only=True
        )
    model = LanguageModel(plan_of(options))
    model.load_state_dict(torch.load(folder / "model.pt"))
    return model


def loss_of(model: nn.Module, rows: Rows) -> Tensor:
    """Mean cross-entropy of the graded tokens, each predicted from those before it."""
    tokens, graded = torch.from_numpy(rows.tokens), torch.from_numpy(rows.graded)
    output = model(tokens[:, :-1])
    logits = getattr(output, "logits", output)  # transformers wrap them
    return F.cross_entropy(logits[graded[:, 1:]].float(), tokens[:, 1:][graded[:, 1:]])


@torch.no_grad()
def held_out_loss(model: nn.Module, folder: Path) -> float:
    model.eval()
    return loss_of(model, Rows.read(folder / "held_out.npz")).item()


# --- The run --------------------------------------------------------------------------------------


class Run:
    """A training. ``state()`` is everything that decides how it goes on."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        be_deterministic(options.threads)
        torch.manual_seed(options.seed)
        self.model = load_model(options, folder)
        self.optimizer = MixedPrecisionAdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.999)
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.batches = Batches(Rows.read(folder / "train.npz"), options.batch, options.seed)
        self.step = 0

    def train_step(self) -> dict[str, float]:
        self.model.train()
        loss = loss_of(self.model, next(self.batches))
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return {"loss": loss.item(), "gradient_norm": norm.item()}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


def uninterrupted(options: argparse.Namespace, folder: Path) -> Run:
    """The run without deltacheck's checkpoints. A profiler looks at it, and the end of it is kept
    as torch keeps it.
    """
    run, profiler = Run(options, folder), Profiler(interval_steps=options.every)
    while run.step < options.steps:
        told = run.train_step()
        profiler.observe(run.step, run.state, **told)
    profiler.write(folder / "profile.json")
    torch.save(run.state(), folder / "uninterrupted.pt")
    return run


def checkpointed(options: argparse.Namespace, folder: Path, name: str, kill_in: int | None) -> None:
    """The same run with checkpoints, from the newest if there is one. It may be killed, as a
    machine that fails would do it.
    """
    policy = (
        Policy.exact()
        if name == "exact"
        else Policy.post_training(Profile.read(folder / "profile.json"))
    )
    run, under_way = Run(options, folder), None
    with Engine(folder / name, policy=policy) as engine:
        if engine.steps():
            run.load(engine.restore())
            print(f"  resumed from step {run.step}")
        while run.step < options.steps:
            told = run.train_step()
            if run.step == kill_in:
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # nothing is flushed, no handler runs, a save under way is lost
            if run.step % options.every == 0 or run.step == options.steps:
                tell(under_way)  # of the save before, for which this one would wait in any case
                under_way = engine.save(run.step, run.state(), metrics=told)
        tell(under_way)


def tell(handle: deltacheck.SaveHandle | None) -> None:
    if handle is not None:
        report = handle.result()
        share = report.stored_bytes / report.raw_bytes
        print(
            f"  step {report.step}: loss {report.metrics['loss']:.4f}, {share:.2%} of the state"
            " written",
            flush=True,
        )


# --- The story ------------------------------------------------------------------------------------


def in_child(*told: Any) -> int:
    """Call ``checkpointed`` in a new process; its exit status, which is -9 after a SIGKILL."""
    child = multiprocessing.get_context("spawn").Process(target=checkpointed, args=told)
    child.start()
    child.join()
    return child.exitcode


def main() -> None:
    options = arguments.parse_args()
    if options.quick:
        arguments.set_defaults(steps=120, context=96, batch=2, threads=1)
        options = arguments.parse_args()  # what is given counts all the same
    kill_in = options.kill_in or options.steps * 5 // 6 + options.every // 2 + 1
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deltacheck-sft-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")

    be_deterministic(options.threads)
    began = time.perf_counter()
    prepare(options, folder)
    before = held_out_loss(load_model(options, folder), folder)
    print(f"prepared in {time.perf_counter() - began:.0f} s in {folder}")

    print("1. A run that nobody stops, watched by a profiler")
    began = time.perf_counter()
    whole = uninterrupted(options, folder)
    after = held_out_loss(whole.model, folder)
    parameters = sum(parameter.numel() for parameter in whole.model.parameters())
    print(
        f"  {parameters / 1e6:.2f} M parameters, {options.steps} steps in"
        f" {time.perf_counter() - began:.0f} s"
    )
    print(f"  held-out loss {before:.4f} before, {after:.4f} after")

    print("2. Its profile")
    profile = Profile.read(folder / "profile.json")
    kinds = [leaf.kind for leaf in profile.leaves.values()]
    print(
        f"  {', '.join(f'{kinds.count(kind)} {kind}' for kind in dict.fromkeys(kinds))} of"
        f" {len(kinds)} leaves"
    )
    print(
        "  stable from"
        f" {'no step on' if profile.stable_start is None else f'step {profile.stable_start} on'}"
    )

    plain = (folder / "uninterrupted.pt").stat().st_size
    for name in options.policy:
        print(f"3. The same run under Policy.{name}, killed in step {kill_in}")
        status = in_child(options, folder, name, kill_in)
        if status != -signal.SIGKILL:
            sys.exit(f"the run was to be killed, but ended with status {status}")
        print("  killed by SIGKILL")
        if in_child(options, folder, name, None) != 0:
            sys.exit("the resumed run failed")

        print("4. The resumed run against the uninterrupted one")
        end = load(folder / name)
        whole.model.load_state_dict(end["model"])
        resumed = held_out_loss(whole.model, folder)
        print(
            f"  held-out loss {resumed:.6f}, uninterrupted {after:.6f}: difference"
            f" {resumed - after:+.1e}"
        )
        verdict = checks.compare("", torch.load(folder / "uninterrupted.pt"), end)
        if verdict.holds:
            print(f"  every bit equal: {verdict.detail.removesuffix(', equal')}")
        elif name == "exact":
            sys.exit(f"every bit must be equal under Policy.exact, but {verdict.detail}")
        else:
            print(
                "  not every bit, which this policy does not promise:"
                f" {verdict.detail.partition(',')[0]}"
            )
        count = len(deltacheck.open(folder / name).steps())
        stored = sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())
        print(
            f"  {count} checkpoints: {stored / 1e6:.2f} MB, as torch.save files"
            f" {count * plain / 1e6:.2f} MB",
            end="",
        )
        print(f" ({stored / count / plain:.1%})")


if __name__ == "__main__":
    main()
