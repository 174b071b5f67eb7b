"""The savers of the demo's ways, in PyTorch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.demo.methods import AUTO, DCP, DERIVED, EXACT, LAW, TORCH_SAVE
from benchmarks.workloads.builtin import ProtocolWorkload
from deltacheck.backends.torch.files import evaluation
from deltacheck.evaluate.records import ROOT
from deltacheck.policy import Policy

# The step, the seconds that training has waited, those until the save was durable, and its bytes.
Measured: TypeAlias = tuple[int, float, float, int]
_POLICIES = {
    EXACT: Policy.exact(),
    DERIVED: Policy.exact(derive=True),
    AUTO: Policy.auto(),
    LAW: Policy.exact(law=True),
}
_SUFFIX, _COMPLETE = ".pt", ".metadata"  # of a file of ``torch.save``; in a folder of DCP
_KEPT_FILES = 2  # of a peer, each of which is a whole state


class DemoSaver(Protocol):
    """Saves the checkpoints of a run in sequence."""

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        """Begin to save."""

    def finish(self) -> Measured | None:
        """Wait for the running save, and return its cost."""

    def restore(self, like: Any) -> tuple[int, Any]:
        """Return the newest step and its state, nested as ``like``, which may be overwritten."""

    def close(self) -> None:
        """Release threads and files."""


def open_saver(way: str, folder: Path, workload: ProtocolWorkload) -> DemoSaver:
    """Open the saver of a way on its own folder, which is created if needed.

    Args:
        way: The key of the way.
        folder: For its checkpoints.
        workload: The run.
    """
    folder.mkdir(exist_ok=True)
    if way in (TORCH_SAVE, DCP):
        return _TorchSaver(folder) if way == TORCH_SAVE else _DcpSaver(folder)
    return evaluation.Saver(folder / ROOT, _POLICIES[way])


class _TorchSaver:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._measured: Measured | None = None

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        begin = time.perf_counter()
        # Renamed into place, so that a kill leaves no incomplete file under the name of a step.
        incomplete = self._folder / "incomplete"
        size = evaluation.peer_save(state, incomplete)
        incomplete.rename(self._file(step))
        seconds = time.perf_counter() - begin
        self._measured = (step, seconds, seconds, size)
        for old in self._steps()[:-_KEPT_FILES]:
            self._file(old).unlink()

    def finish(self) -> Measured | None:
        measured, self._measured = self._measured, None
        return measured

    def restore(self, like: Any) -> tuple[int, Any]:
        step = self._steps()[-1]
        return step, torch.load(self._file(step), weights_only=True)

    def close(self) -> None:
        pass

    def _steps(self) -> list[int]:
        """Return the complete steps, oldest first."""
        return sorted(int(file.stem) for file in self._folder.glob(f"*{_SUFFIX}"))

    def _file(self, step: int) -> Path:
        return self._folder / f"{step}{_SUFFIX}"


class _DcpSaver:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: tuple[int, float, float, Any] | None = None
        self._durable_at = 0.0

    def save(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        begin = time.perf_counter()
        with warnings.catch_warnings(action="ignore"):  # there is no process group
            future: Any = dcp.async_save(state, checkpoint_id=self._at(step), no_dist=True)
        blocked = time.perf_counter() - begin
        future.add_done_callback(self._note_time)
        self._running = step, begin, blocked, future

    def finish(self) -> Measured | None:
        if self._running is None:
            return None
        step, begin, blocked, future = self._running
        self._running = None
        waited_from = time.perf_counter()
        future.result()
        now = time.perf_counter()
        blocked += now - waited_from
        # Waiters are released before callbacks are called, so the time may not be noted yet.
        durable = self._durable_at if self._durable_at > begin else now
        size = sum(file.stat().st_size for file in self._at(step).iterdir())
        for old in self._steps()[:-_KEPT_FILES]:
            rmtree(self._at(old))
        return step, blocked, durable - begin, size

    def restore(self, like: Any) -> tuple[int, Any]:
        step = self._steps()[-1]
        with warnings.catch_warnings(action="ignore"):
            dcp.load(like, checkpoint_id=self._at(step), no_dist=True)
        return step, like

    def close(self) -> None:
        pass

    def _steps(self) -> list[int]:
        """Return the complete steps, oldest first."""
        return sorted(int(file.parent.name) for file in self._folder.glob(f"*/{_COMPLETE}"))

    def _note_time(self, future: Any) -> None:
        self._durable_at = time.perf_counter()

    def _at(self, step: int) -> Path:
        return self._folder / str(step)
