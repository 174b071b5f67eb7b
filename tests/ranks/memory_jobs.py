"""Define the jobs of ranks that keep their newest steps in memory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from deltacheck import MemoryTier
from deltacheck.backends.torch import Engine
from deltacheck.maintain import drain
from tests.ranks.jobs import Run, same, whole, world


def error_of(action: Callable[[], object]) -> str:
    """Return the error of an action as text, empty if there is none."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def content(size: int, step: int) -> Any:
    """Return the state of a step of a run that was never interrupted."""
    run = Run("fsdp", size)
    for number in range(step + 1):
        run.update(number)
    return whole(run.state(step))


def keep_in_memory(rank: int, size: int, port: int, folder: Path) -> None:
    """Save steps 0 to 7 in memory, every third one on the disk, and die by SIGKILL."""
    with world(rank, size) as group:
        engine = Engine(
            folder / "disk",
            memory=MemoryTier(folder / "memory", persist_every=3),
            process_group=group,
        )
        run = Run("fsdp", size)
        for step in range(8):
            run.update(step)
            engine.save(step, run.state(step)).wait("committed")
            if step == 4:
                engine.tag(4, "named")
            if step == 5:
                engine.persist()
        assert {6, 7} <= set(engine.steps())
        assert set(engine.steps()) <= {0, 3, 4, 5, 6, 7}
        os.kill(os.getpid(), signal.SIGKILL)


def continue_in_memory(rank: int, size: int, port: int, folder: Path) -> Any:
    """Go on from the memory of ranks that were killed, and meet everything that can fail there.

    Return what this rank has seen, by name.
    """
    seen: dict[str, Any] = {}
    with world(rank, size) as group:

        def engine(name: str, memory: Path, **options: Any) -> Engine:
            tier = {k: options.pop(k) for k in ("memory_bytes", "persist_every") if k in options}
            return Engine(
                folder / name,
                memory=MemoryTier(memory, **tier),
                process_group=group,
                **options,
            )

        seen["options"] = error_of(
            lambda: engine("disk", folder / "memory", persist_every=1 + rank)
        )
        seen["machines"] = error_of(lambda: engine("disk", folder / f"memory of rank {rank}"))
        run = Run("fsdp", size)
        with engine("disk", folder / "memory", persist_every=3) as saves:
            restored = saves.restore(into=run.state(0))
            seen["newest"] = saves.restored_step, same(whole(restored), content(size, 7))
            run.update(8)
            handle = saves.save(8, run.state(8))
            handle.wait("committed")
            seen["next"] = (
                {str(leaf.kind) for leaf in handle.report.leaves},
                handle.report.durability,
            )
            # A failed copy is raised on every rank, once, and the step is copied later.
            full = mock.Mock(side_effect=OSError("No space left on device"))
            with mock.patch.object(drain, "transfer", full):
                seen["persist"] = error_of(saves.persist)
            saves.persist()
            # A step that is only on the disk is no base for saves in memory.
            restored = saves.restore(3, into=run.state(0))
            seen["older"] = same(whole(restored), content(size, 3))
            handle = saves.save(9, restored)
            handle.wait("committed")
            seen["after older"] = {str(leaf.kind) for leaf in handle.report.leaves}
            # What is damaged below must be on the disk.
            saves.persist()
            if rank == 0:
                for path in (folder / "memory" / "segments").rglob("c.*"):
                    if path.is_file():
                        path.write_bytes(bytes(path.stat().st_size))
            saves.restore(8, into=run.state(0))
            seen["damaged"] = same(whole(run.state(8)), content(size, 8))
            saves.save(10, run.state(8)).wait("committed")
            saves.delete(8)
            seen["steps"] = saves.steps()
        # A memory with room for little more than one whole state.
        run = Run("fsdp", size)
        with engine("small", folder / "small memory", memory_bytes=10_500_000) as saves:
            seen["small"] = []
            for step in range(4):
                run.update(step)
                handle = saves.save(step, run.state(step))
                handle.wait("committed")
                seen["small"].append({str(leaf.kind) for leaf in handle.report.leaves})
        with engine("none", folder / "no memory", memory_bytes=100_000) as saves:
            seen["full"] = error_of(lambda: saves.save(0, run.state(0)))
        return seen


def copy_memory(folder: Path, to: Path) -> Path:
    """Copy both roots, as a kill at this moment leaves them."""
    shutil.copytree(folder, to)
    return to
