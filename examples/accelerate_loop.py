"""A loop with Hugging Face's Accelerate and delta checkpoints.

Stop it or kill it; the next run continues from the newest checkpoint.

    python examples/accelerate_loop.py FOLDER --steps 20
    python examples/accelerate_loop.py FOLDER --steps 40    # continues from step 20
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator

from deltacheck.backends.torch import Engine, ResumableLoader
from deltacheck.backends.torch.accelerate import load_state, state_of

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=20)
options = arguments.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(list(torch.randn(40, 32)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = ResumableLoader(loader)  # a resumed run gets the batches that are left of the epoch

with Engine(options.folder) as engine:
    step = first_step = engine.latest_step() or 0
    if step:
        saved = engine.restore()
        load_state(accelerator, saved["training"])
        batches.load_state_dict(saved["data"])
    while step < options.steps:
        for batch in batches:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                state = {"training": state_of(accelerator), "data": batches.state_dict()}
                engine.save(step, state)
            if step == options.steps:
                break
print(f"at step {step}, from step {first_step}")
