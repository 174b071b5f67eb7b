"""A loop with Hugging Face's Accelerate and delta checkpoints.

Stop it or kill it; the next run continues from the newest checkpoint.

    python examples/accelerate_loop.py FOLDER --steps 20
    python examples/accelerate_loop.py FOLDER --steps 40    # continues from step 20
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.accelerate import load_state, state_of

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=20)
options = arguments.parse_args()

# A sampler whose order depends on the epoch alone, so that a resumed run gets the same batches.
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(list(torch.randn(40, 32)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with Engine(options.folder) as engine:
    step = first_step = engine.steps()[-1] if engine.steps() else 0
    if step:
        load_state(accelerator, engine.restore())
    while step < options.steps:
        loader.set_epoch(step // len(loader))
        used = step % len(loader)  # batches of this epoch that were trained on before the restart
        for batch in accelerator.skip_first_batches(loader, used) if used else loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                engine.save(step, state_of(accelerator))
            if step == options.steps:
                break
print(f"at step {step}, from step {first_step}")
