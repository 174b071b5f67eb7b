"""A script that calls torch.save every few steps, with one import changed.

Each file stands for a step, and only changes are written.

    python examples/torch_save.py FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

# In place of torch.save and torch.load
from deltacheck.backends.torch import load, save

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
options = arguments.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(512, 512).requires_grad_(False), torch.nn.Linear(512, 8)
)
optimizer = torch.optim.AdamW(model[1].parameters())
for step in range(1, 31):
    model(torch.randn(16, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, options.folder / f"ckpt_{step}.pt")

model.load_state_dict(load(options.folder / "ckpt_20.pt", map_location="cpu")["model"])
stored_bytes = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
print(f"{len(list(options.folder.glob('*.pt')))} checkpoints take {stored_bytes / 1e6:.2f} MB")
