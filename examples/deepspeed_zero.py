"""Fine-tuning with DeepSpeed under any ZeRO stage, with a checkpoint every few steps.

The next run continues, on any number of ranks.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py runs/zero --stage 3
    torchrun --nproc-per-node 1 examples/deepspeed_zero.py runs/zero --stage 3 --steps 20

``install()`` is all that deltacheck needs. Without a GPU, set ``DS_ACCELERATOR=cpu``.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist

from deltacheck import Keep
from deltacheck.backends.torch.deepspeed import install


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    install(keep=Keep(last=5))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 256)
    )
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    start = 0
    if os.path.exists(os.path.join(options.folder, "latest")):
        engine.load_checkpoint(options.folder)
        start = engine.global_steps
    while engine.global_steps < options.steps:
        random = torch.Generator().manual_seed(1000 * engine.global_steps + dist.get_rank())
        batch = torch.randn(16, 256, generator=random).to(engine.device, torch.bfloat16)
        loss = (engine(batch) - batch).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 2 == 0 or engine.global_steps == options.steps:
            engine.save_checkpoint(options.folder)  # returns while the step is written
    engine.checkpoint_engine.wait()
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, steps {start + 1} to {options.steps}; loss"
            f" {loss.item():.4f}"
        )
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
