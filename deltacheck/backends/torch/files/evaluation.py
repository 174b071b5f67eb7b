"""What `deltacheck eval` needs of PyTorch: states as bytes, our saves, and the peer that they are
compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf import tree
from deltacheck.policy import Policy
from deltacheck.save.handle import SaveHandle

PEER = "torch.save + fsync"


def flat(state: object) -> tree.Flat:
    """A state taken apart, nothing copied."""
    return tree.flatten(state, leaves.describe)


bytes_of = leaves.bytes_of


def peer_save(state: object, file: Path) -> int:
    """What people do without us: `torch.save` to a new file, synced to disk. The bytes of the
    file.
    """
    file.unlink(missing_ok=True)
    with file.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())
    return file.stat().st_size


class Saver:
    """The checkpoints of one run."""

    def __init__(self, root: Path, policy: Policy) -> None:
        self._engine = Engine(root, policy=policy)
        self._under_way: SaveHandle | None = None

    def save(self, step: int, state: object, metrics: Mapping[str, float]) -> None:
        """Begin to save. REQUIRES: ``finish`` was called for the save before."""
        self._under_way = self._engine.save(step, state, metrics=metrics)

    def finish(self) -> tuple[int, float, float, int] | None:
        """Wait for the save under way: its step, the seconds that training has waited for it, until
        it
        was durable, and the bytes that it added.

        ``None`` where none is. The wait counts as blocking: in a run without an evaluation the next
        save would wait as long.
        """
        if self._under_way is None:
            return None
        began = time.perf_counter()
        report = self._under_way.result()
        waited = time.perf_counter() - began
        self._under_way = None
        assert report is not None  # nothing is skipped: one save at a time
        return (
            report.step,
            report.blocking_seconds + waited,
            report.durable_seconds,
            report.stored_bytes,
        )

    def restore(self, like: object) -> tuple[int, Any]:
        """The newest step and its state. ``like``: not needed here."""
        state = self._engine.restore()
        assert self._engine.restored_step is not None
        return self._engine.restored_step, state

    def close(self) -> None:
        self._engine.close()
