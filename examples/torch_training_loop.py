"""A PyTorch training loop with delta checkpoints.

Stop it or kill it; the next run continues from the newest checkpoint.

    python examples/torch_training_loop.py FOLDER --steps 100
    python examples/torch_training_loop.py FOLDER --steps 200    # continues from step 100
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deltacheck.backends.torch import Engine

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=100)
arguments.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
options = arguments.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 256),
    nn.GELU(),
    nn.Dropout(0.1),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 8),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
teacher = nn.Linear(32, 8).requires_grad_(False)  # the function to learn


def train_step() -> float:
    inputs = torch.randn(64, 32)
    loss = F.mse_loss(model(inputs), teacher(inputs).tanh())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.item()


def state() -> dict[str, Any]:
    """Return everything that decides how training continues.

    Here the data comes from torch's generator. With a data loader, add its position.
    """
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }


with Engine(options.folder) as engine:
    # Not the highest of ``engine.steps()``, if a run has gone back and on from an earlier step.
    last_step = engine.latest_step() or 0
    if last_step:
        saved = engine.restore()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])
        print(f"resumed from step {last_step}")

    for step in range(last_step + 1, options.steps + 1):
        loss = train_step()
        if step % options.every == 0 or step == options.steps:
            # Returns at once. Training continues while the checkpoint is written.
            engine.save(step, state(), metrics={"loss": loss})
            print(f"step {step}: loss {loss:.6f}")
# Leaving the block waits for the last save and raises its error if it failed.
