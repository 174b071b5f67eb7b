"""An inference worker beside `train.py`: it keeps its own copy of the weights, and brings it in
place
to each step that the trainer commits.

python examples/rl_like/follower.py FOLDER exact    # the folder of a running train.py, and the
policy whose run is to be followed

It reads changed weights alone, takes no lock and tells the trainer nothing. After each update it
compares a digest of its own copy with the digest that the trainer took of its weights, and answers
some prompts with them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from train import asked_and_right, coding_of, load_model, logits_of, weights_sha256

import deltacheck
from deltacheck.backends.torch import apply
from deltacheck.evaluate.workloads import pairs

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
arguments.add_argument(
    "policy", choices=("exact", "post_training"), help="of the run that is followed"
)
arguments.add_argument(
    "--model",
    type=Path,
    help="the local transformers checkpoint that train.py was given, for its configuration",
)
arguments.add_argument(
    "--until", type=int, help="the step to end after (default: when nothing has come for --timeout)"
)
arguments.add_argument("--timeout", type=float, default=120, help="seconds to wait for a next step")


def is_followed(path: str) -> bool:
    """Of the leaves of the trainer's state: the weights and their digest, nothing of the
    optimizer.
    """
    return path.startswith("model/") or path == "weights_sha256"


def begin_to_follow(root: Path, timeout: float) -> deltacheck.Follower:
    """The trainer may not have begun yet."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return deltacheck.follow(root, leaves=is_followed, timeout=timeout)
        except deltacheck.errors.NotACheckpointRoot:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@torch.no_grad()
def answered(model: nn.Module, asked: Tensor, length: int) -> Tensor:
    """The likeliest token, one after the other."""
    for _ in range(length):
        asked = torch.cat([asked, logits_of(model, asked[None])[0, -1].argmax()[None]])
    return asked[-length:]


def say(what: str) -> None:
    """In one write: the trainer speaks, too."""
    print(f"    follower: {what}\n", end="", flush=True)


def main() -> None:
    options = arguments.parse_args()
    torch.set_num_threads(1)
    coding = coding_of(options.model)
    prompts = [
        asked_and_right(pair, coding) for pair in pairs.read(options.folder / "held_out.jsonl")[:16]
    ]
    model = load_model(options.model, options.folder).eval()
    copy = {
        "model": model.state_dict(),
        "weights_sha256": torch.zeros(32, dtype=torch.uint8),
    }  # the model's own tensors

    size = sum(parameter.numel() for parameter in model.parameters())
    for count, update in enumerate(
        begin_to_follow(options.folder / options.policy, options.timeout), start=1
    ):
        apply(
            update, copy, check=True
        )  # in place; each changed leaf is compared with the digest of its step
        if not torch.equal(weights_sha256(model), copy["weights_sha256"]):
            sys.exit(f"follower: at step {update.step} this copy is not what the trainer had")
        changed = sum(
            change.values.size
            for path, change in update.changes.items()
            if path.startswith("model/")
        )
        right = sum(
            torch.equal(answered(model, asked, len(right)), right) for asked, right in prompts
        )
        taken = f"{changed / size:.2%} of the weights taken over, digest equal to the trainer's"
        say(f"step {update.step}, {taken}, {right} of {len(prompts)} prompts answered right")
        if options.until is not None and update.step >= options.until:
            say(f"{count} updates, each with the digest of the trainer's weights")
            return
    if options.until is not None:
        sys.exit(
            f"follower: nothing new for {options.timeout:g} s, and step {options.until} has not"
            " come"
        )


if __name__ == "__main__":
    main()
