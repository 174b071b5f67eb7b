"""Define the jobs of ranks that differ in folder, options, calls or copies of leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from deltacheck import Keep, SaveOptions
from deltacheck.backends.torch import DeltaStorageWriter, Engine, Shard
from deltacheck.policy import Policy
from deltacheck.save.ranks.replicas import LARGE_EVERY
from deltacheck.store.roots.opening import open_root
from tests.ranks.jobs import world

OPTIONS: dict[str, tuple[Any, Any]] = {
    "durability": ("power", "process"),
    "verify": ("none", "commit"),
    "on_busy": ("wait", "skip"),
    "shadow": ("host", "none"),
    "capture": ("auto", "eager"),
    "io_timeout_seconds": (600.0, 500.0),
}
POLICIES = Policy.exact(merge_deltas=False), Policy.exact(7, merge_deltas=False)


def message(action: Callable[[], object]) -> str:
    """Return the class and the text of the error that an action raises."""
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the test looks at it, and DCP derives from it
        return f"{type(error).__name__}: {error}"
    return ""


def differ(rank: int, size: int, port: int, folder: Path) -> Any:
    """Open engines that must be refused, then make calls that differ, then save and restore."""
    with world(rank, size) as group:
        groups_before = len(dist.distributed_c10d._world.pg_map)

        def refused(root: Any, **options: Any) -> str:
            return message(lambda: Engine(root, process_group=group, **options).close())

        found = {"root": refused(folder / f"of rank {rank}" / "run")}
        # One name that means another folder in each process, as a directory of one machine does.
        own = folder / f"machine {rank}"
        own.mkdir()
        os.chdir(own)
        found["machine"] = refused("/proc/self/cwd/run")
        found["options"] = refused(
            folder / "run",
            policy=POLICIES[rank],
            keep=Keep(last=(None, 3)[rank]),
            options=SaveOptions(**{name: values[rank] for name, values in OPTIONS.items()}),
        )
        found["unsupported"] = refused(folder / "run", options=SaveOptions(max_pending=1 + rank))
        found["left"] = sorted(path.name for path in folder.iterdir()) + os.listdir(own)
        found["groups"] = len(dist.distributed_c10d._world.pg_map) - groups_before
        dist.barrier()
        with Engine(folder / "run", process_group=group) as engine:
            state = {"w": torch.arange(4.0)}
            engine.save(0, state).wait("committed")
            for name, restoring in (("first restores", 0), ("second restores", 1)):
                found[name] = message(
                    engine.restore if rank == restoring else lambda: engine.save(1, state)
                )
            found["steps asked for"] = message(lambda: engine.restore(rank))
            # The root of rank 1 becomes another one while it is open.
            store = engine._saver._setup.store
            before = store.path
            if rank == 1:
                Engine(folder / "elsewhere").close()
                store.path = folder / "elsewhere"
            state["w"] += 1
            engine.save(1, state | {f"of {rank}": torch.ones(3)})
            found["moved"] = message(engine.wait)
            store.path = before
            engine.save(2, state).wait("committed")
            found["restored"] = engine.restore()["w"].tolist()
            found["steps"] = engine.steps()
        return found


def differ_under_dcp(rank: int, size: int, port: int, folder: Path) -> Any:
    """Save with DCP to folders and with options that differ, then to one folder."""
    with world(rank, size):
        state = {f"of {rank}": torch.ones(5)}

        def refused(step: int, root: Path | str, **options: Any) -> str:
            with closing_writer(root, **options) as writer:
                return message(lambda: dcp.save(state, checkpoint_id=step, storage_writer=writer))

        found = {"root": refused(1, folder / f"of rank {rank}")}
        own = folder / f"machine {rank}"
        own.mkdir()
        os.chdir(own)
        found["machine"] = refused(1, "/proc/self/cwd/run")
        found["options"] = refused(
            1,
            folder / "run",
            keep=Keep(last=3 + rank),
            options=SaveOptions(durability=("power", "process")[rank]),
        )
        dist.barrier()
        found["left"] = [str(path) for path in folder.rglob("*") if path.is_file()]
        dist.barrier()
        found["same"] = refused(1, folder / "run")
        found["steps"] = open_root(folder / "run").steps()
        return found


def copies_under_dcp(rank: int, size: int, port: int, folder: Path) -> Any:
    """Save states with DCP of which the ranks hold copies that differ in turn."""
    with world(rank, size), closing_writer(folder / "run") as writer:
        torch.manual_seed(1)
        mesh = init_device_mesh("cpu", (size,))
        # The first is all that rank 1 saves if rank 0 saves the others, or nothing.
        state: dict[str, Any] = {
            "generator": torch.get_rng_state(),
            "large": torch.zeros(500_000),
            "rows": distribute_tensor(torch.zeros(10, 3), mesh, [Replicate()]),
            "object": {"rank": rank},
        }

        def error_of(step: int, planner: Any = None) -> str:
            return message(
                lambda: dcp.save(state, checkpoint_id=step, storage_writer=writer, planner=planner)
            )

        found = {"equal": error_of(0)}
        state["generator"][17] += rank
        found["generator"] = error_of(1)
        state["generator"][17] -= rank
        found["equal again"] = error_of(2)
        state["rows"].to_local()[5, 1] = rank
        found["rows"] = error_of(3)
        state["rows"].to_local()[5, 1] = 0
        state["large"][77] = rank
        errors = [error_of(step) for step in range(4, 4 + LARGE_EVERY)]
        found["large"] = next((error for error in errors if error), "")
        found["refused"] = str(sum(map(bool, errors)))
        state["large"][77] = 0
        # Plans that DCP caches come to the coordinator without items.
        for step in (50, 51):
            found[f"cached {step}"] = error_of(
                step, dcp.DefaultSavePlanner(enable_plan_caching=True)
            )
        state["generator"][17] += rank
        found["cached"] = error_of(52, dcp.DefaultSavePlanner(enable_plan_caching=True))
        state["generator"][17] -= rank
        found["equal at the end"] = error_of(99)
        return found


def copies_of_a_rank_without_parts(rank: int, size: int, port: int, folder: Path) -> Any:
    """Save one replicated tensor, which only one rank writes, while the copies differ."""
    with world(rank, size), closing_writer(folder / "run") as writer:
        state = {"generator": torch.full((8,), float(rank))}
        return message(lambda: dcp.save(state, checkpoint_id=0, storage_writer=writer))


@contextlib.contextmanager
def closing_writer(root: Path | str, **options: Any) -> Iterator[DeltaStorageWriter]:
    writer = DeltaStorageWriter(root, **options)
    try:
        yield writer
    finally:
        dist.barrier()
        writer.close()


def die_before_the_group(rank: int, size: int, port: int, folder: Path) -> Any:
    """Rank 1 ends before it opens its engine. Return the error of rank 0."""
    with world(rank, size) as group:
        dist.barrier()
        if rank == 1:
            os._exit(1)
        error = message(
            lambda: Engine(
                folder / "run", process_group=group, options=SaveOptions(io_timeout_seconds=2)
            )
        )
        return error, (folder / "run").exists()


def copies(rank: int, size: int, port: int, folder: Path) -> Any:
    """Save states of which the ranks hold copies that differ in turn."""
    with world(rank, size) as group, Engine(folder / "run", process_group=group) as engine:
        torch.manual_seed(1)
        # 2 MB, whole on both ranks; rows 4 and 5 of 10 are on both.
        state = {
            "generator": torch.get_rng_state(),
            "large": torch.zeros(500_000),
            "rows": Shard(torch.zeros(6, 3), (10, 3), (4 * rank, 0)),
            "step": 0,
        }
        found: dict[str, str] = {}

        def error_of(step: int) -> str:
            return message(lambda: engine.save(step, state).wait("committed"))

        found["equal"] = error_of(0)
        state["generator"][17] += rank
        found["generator"] = error_of(1)
        state["generator"][17] -= rank
        found["equal again"] = error_of(2)
        state["rows"].data[5 - 4 * rank, 1] = 1.0 + rank
        found["rows"] = error_of(3)
        state["rows"].data[5 - 4 * rank, 1] = 1.0
        state["large"][77] = rank
        errors = [error_of(step) for step in range(4, 4 + LARGE_EVERY)]
        found["large"] = next((error for error in errors if error), "")
        found["refused"] = str(sum(map(bool, errors)))
        state["large"][77] = 0
        found["equal at the end"] = error_of(99)
        return found
