"""Restores of files that are not in memory: a cold page cache, and an S3 server 20 ms away.

Both compare deltacheck with ``torch.load`` and torch DCP, into the state of the program. The server
is a local one (moto) that answers each request 20 ms late; it shares the processor with the
restore. ``torch.load`` and DCP read from it by the parallel downloads of boto3.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.prepared import SIZES, STATES, load, prepare
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.rivals import (
    AUTO,
    EXACT,
    Dcp,
    OursTorch,
    OursTorchPostTraining,
    Rival,
    TorchSave,
    sync_tree,
)
from benchmarks.ways import Run
from tests.support.s3_server import FOREVER, S3, Fault

LATENCY_SECONDS = 0.02
AT_MOST = 0.7  # of torch.load and load_state_dict
_KINDS: tuple[type[Rival], ...] = (TorchSave, Dcp, OursTorch, OursTorchPostTraining)
_MOST_SAVES = 8  # until a way is in its steady state
_BUCKET = "runs"


@dataclass(slots=True)
class _Times:
    """Seconds of complete restores of one way, by the place of its files."""

    name: str
    stored_bytes: int
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"warm": [], "cold": [], "S3": []}
    )
    requests: int = 0

    def middle(self, place: str) -> float | None:
        """Return the median; ``None`` without a measurement."""
        return median(self.seconds[place]) if self.seconds[place] else None


def run(settings: Settings) -> Result:
    """Measure restores of each way, in alternation."""
    size = SIZES[settings.only or "small"] if not settings.quick else SIZES["tiny"]
    repeats = 2 if settings.quick else 5
    state = "rl_like"
    prepared = settings.folder / "prepared"
    prepared.mkdir()
    prepare("torch", state, size, prepared)
    training, profile = load("torch", state, size, prepared)
    shutil.rmtree(prepared)
    rivals = [
        kind((settings.folder / kind.__name__).absolute(), training, profile) for kind in _KINDS
    ]
    times = [_saved(rival, training) for rival in rivals]
    for _ in range(repeats):
        for rival, row in zip(rivals, times, strict=True):
            row.seconds["warm"].append(_timed(rival, training))
            if _evict(rival.root):
                row.seconds["cold"].append(_timed(rival, training))
    if find_spec("moto") is not None:
        _time_server(rivals, times, training, repeats)
    return _result(times, f"{STATES[state]}, {size.parameters / 1e6:.1f} M", repeats)


def _saved(rival: Rival, training: Run) -> _Times:
    """Save until the way is in its steady state; close it, and sync its files."""
    for _ in range(_MOST_SAVES):
        training.train(1)
        rival.delete_earlier()
        metrics = training.metrics(0.0)
        metrics.pop("loss")
        rival.save(training.workload.step, training.workload.state(), metrics)()
        if rival.settled():
            break
    rival.close()
    sync_tree(rival.root)
    return _Times(rival.name, sum(file.stat().st_size for file in _files(rival.root)))


def _timed(rival: Rival, training: Run) -> float:
    """Return the seconds of a complete restore of the newest step into the state of the program."""
    step = _newest_step(rival)
    start = time.perf_counter()
    rival.place(rival.restore(step, training.workload.state()), training)
    return time.perf_counter() - start


def _newest_step(rival: Rival) -> int:
    if isinstance(rival, OursTorch):
        import deltacheck

        return deltacheck.open(rival.root).steps()[-1]
    return max(int(entry.name) for entry in rival.root.iterdir())


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _evict(root: Path) -> bool:
    """Remove all files of a folder from the page cache; return false if the system keeps any."""
    for file in _files(root):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # bytes that are not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            # Without waiting, only bytes in memory can be read. An empty file has none.
            if os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT):
                return False
        except BlockingIOError:
            continue
        except OSError:  # a file system in memory
            return False
        finally:
            os.close(descriptor)
    return True


# --- the server -----------------------------------------------------------------------------------


def _time_server(rivals: list[Rival], times: list[_Times], training: Run, repeats: int) -> None:
    server = S3()
    late = Fault("late", method="ANY", times=FOREVER, seconds=LATENCY_SECONDS)
    try:
        server.make_bucket(_BUCKET)
        with patch.dict(os.environ, server.environment()):
            for rival in rivals:
                _upload(server, rival.root)
            for _ in range(repeats):
                for rival, row in zip(rivals, times, strict=True):
                    restore = _restore_from_server(rival, training)
                    with server.failing(late):
                        start = time.perf_counter()
                        restore(server)
                        row.seconds["S3"].append(time.perf_counter() - start)
                        row.requests = len(server.seen())
    finally:
        server.close()


def _client(server: S3) -> Any:
    import boto3  # type: ignore[import-untyped]

    return boto3.client("s3", endpoint_url=server.endpoint)


def _upload(server: S3, root: Path) -> None:
    client = _client(server)
    for file in _files(root):
        key = f"{root.name}/{file.relative_to(root).as_posix()}"
        client.put_object(Bucket=_BUCKET, Key=key, Body=file.read_bytes())


def _restore_from_server(rival: Rival, training: Run) -> Callable[[S3], None]:
    """Return a function that restores the newest step of a way from the server."""
    step, root = _newest_step(rival), rival.root

    def ours(server: S3) -> None:
        from deltacheck.backends.torch import Engine

        with Engine(f"s3://{_BUCKET}/{root.name}") as engine:
            engine.restore(step, into=training.workload.state())

    def torch_load(server: S3) -> None:
        import torch

        content = io.BytesIO()
        _client(server).download_fileobj(_BUCKET, f"{root.name}/{step}/state.pt", content)
        content.seek(0)
        training.workload.load(torch.load(content, weights_only=True))

    def dcp(server: S3) -> None:
        client, folder = _client(server), root.with_name("downloaded")
        (folder / str(step)).mkdir(parents=True)
        for file in _files(root):
            name = file.relative_to(root).as_posix()
            client.download_file(_BUCKET, f"{root.name}/{name}", str(folder / name))
        copy = type(rival).__new__(type(rival))
        copy.root = folder
        copy.restore(step, training.workload.state())
        shutil.rmtree(folder)

    return {TorchSave: torch_load, Dcp: dcp}.get(type(rival), ours)


# --- the result -----------------------------------------------------------------------------------


def _result(times: list[_Times], state: str, repeats: int) -> Result:
    columns: dict[str, Unit] = {"way": "text", "files": "bytes"}
    for place in times[0].seconds:
        columns |= {place: "seconds", f"{place}, of torch.load": "ratio"}
    columns["requests"] = "count"
    rows: list[list[Cell]] = []
    figures = []
    for row in times:
        cells: list[Cell] = [row.name, row.stored_bytes]
        for place in row.seconds:
            ours, base = row.middle(place), times[0].middle(place)
            ratio = ours / base if ours is not None and base else None
            cells += [ours, ratio]
            if row.name in (EXACT, AUTO) and place != "warm" and ratio is not None:
                figures.append(
                    Figure(f"complete restore, {place}, {row.name}, of torch.load", ratio, AT_MOST)
                )
        rows.append([*cells, row.requests])
    about = (
        f"{state} parameters; complete restores of the newest step into the state of the program,"
        f" medians of {repeats}, ways in alternation. Warm and cold: files on the local disk, in"
        f" the page cache and not. S3: a local server that answers each request"
        f" {LATENCY_SECONDS * 1e3:.0f} ms late; torch.load and DCP by the parallel downloads of"
        " boto3. Files: all of the run's root; torch.save and DCP keep the newest step only"
    )
    if not times[0].seconds["cold"]:
        about += ". This file system keeps files in memory, so nothing cold was measured"
    if not times[0].seconds["S3"]:
        about += ". moto is not installed, so no server was measured"
    return Result("cold", about, [Table("complete restores", columns, rows)], figures)
