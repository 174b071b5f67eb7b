"""An exact checkpoint of every training step, on the disk or in memory.

Kill it at any step; the next run goes on from the last one, bit for bit. It prints the bytes of a
save beside those of the first, which is whole.

    python examples/every_step.py FOLDER --steps 20
    python examples/every_step.py FOLDER --steps 40 --memory /dev/shm/my-run    # continues
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deltacheck import MemoryTier, Policy
from deltacheck.backends.torch import Engine

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--memory", type=Path, help="commit steps in memory first")
arguments.add_argument("--every", type=int, default=10, help="steps in memory for each on disk")
options = arguments.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
# With names, a save knows which weight each state moves.
optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-4)


def train_step() -> None:
    inputs = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    F.mse_loss(outputs.float(), inputs).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def state() -> dict[str, Any]:
    """Return everything that decides how training continues."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }


# Predicted deltas are small, so chains can be long.
policy = Policy.exact(law=True)
memory = None if options.memory is None else MemoryTier(options.memory, persist_every=options.every)
with Engine(options.folder, policy=policy, memory=memory) as engine:
    last_step = engine.latest_step() or 0
    if last_step:
        saved = engine.restore()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
    sizes = []
    for step in range(last_step + 1, options.steps + 1):
        train_step()
        report = engine.save(step, state()).result()
        assert report is not None
        sizes.append(report.stored_bytes)
    engine.persist()
print(f"steps {last_step + 1} to {options.steps}, bytes of the first save {sizes[0]:,}")
print(f"a later save, mean: {sum(sizes[1:]) / len(sizes[1:]) / sizes[0]:.1%} of it")
