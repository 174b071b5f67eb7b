"""The run of part 5, as ``deltacheck.evaluate.Workload`` describes it."""

from __future__ import annotations

from benchmarks.workloads.builtin import ProtocolWorkload, create, tiny_sft
from benchmarks.workloads.recipe import recipe

# 25 M parameters in the layers: with 202 M, no evaluation ended in 150 s.
SIZES = {"width": 512, "layers": 8, "heads": 8, "context": 512, "batch": 8, "dropout": 0.1}


def on_device(seed: int) -> ProtocolWorkload:
    """Create a supervised fine-tuning at 1e-5 on the CUDA device."""
    run = recipe(
        "sft",
        device="cuda",
        threads=4,
        pretrain_steps=100,
        pretrain_rate=1e-3,
        pretrain_batch=16,
        sources=400,
        **SIZES,
    )
    return create(run, seed)


on_processor = tiny_sft  # of a rehearsal
