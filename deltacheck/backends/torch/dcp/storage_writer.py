"""The writer that ``torch.distributed.checkpoint`` calls: what each rank saves as tiles, and one
commit by the coordinator.
"""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from deltacheck.backends.torch.dcp import names, stream
from deltacheck.backends.torch.dcp.stream import Part, Stream, Task, stream_of
from deltacheck.backends.torch.state import leaves, shards
from deltacheck.errors import SaveFailed, UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.sharding import Held
from deltacheck.leaf.tiles import Box
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.policy import Policy
from deltacheck.save.joint import Report
from deltacheck.save.options import SaveOptions, retention_of
from deltacheck.store.files import storage as place
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import ObjectPath, ObjectStore

_NO_TREE: Node = {"t": "dict", "k": []}  # of a rank's part: the coordinator has that of all


class _Begun(NamedTuple):
    """What the coordinator knows of the save under way. ``kinds``: what is saved under each name,
    as ``_Saved``.
    """

    kinds: dict[str, _Saved]
    tree: Node


class _Saved(NamedTuple):
    """What is saved under a name. ``shape``: ``None`` of an object, which ``torch.save`` makes
    bytes of.
    """

    keys: names.Keys
    dtype: str
    shape: tuple[int, ...] | None


class DeltaStorageWriter(StorageWriter):
    """Writes the checkpoints of ``torch.distributed.checkpoint.save`` and ``async_save`` to one
    root,
    each as changes to the one before.

    ``root``: a directory, or a prefix of an object store, that holds all steps; the same on every
    rank. ``step``: of the next save, where DCP is given no ``checkpoint_id``. A ``checkpoint_id``
    goes before it: an integer, or a name or path that ends in one (``"step-1200"``), of which only
    that number counts. Writers may be made anew for every save: what makes the next save small, a
    copy of what this process has written (the *shadow*), stays with the process until ``close``.
    The first save of a process writes everything.

    ``policy``: how long chains grow; it must be exact. ``host_cache_bytes``, ``shadow``,
    ``effort``, ``durability``, ``verify``, ``keep_last``, ``keep_every``, ``grace_seconds``,
    ``io_timeout_seconds``, ``exit_timeout_seconds``, ``storage``: as of ``Engine``. All writers of
    a root in one process have the same.

    A save that fails on any rank leaves no step, and every earlier one as it was. Objects that are
    no tensors are kept as the bytes that ``torch.save`` makes of them. Every rank needs DCP's
    collectives (``use_collectives=True``).

    Raises ``ValueError`` for wrong options. Saves raise, by way of DCP's ``CheckpointException``:
    ``RootBusy`` (naming the holder), ``UnsupportedLeaf`` naming what cannot be kept exactly,
    ``SaveFailed``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ObjectPath,
        *,
        step: int | None = None,
        policy: Policy | None = None,
        host_cache_bytes: int = 1 << 30,
        shadow: str = "auto",
        effort: str = "normal",
        durability: str = "power",
        verify: str = "none",
        keep_last: int | None = None,
        keep_every: int | None = None,
        grace_seconds: float = 60.0,
        io_timeout_seconds: float = 600.0,
        exit_timeout_seconds: float = 120.0,
        storage: ObjectStore | None = None,
    ) -> None:
        super().__init__()
        policy = policy or Policy.exact()
        if not policy.is_exact:
            raise ValueError("DCP's checkpoints need an exact policy, such as Policy.exact()")
        self._path = place.of(root, storage).absolute()
        self._options = SaveOptions(
            policy=policy,
            host_cache_bytes=host_cache_bytes,
            shadow=shadow,
            effort=effort,
            durability=Durability.of(durability),
            verify=verify,
            retention=retention_of(keep_last, keep_every),
            grace_seconds=grace_seconds,
            io_timeout_seconds=io_timeout_seconds,
            exit_timeout_seconds=exit_timeout_seconds,
        )
        self._default_step = None if step is None else names.step_of(step)
        self._asked: int | None = None
        self._step = -1
        self._begun: _Begun | None = None

    def close(self) -> None:
        """Give the memory and the root back, for all writers of this root in this process; the next
        save writes everything. More than once does nothing. Raises the failure of a receipt that
        nobody has been told of.
        """
        stream.release(self._path)

    # --- what DCP calls ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Take the step of the next save from a ``checkpoint_id``."""
        self._asked = None if checkpoint_id is None else names.step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save: the coordinator takes the root."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "without collectives nobody knows when all ranks are done: save with"
                " use_collectives=True"
            )
        step, self._asked = self._asked, None
        step = self._default_step if step is None else step
        if step is None:
            raise ValueError(
                "which step is this? Give save() a checkpoint_id that is or ends in the step's"
                " number, or the writer a step="
            )
        self._step, self._begun = step, None
        if is_coordinator:
            self._stream.lead()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to do: DCP has not decided yet which rank saves what several have."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Cut the leaves at the edges of what the ranks write of them, and tell each its tiles."""
        plans = _made_usable(plans, self._stream.plans)
        kinds: dict[str, _Saved] = {}
        held = [_held(plan, kinds) for plan in plans]
        tree = names.skeleton_of(
            (one.keys, names.OBJECT if one.shape is None else None) for one in kinds.values()
        )
        tasks = self._stream.plan(self._step, held)
        self._begun = _Begun(kinds, tree)
        self._stream.plans = [weakref.ref(plan) for plan in plans]
        return [
            dataclasses.replace(plan, storage_data=msgspec.msgpack.encode(task))
            for plan, task in zip(plans, tasks, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tiles; when this returns, they are durable."""
        if not isinstance(plan.storage_data, bytes):
            raise SaveFailed(
                f"the planner {type(planner).__name__} has lost the plan's storage_data, which"
                " DeltaStorageWriter needs"
            )
        task = msgspec.msgpack.decode(plan.storage_data, type=Task)
        if task.step != self._step:
            raise SaveFailed(
                f"this rank saves step {self._step}, the coordinator step {task.step}: every rank"
                " has to make the same calls"
            )
        part = self._stream.save(task, _local(plan, planner, task))
        told: Any = msgspec.msgpack.encode(part)
        results = []
        for item in plan.items:
            results.append(WriteResult(item.index, _bytes_of(item), told))
            told = None  # the first has it all
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the step exist. Called on the coordinator, and only where every rank's part is
        durable.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            raise SaveFailed(f"step {self._step} was finished, but not planned, by this writer")
        _check(begun.kinds, metadata, self._step)
        nothing = Part(Report(self._step, (), ""), {})
        parts = [
            msgspec.msgpack.decode(one[0].storage_data, type=Part) if one else nothing
            for one in results
        ]
        self._stream.commit(parts, begun.tree)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names.is_step(checkpoint_id)

    @property
    def _stream(self) -> Stream:
        return stream_of(self._path, self._options)


def _made_usable(plans: list[SavePlan], before: list[weakref.ref[SavePlan]]) -> list[SavePlan]:
    """The plans, and for those that DCP has not sent since they have not changed
    (``enable_plan_caching``) those of the save before: a rank that writes by the plan that it has
    kept would have the task of an earlier save. DCP itself keeps them as long as it may say so.
    """
    if all(getattr(plan, "usable", True) for plan in plans):
        return plans
    kept = [ref() for ref in before] if len(before) == len(plans) else [None] * len(plans)
    found = [plan if plan.usable else old for plan, old in zip(plans, kept, strict=True)]
    if None in found:
        raise SaveFailed(
            "DCP's cached plans are not of this root: its planner has saved elsewhere. Save with a"
            " planner without enable_plan_caching"
        )
    return [plan for plan in found if plan is not None]


def _held(plan: SavePlan, kinds: dict[str, _Saved]) -> dict[str, Held]:
    """What a rank writes, by leaf path. ``kinds``: of all ranks, to be gone on with. Raises
    ``UnsupportedLeaf``, ``ValueError``.
    """
    boxes: dict[str, list[Box]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        saved = _kind(item, plan.planner_data)
        known = kinds.setdefault(fqn, saved)
        if known != saved:
            raise ValueError(f"{fqn!r} is {known} on one rank and {saved} on another")
        boxes.setdefault(fqn, []).append(_box(item))
    return {
        names.path_of(kinds[fqn].keys): Held(kinds[fqn].dtype, kinds[fqn].shape or (), tuple(of))
        for fqn, of in boxes.items()
    }


def _kind(item: WriteItem, planner_data: object) -> _Saved:
    keys = names.keys_of(item.index.fqn, planner_data)
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return _Saved(keys, "uint8", None)
    try:
        dtype = dtype_named(str(item.tensor_data.properties.dtype).removeprefix("torch.")).name
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{item.index.fqn!r}: {error}") from None
    return _Saved(keys, dtype, tuple(item.tensor_data.size))


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        return ()
    chunk = item.tensor_data.chunk
    return tuple(
        slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def _local(plan: SavePlan, planner: SavePlanner, task: Task) -> Flat:
    """What this rank writes, as leaves: its tiles. Raises ``SaveFailed`` where what the planner
    gives is not what it has planned.
    """
    parts: dict[str, list[shards.Shard]] = {}
    arrays: dict[str, object] = {}
    described: dict[str, ArrayLeaf] = {}
    for item in plan.items:
        saved = _kind(item, plan.planner_data)
        path = names.path_of(saved.keys)
        data = planner.resolve_data(item)
        if saved.shape is None:
            if not isinstance(data, io.BytesIO):
                raise SaveFailed(
                    f"{item.index.fqn!r} was planned as bytes, but the planner gives a"
                    f" {type(data).__name__}"
                )
            content = data.getvalue()
            arrays[path] = np.frombuffer(content, np.uint8)
            described[path] = ArrayLeaf((len(content),), "uint8", None, names.OBJECT)
            continue
        box = _box(item)
        tensor = _tensor_of(item, data, saved, [s.stop - s.start for s in box])
        parts.setdefault(path, []).append(
            shards.Shard(tensor, saved.shape, tuple(s.start for s in box))
        )
        arrays[path] = shards.Shards(tuple(parts[path]))
        described[path] = ArrayLeaf(saved.shape, saved.dtype)
    tiles = task.share.tiles()
    if tiles.keys() - arrays.keys():
        raise SaveFailed(
            f"step {task.step}: this rank was to write {min(tiles.keys() - arrays.keys())!r}, which"
            " is not in its plan"
        )
    return shards.local_flat(Flat(_NO_TREE, arrays, described), tiles, _NO_TREE)


def _tensor_of(item: WriteItem, data: object, saved: _Saved, sizes: list[int]) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        described = leaves.describe(data)
        if (
            described is not None
            and described.dtype == saved.dtype
            and list(described.shape) == sizes
        ):
            return data
        raise SaveFailed(
            f"{item.index.fqn!r} was planned as {saved.dtype}{sizes}, but the planner gives"
            f" {data.dtype}{list(data.shape)}"
        )
    raise SaveFailed(
        f"{item.index.fqn!r} was planned as {saved.dtype}{sizes}, but the planner gives a"
        f" {type(data).__name__}"
    )


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    size: int = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return size


def _check(kinds: Mapping[str, _Saved], metadata: Metadata, step: int) -> None:
    """Refuse a save that is not the one that DCP means."""
    meant = {
        fqn: None if isinstance(of, BytesStorageMetadata) else tuple(of.size)
        for fqn, of in metadata.state_dict_metadata.items()
    }
    planned = {fqn: one.shape for fqn, one in kinds.items()}
    if meant != planned:
        wrong = sorted(
            fqn
            for fqn in meant.keys() | planned.keys()
            if meant.get(fqn, ...) != planned.get(fqn, ...)
        )
        raise SaveFailed(
            f"step {step} was planned without {wrong[0]!r}, or with another shape of it, as cached"
            " plans of another state may be. Save with a planner without enable_plan_caching"
        )
