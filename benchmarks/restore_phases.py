"""Processor time of the phases of a restore, and of the work that none can do without.

``python -m benchmarks.restore_phases ROOT`` measures restores of the newest step of a root.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from benchmarks import states
from benchmarks.record import Cell, Result, Table, Unit
from benchmarks.states import State
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.state import leaves
from deltacheck.restore import deltas, read, values
from deltacheck.restore.chain import resolve_chains
from deltacheck.store.files import native_files
from deltacheck.store.files.background import carried_out
from deltacheck.store.files.native_files import JoinedRead
from deltacheck.store.roots.opening import open_root

# Headings, and the functions that begin and end them. None calls another one.
_PHASES: dict[str, tuple[Any, str]] = {
    "tables": (values, "resolve_leaves"),
    "keyframes": (read, "_start_keyframes"),
    "read deltas": (deltas, "Reading"),
    "decode deltas": (deltas, "_decode"),
    "digests": (read, "_verify"),
    "copy": (leaves, "copy_all"),
}
_COLUMNS: dict[str, Unit] = {
    "deltas on the keyframe": "count",
    "phase": "text",
    "bytes": "bytes",
    "processor time": "seconds",
    "bytes a second": "bytes",
}


def table(rows: list[list[Cell]]) -> Table:
    """Return the table of some rows of ``rows``."""
    return Table("where the time of a restore into the state goes", _COLUMNS, rows)


def rows(
    depth: int, state: State, restore: Callable[[], object], repetitions: int
) -> list[list[Cell]]:
    """Measure a restore, and return a row for each phase.

    Args:
        depth: Deltas on the keyframe.
        state: The state, for its size.
        restore: Restores it into a state.
        repetitions: Restores, of which the medians are taken.
    """
    measured = [_phases(restore) for _ in range(repetitions)]
    seconds = {name: median(phases[name] for phases in measured) for name in measured[0]}
    size, streams = states.raw_bytes(state), int(seconds.pop("streams"))
    for name, is_new in (("one copy to used memory", False), ("one copy to new memory", True)):
        seconds[name] = median(_copy_seconds(size, is_new) for _ in range(3))
    sizes = dict.fromkeys(("keyframes", "digests", "copy", "all"), size)
    sizes |= dict.fromkeys(("read deltas", "decode deltas"), streams)
    result: list[list[Cell]] = []
    for name, spent in seconds.items():
        moved = size if name.startswith("one copy") else sizes.get(name)
        # Phases without bytes have no rate, and neither has the decoder without deltas.
        rate = moved / spent if moved and spent else None
        result.append([depth, name, moved, spent, rate])
    return result


def _phases(restore: Callable[[], object]) -> dict[str, float]:
    """Return the processor time of each phase in all threads, and the bytes of the streams.

    Reads are carried out when they are started, so that no phase goes on beside another one.
    """
    seconds = dict.fromkeys(_PHASES, 0.0)
    streams = 0

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal streams
            if isinstance(args[0], JoinedRead):
                streams += args[0].size
            start = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                seconds[name] += time.process_time() - start

        return call

    with ExitStack() as patches:
        for name, (owner, function) in _PHASES.items():
            patch = mock.patch.object(owner, function, timed(name, getattr(owner, function)))
            patches.enter_context(patch)
        patches.enter_context(mock.patch.object(native_files, "start", carried_out))
        start = time.process_time()
        restore()
        total = time.process_time() - start
    return seconds | {"other": total - sum(seconds.values()), "all": total, "streams": streams}


def _copy_seconds(size: int, is_new: bool) -> float:
    """Return the processor time of one copy of this size, to used or to new memory."""
    source = np.ones(size, np.uint8)
    target = np.empty(size, np.uint8)
    if not is_new:
        target.fill(1)
    start = time.process_time()
    np.copyto(target, source)
    return time.process_time() - start


def main(root: str) -> None:
    """Print the phases of restores of the newest step of a root into a state."""
    with Engine(root) as engine:
        state = engine.restore()

    def restore() -> None:
        with Engine(root) as engine:
            engine.restore(into=state)

    depth = max(map(len, _chains(root)), default=0)
    Result("phases", root, [table(rows(depth, state, restore, 5))]).show(Console())


def _chains(root: str) -> list[list[str]]:
    """Return the segments of the deltas of each leaf of the newest step."""
    opened = open_root(root)
    manifest = opened.manifest()
    chains = resolve_chains(opened, manifest, list(manifest.stored))
    return [chain.delta_segments for chain in chains.values()]


if __name__ == "__main__":
    main(sys.argv[1])
