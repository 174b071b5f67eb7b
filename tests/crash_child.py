"""A training that saves as fast as it can; the parent kills it. Prints each step that was acknowledged as committed."""

from __future__ import annotations

import sys

import torch
from states import nudge, training_state

from deltacheck import Policy
from deltacheck.backends.torch import Engine


def main(root: str, first: int) -> None:
    torch.set_num_threads(1)
    with Engine(root, policy=Policy.exact(max_chain_depth=4), keep_last=3, grace_seconds=0) as engine:
        state = engine.restore() if engine.steps() else training_state()
        for step in range(first, first + 10_000):
            nudge(state, seed=step)
            state["step"] = step
            engine.save(step, state).wait()
            print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
