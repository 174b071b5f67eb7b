"""Reinforcement learning at lr 1e-6, followed live by an inference worker; killed, resumed, and
compared with a run that nobody stopped.

python examples/rl_like/train.py                                   # a small model that adds two
numbers, trained on the spot python examples/rl_like/train.py --model PATH --data FILE.jsonl    # a
local transformers checkpoint, your prompts with their answers

Answers are sampled in groups, a checker rewards right tokens, and each answer is judged against its
group (GRPO; Shao et al., 2024). Weights are bfloat16, with AdamW and masters in float32. At this
rate few bfloat16 weights change from step to step: that is what a worker receives. The worker is
`follower.py`, a process of its own; start more of them by hand, while the run goes on: python
examples/rl_like/follower.py FOLDER exact
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import deltacheck
from deltacheck import Policy, Profile, Profiler
from deltacheck.backends.torch import Engine, load
from deltacheck.evaluate.demo import checks
from deltacheck.evaluate.workloads import pairs
from deltacheck.evaluate.workloads.model import LanguageModel
from deltacheck.evaluate.workloads.optimizer import MixedPrecisionAdamW
from deltacheck.evaluate.workloads.pairs import Coding, Pair
from deltacheck.evaluate.workloads.plan import Plan
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
    "--data", type=Path, help=".jsonl with prompt and completion, the right answer (default: sums)"
)
arguments.add_argument(
    "--policy", nargs="+", choices=("exact", "post_training"), default=["exact", "post_training"]
)
arguments.add_argument("--steps", type=int, default=240)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
arguments.add_argument(
    "--kill-in", type=int, help="the step that the run is killed in (default: in the last fifth)"
)
arguments.add_argument("--lr", type=float, default=1e-6)
arguments.add_argument("--prompts", type=int, default=4, help="a step")
arguments.add_argument("--group", type=int, default=8, help="answers to each prompt")
arguments.add_argument("--seed", type=int, default=1)
arguments.add_argument(
    "--threads",
    type=int,
    default=1,
    help="a number, as the sums that a resume must repeat depend on it",
)
arguments.add_argument(
    "--quick", action="store_true", help="a model too small to say anything about sizes, in seconds"
)


# --- What is trained, and on what -----------------------------------------------------------------


def sums(wrong: float) -> list[Pair]:
    """All sums of two numbers below 100, always in the same order, with this share of wrong digits
    in their answers.
    """
    dice = random.Random(0)
    found = []
    for left, right in dice.sample(
        [(left, right) for left in range(100) for right in range(100)], 10_000
    ):
        digits = [
            dice.choice("0123456789") if dice.random() < wrong else digit
            for digit in f"{left + right:03d}"
        ]
        found.append(Pair(f"{left:02d}+{right:02d}=", "".join(digits)))
    return found


def coding_of(model: Path | None) -> Coding:
    if model is None:
        return pairs.BYTES
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Coding(
        lambda line: tokenizer.encode(line, add_special_tokens=False), begin, tokenizer.eos_token_id
    )


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """What all runs begin with: prompts and answers, some held out, and where no weights are given,
    those of a small model.
    """
    found = pairs.read(options.data) if options.data else sums(wrong=0)
    if not all(pair.prompt and pair.answer for pair in found):
        sys.exit(
            f"{options.data} has a line without a prompt or without a completion: nothing to"
            " answer, or nothing to check by"
        )
    for name, some in (
        ("held_out", found[::8][:32]),
        ("train", [pair for at, pair in enumerate(found) if at % 8]),
    ):
        lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in some]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    sizes = (
        {"width": 64, "layers": 1, "heads": 2, "pretrain_steps": 30}
        if options.quick
        else {"pretrain_steps": 300}
    )
    plan = Plan(
        options.seed,
        options.threads,
        context=32,
        dropout=0.0,
        batch=64,
        pretrain_rate=3e-3,
        **sizes,
    )
    plan.write(folder)
    if (
        not options.model
    ):  # it learns from sums with mistakes in them: reinforcement has something to do
        model = small_model(plan, pairs.rows(sums(wrong=0.3), pairs.BYTES, context=10))
        torch.save(model.state_dict(), folder / "model.pt")


def load_model(model: Path | None, folder: Path) -> nn.Module:
    if model is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, local_files_only=True
        )
    small = LanguageModel(Plan.read(folder))
    small.load_state_dict(torch.load(folder / "model.pt"))
    return small


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return getattr(output, "logits", output).float()  # transformers wrap them


def asked_and_right(pair: Pair, coding: Coding) -> tuple[Tensor, Tensor]:
    """The tokens of a prompt (length,) and of its right answer (length of the answer,)."""
    return torch.tensor([coding.begin, *coding.encode(pair.prompt)]), torch.tensor(
        coding.encode(pair.answer)
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, folder: Path, coding: Coding) -> float:
    """Mean cross-entropy of the right answers to the prompts that are never trained on."""
    model.eval()
    losses = []
    for pair in pairs.read(folder / "held_out.jsonl"):
        asked, right = asked_and_right(pair, coding)
        logits = logits_of(model, torch.cat([asked, right])[None, :-1])[0, len(asked) - 1 :]
        losses.append(F.cross_entropy(logits, right).item())
    return sum(losses) / len(losses)


def weights_sha256(model: nn.Module) -> Tensor:
    """A digest of every bit of the weights, uint8 (32,). It is a leaf of each checkpoint, for
    whoever follows the run to compare with.
    """
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(
            name.encode()
            + weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


# --- The run --------------------------------------------------------------------------------------


class Run:
    """A training. ``state()`` is everything that decides how it goes on."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        be_deterministic(options.threads)
        torch.manual_seed(options.seed)  # of the sampling, too
        self.model, self.coding = load_model(options.model, folder), coding_of(options.model)
        self.optimizer = MixedPrecisionAdamW(
            self.model.parameters(), lr=options.lr, betas=(0.9, 0.999)
        )
        self.pairs = pairs.read(folder / "train.jsonl")
        self.prompts, self.group, self.step = options.prompts, options.group, 0

    def train_step(self) -> dict[str, float]:
        """One step on the next prompts. Its loss is 1 - mean reward."""
        self.model.train()
        rewards = []
        for number in range(self.step * self.prompts, (self.step + 1) * self.prompts):
            asked, right = asked_and_right(self.pairs[number % len(self.pairs)], self.coding)
            answers = self.sample(asked, len(right))
            reward = (answers == right).float().mean(dim=1)
            advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-4)
            tokens = torch.cat([asked.expand(self.group, -1), answers], dim=1)
            logits = logits_of(self.model, tokens[:, :-1])[:, len(asked) - 1 :]
            chosen = -F.cross_entropy(
                logits.flatten(0, 1), answers.flatten(), reduction="none"
            ).view_as(answers)
            (-(advantage[:, None] * chosen).mean() / self.prompts).backward()
            rewards.append(reward.mean().item())
        norm = clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return {"loss": 1 - sum(rewards) / len(rewards), "gradient_norm": norm.item()}

    @torch.no_grad()
    def sample(self, asked: Tensor, length: int) -> Tensor:
        tokens = asked.expand(self.group, -1)
        for _ in range(length):
            chances = logits_of(self.model, tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens[:, len(asked) :]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "weights_sha256": weights_sha256(self.model),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,  # says which prompts are next, too
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]


