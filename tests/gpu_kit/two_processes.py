"""Part 6: two processes that share the device save one state together.

`python -m tests.gpu_kit.two_processes RANK FOLDER [--rehearse]` is one of them. They speak through
gloo on the host.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.record import Result
from tests.gpu_kit.device_checks import require_equal
from tests.gpu_kit.stand_in import accelerator
from tests.gpu_kit.steps import Context

RANKS = 2
SAVES = 4


def save_together(context: Context) -> Result:
    """Let two processes save, offload, reload and restore, and compare every step here."""
    import torch

    import deltacheck
    from deltacheck.backends.torch import Engine

    command = [sys.executable, "-m", "tests.gpu_kit.two_processes"]
    more = ["--rehearse"] if context.rehearse else []
    ranks = [
        subprocess.Popen([*command, str(rank), str(context.folder), *more]) for rank in range(RANKS)
    ]
    try:
        statuses = [rank.wait(max(1.0, context.seconds_left())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(statuses):
        raise AssertionError(f"the processes ended with {statuses}; see the log of this part")
    checkpoints = deltacheck.open(context.folder / "root")
    if problems := checkpoints.verify(deep=True):
        raise AssertionError(f"{len(problems)} problems, the first: {problems[0]}")
    rows = _rows(context.rehearse)
    with Engine(context.folder / "root") as engine:
        for step in range(SAVES):
            parts = [_content(rank, step, rows) for rank in range(RANKS)]
            expected = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            require_equal(f"step {step}", expected, engine.restore(step))
    about = (
        f"{SAVES} saves of {RANKS} processes on one device, each written to right after `save`;"
        " offload and reload between them; every step equal, from another process, too"
    )
    return Result("two processes", about, [])


def _rows(rehearse: bool) -> int:
    return 64 if rehearse else 1 << 16


def _content(rank: int, step: int, rows: int) -> dict[str, Any]:
    """Return the part of a rank at a step, in host memory: some rows of each leaf."""
    import torch

    random = torch.Generator().manual_seed(rank)
    moments = torch.randn(rows, 512, generator=random)
    weights = moments.to(torch.bfloat16)
    weights[step :: SAVES * 8] += 1
    return {"weights": weights, "moments": moments * 0.9**step}


def _save(rank: int, folder: Path, context: Context) -> None:
    """Save as one of the processes."""
    import torch
    from torch import distributed

    from deltacheck.backends.torch import Engine, Shard

    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    rows = _rows(context.rehearse)
    tensors = {name: part.to(context.device) for name, part in _content(rank, 0, rows).items()}
    state = {
        name: Shard(part, (RANKS * rows, *part.shape[1:]), (rank * rows, 0))
        for name, part in tensors.items()
    }
    with (
        accelerator(context),
        Engine(folder / "root", process_group=distributed.group.WORLD) as engine,
    ):
        for step in range(SAVES):
            content = _content(rank, step, rows)
            for name, part in content.items():
                tensors[name].copy_(part)
            engine.save(step, state)
            # No optimizer owns them, so `save` has copied them.
            for tensor in tensors.values():
                tensor.zero_()
            engine.offload(state)
            if any(tensor.untyped_storage().nbytes() for tensor in tensors.values()):
                raise AssertionError("offload has left a tensor on the device")
            engine.reload()
            engine.wait()
        engine.restore(SAVES - 1, into=state)
        require_equal(
            f"rank {rank}", content, {name: tensor.cpu() for name, tensor in tensors.items()}
        )
    torch.distributed.destroy_process_group()


def main() -> None:
    """Be one of the processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    folder = options.folder
    _save(options.rank, folder, Context(folder, folder, time.monotonic() + 60, options.rehearse))


if __name__ == "__main__":
    main()
