"""Time from the kill of all ranks to their next optimizer step, from a peer copy of their memory.

Two ranks train with FSDP2 over gloo and save every step in memory. A mirror keeps a copy elsewhere.
Both are killed, and their memory is deleted, as by the loss of the machine. They start again with
the copy as their memory, which is mirrored in turn. Starts of new runs alternate with the restarts.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit

RANKS, KILLS_PER_START, QUICK_KILLS = 2, 5, 1
# The issue of this figure: a restart may take twice as long as the start of the processes.
LIMIT = 2.0
PERSIST_EVERY = 10
# Seconds between two looks of the mirror for a new step.
POLL_SECONDS = 0.02
_MEMORY = Path("/dev/shm")
_PATIENCE_SECONDS = 120.0
# No kill begins later, so that a run on a busy machine ends with fewer of them.
MOST_SECONDS = 780.0


@dataclass(slots=True)
class Seen:
    """The steps that one start of the ranks has reported.

    ``first_step``: the end of the first optimizer step of the slowest rank, on the clock of
    ``time.monotonic``. ``restored``: the restored step of each rank, -1 if there was none.
    ``digests``: by rank and step, of what the rank holds.
    """

    first_step: float = 0.0
    last_step: int = -1
    restored: list[int] = field(default_factory=list)
    digests: dict[tuple[int, int], str] = field(default_factory=dict)


def run(settings: Settings) -> Result:
    """Kill and restart the ranks."""
    kills = QUICK_KILLS if settings.quick else settings.kills
    starts = max(1, kills // KILLS_PER_START)
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as memory:
        restarts, fresh, lost, wrong = _trial(
            settings.folder, Path(memory), kills, starts, settings.most_seconds or MOST_SECONDS
        )
    ratio = median(restarts) / median(fresh)
    rows: list[list[Cell]] = [
        ["start of a new run", len(fresh), median(fresh), min(fresh), max(fresh), None, None],
        [
            "kill, restore from the peer copy",
            len(restarts),
            median(restarts),
            min(restarts),
            max(restarts),
            sum(lost) / len(lost),
            max(lost),
        ],
    ]
    columns: dict[str, Unit] = {
        "from, to the next optimizer step": "text",
        "times": "count",
        "median": "seconds",
        "least": "seconds",
        "most": "seconds",
        "lost steps, mean": "number",
        "lost steps, most": "count",
    }
    about = (
        f"{RANKS} ranks, FSDP2 on gloo, every step in memory, every {PERSIST_EVERY}th on the disk;"
        " lost steps: finished by a rank, and not in the copy when the ranks were killed"
    )
    figures = [
        Figure("restart over start, medians", ratio, LIMIT, "number"),
        Figure("restored states that differ from the saved ones", wrong, 0, "number"),
    ]
    each = Table(
        "each kill",
        {"seconds": "seconds", "lost steps": "count"},
        [list(row) for row in zip(restarts, lost, strict=True)],
    )
    starts_table = Table("each start", {"seconds": "seconds"}, [[seconds] for seconds in fresh])
    tables = [Table("kills of all ranks", columns, rows), each, starts_table]
    return Result("restart", about, tables, figures)


def _trial(
    folder: Path, memory: Path, kills: int, starts: int, most_seconds: float
) -> tuple[list[float], list[float], list[int], int]:
    """Return the seconds of restarts and starts, the lost steps, and the wrong restores."""
    chance = random.Random()
    restarts: list[float] = []
    fresh: list[float] = []
    lost: list[int] = []
    wrong = 0
    disk = folder / "run"
    homes = [memory / "a", memory / "b"]
    digests: dict[tuple[int, int], str] = {}
    began = time.monotonic()
    ranks = _Ranks(disk, homes[0])
    ranks.until(0)
    end = time.monotonic() + most_seconds
    for number in range(kills):
        if time.monotonic() > end:
            break
        if number % KILLS_PER_START == 0 and len(fresh) < starts:
            fresh.append(_new_start(folder / f"new-{number}", memory / f"new-{number}"))
        home, peer = homes[number % 2], homes[1 - number % 2]
        copy = _Copy(home, peer)
        ranks.until(ranks.seen.last_step + 1 + chance.randrange(1, 6))
        time.sleep(chance.random() * 0.1)
        began = time.monotonic()
        ranks.kill()
        copy.stop()
        digests |= ranks.seen.digests
        last_step = ranks.seen.last_step
        shutil.rmtree(home)
        ranks = _Ranks(disk, peer)
        ranks.until(0)
        restarts.append(ranks.seen.first_step - began)
        restored = set(ranks.seen.restored)
        lost.append(last_step - min(restored))
        for rank in range(RANKS):
            step = ranks.seen.restored[rank]
            # A step that was committed has been reported by both ranks before their kill, or the
            # kill came between its commit and the report.
            known = digests.get((rank, step))
            wrong += known is not None and known != ranks.seen.digests[rank, step]
        wrong += len(restored) != 1
    ranks.kill()
    return restarts, fresh, lost, wrong


def _new_start(disk: Path, memory: Path) -> float:
    """Return the seconds from the start of new ranks to their first optimizer step."""
    began = time.monotonic()
    ranks = _Ranks(disk, memory)
    ranks.until(0)
    ranks.kill()
    shutil.rmtree(memory)
    return ranks.seen.first_step - began


class _Copy:
    """A mirror of a memory root, kept by a thread as by another machine."""

    def __init__(self, source: Path, target: Path) -> None:
        from deltacheck import Mirror

        self._mirror = Mirror(source, target)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends.is_set():
            self._mirror.poll()
            self._ends.wait(POLL_SECONDS)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()
        self._mirror.close()


class _Ranks:
    """The processes of one start, and what they report."""

    def __init__(self, disk: Path, memory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.seen = Seen()
        self._firsts: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._changed = threading.Condition()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.restart", str(disk), str(memory)],
                env=os.environ
                | common
                | {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(rank, process), daemon=True)
            for rank, process in enumerate(self._processes)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                return  # it was killed in the middle of a line
            report: dict[str, Any] = json.loads(line)
            with self._changed:
                step = report["step"]
                self.seen.digests[rank, step] = report["digest"]
                if report["restored"]:
                    self.seen.restored.append(step)
                else:
                    self._firsts.setdefault(rank, report["time"])
                    self._steps[rank] = step
                if len(self._steps) == RANKS:
                    self.seen.first_step = max(self._firsts.values())
                    self.seen.last_step = min(self._steps.values())
                self._changed.notify_all()

    def until(self, step: int) -> None:
        """Wait until every rank has made a step."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            while self.seen.last_step < step:
                if time.monotonic() > deadline or any(p.poll() for p in self._processes):
                    break
                self._changed.wait(0.05)
            else:
                return
        self.kill()
        raise RuntimeError(f"the ranks did not come to step {step}")

    def kill(self) -> None:
        """Kill every rank."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process, reader in zip(self._processes, self._readers, strict=True):
            process.wait()
            reader.join()
            assert process.stdout is not None
            process.stdout.close()


def work(disk: Path, memory: Path) -> None:
    """Train one rank, from the newest step that there is, until it is killed."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from deltacheck import MemoryTier
    from deltacheck.backends.torch import Engine

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    linear = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.Sequential(*(x for layer in linear for x in (layer, torch.nn.Tanh())))
    mesh = init_device_mesh("cpu", (size,))
    for layer in linear:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def report(step: int, *, restored: bool) -> None:
        now = time.monotonic()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            digest.update(parameter.to_local().detach().numpy().tobytes())
        line = {"step": step, "time": now, "digest": digest.hexdigest(), "restored": restored}
        print(json.dumps(line), flush=True)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    step = -1
    with Engine(
        disk,
        memory=MemoryTier(memory, persist_every=PERSIST_EVERY),
        process_group=dist.group.WORLD,
    ) as engine:
        if engine.steps():
            restored = engine.restore(into=state(0))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=restored["model"],
                optim_state_dict=restored["optimizer"],
            )
            step = restored["step"]
            report(step, restored=True)
        while True:
            step += 1
            generator = torch.Generator().manual_seed(size * step + rank)
            model(torch.randn(16, 512, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step, restored=False)
            engine.save(step, state(step)).wait("committed")


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
