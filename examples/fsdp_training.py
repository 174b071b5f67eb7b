"""Fine-tuning with FSDP2 on any number of ranks, with a checkpoint every few steps.

The next run continues, on another number of ranks if you like.

    torchrun --nproc-per-node 4 examples/fsdp_training.py runs/fsdp
    torchrun --nproc-per-node 2 examples/fsdp_training.py runs/fsdp --steps 20
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from deltacheck import Keep
from deltacheck.backends.torch import Engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)  # the same weights on every rank before they are sharded
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 256)
    ).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with Engine(options.root, process_group=dist.group.WORLD, keep=Keep(last=5)) as engine:
        start = 0
        if engine.steps():
            weights, moments = get_state_dict(model, optimizer)
            state = engine.restore(into={"model": weights, "optimizer": moments, "step": 0})
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            start = state["step"] + 1
        for step in range(start, options.steps):
            batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 1 or step == options.steps - 1:
                weights, moments = get_state_dict(model, optimizer)
                engine.save(
                    step,
                    {"model": weights, "optimizer": moments, "step": step},
                    metrics={"loss": loss.item()},
                )
        engine.wait()
        if dist.get_rank() == 0:
            print(
                f"{dist.get_world_size()} ranks, steps {start} to {options.steps - 1}; checkpoints:"
                f" {engine.steps()}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