def checkpointed(options: argparse.Namespace, folder: Path, name: str, kill_in: int | None) -> None:
    """The run with checkpoints, from the newest if there is one. It may be killed, as a machine
    that fails would do it.
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
            print(f"  resumed from step {run.step}\n", end="", flush=True)
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
        line = (
            f"  step {report.step}: mean reward {1 - report.metrics['loss']:.2f}, {share:.2%} of"
            " the state written\n"
        )
        print(line, end="", flush=True)  # in one write: the follower speaks, too


# --- The story ------------------------------------------------------------------------------------


def in_child(*told: Any) -> int:
    """Call ``checkpointed`` in a new process; its exit status, which is -9 after a SIGKILL."""
    child = multiprocessing.get_context("spawn").Process(target=checkpointed, args=told)
    child.start()
    child.join()
    return child.exitcode


def start_follower(options: argparse.Namespace, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A worker that follows the run until its last step. It is not told of the kill, nor of the
    resume.
    """
    command = [
        sys.executable,
        Path(__file__).with_name("follower.py"),
        folder,
        name,
        "--until",
        str(options.steps),
    ]
    return subprocess.Popen([*command, *(["--model", options.model] if options.model else [])])


def main() -> None:
    options = arguments.parse_args()
    if options.quick:
        arguments.set_defaults(steps=120, prompts=2, group=4)
        options = arguments.parse_args()  # what is given counts all the same
    kill_in = options.kill_in or options.steps * 5 // 6 + options.every // 2 + 1
    folder = options.folder or Path(tempfile.mkdtemp(prefix="deltacheck-rl-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")

    be_deterministic(options.threads)
    began = time.perf_counter()
    prepare(options, folder)
    print(f"prepared in {time.perf_counter() - began:.0f} s in {folder}")

    print("1. A run that nobody stops, watched by a profiler")
    began = time.perf_counter()
    run, profiler = Run(options, folder), Profiler(interval_steps=options.every)
    before = held_out_loss(run.model, folder, run.coding)
    while run.step < options.steps:
        told = run.train_step()
        profiler.observe(run.step, run.state, **told)
    torch.save(run.state(), folder / "uninterrupted.pt")
    after = held_out_loss(run.model, folder, run.coding)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
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

    plain = (folder / "uninterrupted.pt").stat().st_size
    for name in options.policy:
        print(
            f"3. The same run under Policy.{name}, followed live, killed in step {kill_in}",
            flush=True,
        )
        follower = start_follower(options, folder, name)
        try:
            status = in_child(options, folder, name, kill_in)
            if status != -signal.SIGKILL:
                sys.exit(f"the run was to be killed, but ended with status {status}")
            print("  killed by SIGKILL\n", end="", flush=True)
            if in_child(options, folder, name, None) != 0:
                sys.exit("the resumed run failed")
            if follower.wait(timeout=600) != 0:
                sys.exit("the follower failed")
        finally:
            follower.kill()  # where it has not ended by itself

        print("4. The resumed run against the uninterrupted one")
        end = load(folder / name)
        run.model.load_state_dict(end["model"])
        resumed = held_out_loss(run.model, folder, run.coding)
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
