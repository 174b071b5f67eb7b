"""An inference worker beside `rl_like.py` that keeps its own copy of the weights up to date.

Give it the folder of a running rl_like.py, and the policy whose run it follows:

    python -m examples.experiments.follower FOLDER exact

It reads changed weights only, takes no lock and tells the trainer nothing. After each update it
compares a digest of its copy with the digest that the trainer took of its weights, and answers some
prompts with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import deltacheck
from deltacheck.backends.torch import apply
from examples.experiments import experiment, pairs
from examples.experiments.rl_like import encode, weights_sha256
from examples.experiments.torch_experiment import load_model, logits_of

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
arguments.add_argument("policy", choices=("exact", "auto"), help="of the run that is followed")
arguments.add_argument(
    "--model",
    type=Path,
    help="the local transformers checkpoint that rl_like.py was given, for its configuration",
)
arguments.add_argument(
    "--until", type=int, help="the step to end after (default: when nothing has come for --timeout)"
)
arguments.add_argument("--timeout", type=float, default=120, help="seconds to wait for a next step")


def is_followed(path: str) -> bool:
    """Select the weights and their digest from the trainer's state."""
    return path.startswith("model/") or path == "weights_sha256"


def wait_for_root(root: Path, timeout: float) -> deltacheck.Follower:
    """Follow a root that the trainer may not have created yet."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return deltacheck.follow(root, leaves=is_followed, timeout=timeout)
        except deltacheck.errors.NotACheckpointRoot:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@torch.no_grad()
def answer(model: nn.Module, prompt: Tensor, length: int) -> Tensor:
    """Generate the likeliest tokens, one after the other."""
    tokens = prompt
    for _ in range(length):
        tokens = torch.cat([tokens, logits_of(model, tokens[None])[0, -1].argmax()[None]])
    return tokens[-length:]


def main() -> None:
    options = arguments.parse_args()
    torch.set_num_threads(1)
    coding = experiment.coding_of(options.model)
    questions = pairs.read(options.folder / "held_out.jsonl")[:16]
    prompts = [encode(pair, coding) for pair in questions]
    model = load_model(options.model, options.folder).eval()
    # The model's own tensors, so that an update changes them in place.
    copy = {"model": model.state_dict(), "weights_sha256": torch.zeros(32, dtype=torch.uint8)}

    size = sum(parameter.numel() for parameter in model.parameters())
    updates = wait_for_root(options.folder / options.policy, options.timeout)
    for count, update in enumerate(updates, start=1):
        # ``check`` compares each changed leaf with the digest of its step.
        apply(update, copy, check=True)
        if not torch.equal(weights_sha256(model), copy["weights_sha256"]):
            sys.exit(f"follower: at step {update.step} this copy is not what the trainer had")
        changed = sum(
            change.values.size
            for path, change in update.changes.items()
            if path.startswith("model/")
        )
        correct = sum(
            torch.equal(answer(model, prompt, len(right)), right) for prompt, right in prompts
        )
        share = f"{changed / size:.2%} of the weights taken over, digest equal to the trainer's"
        answers = f"{correct} of {len(prompts)} prompts answered right"
        experiment.say(f"    follower: step {update.step}, {share}, {answers}")
        if options.until is not None and update.step >= options.until:
            digests = "each with the digest of the trainer's weights"
            experiment.say(f"    follower: {count} updates, {digests}")
            return
    if options.until is not None:
        sys.exit(
            f"follower: nothing new for {options.timeout:g} s, and step {options.until} has not"
            " come"
        )


if __name__ == "__main__":
    main()
