"""A loop with Accelerate that saves, and loads the newest folder, as its examples do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.support.unmodified.killed import digest, kill_once, write

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "")
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(int(rank or 0))  # other dropout on each process
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    if folders:
        accelerator.load_state(str(folders[-1]))
    begin = int(folders[-1].name.removeprefix("step_")) if folders else 0
    for step in range(begin, 8):
        kill_once(folder, step)
        seed = 100 * int(rank or 0) + step
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            accelerator.save_state(str(folder / f"step_{step + 1}"))
    state = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    write(f"{sys.argv[2]}{rank}", {"state": digest(state), "begin": begin})
