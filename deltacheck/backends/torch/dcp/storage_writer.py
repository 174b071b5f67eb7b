"""The writer for ``torch.distributed.checkpoint``: ranks save tiles, the coordinator commits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from deltacheck.backends.torch.dcp import names, objects, stream
from deltacheck.backends.torch.dcp.decisions import tree_of_numbers
from deltacheck.backends.torch.dcp.foreign_options import refuse
from deltacheck.backends.torch.dcp.stream import (
    DurablePart,
    Intent,
    RootStream,
    TileTask,
    stream_of,
)
from deltacheck.backends.torch.state import leaves, shards
from deltacheck.errors import SaveFailed, UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.instances import name_of
from deltacheck.leaf.sharding import HeldShards, Holdings
from deltacheck.leaf.tiles import Box
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.policy import Keep, Policy
from deltacheck.save.progress import beginning
from deltacheck.save.ranks.joint import Report
from deltacheck.save.ranks.rank_setup import RankSetup, require_probe, require_same_options
from deltacheck.save.ranks.replicas import digests_of
from deltacheck.save.save_options import SaveOptions, Settings, metric_numbers, require_defaults
from deltacheck.save.treatment.signals import HeldState, worst_metrics
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectPath, ObjectStore

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The tree of a rank's part. The coordinator has the tree of all ranks.
_NO_TREE: Node = {"t": "dict", "k": []}


class _PlannedSave(NamedTuple):
    """The save under way, on the coordinator: the content of each name, and the tree of all.

    ``roots``: the address of the root on each rank.
    """

    kinds: dict[str, _Content]
    tree: Node
    roots: list[str]


class _Content(NamedTuple):
    """The content of a name. ``shape`` is ``None`` for an object, saved as ``torch.save`` bytes."""

    keys: names.Keys
    dtype: str
    shape: tuple[int, ...] | None


def _in_turn(
    method: Callable[Concatenate[DeltaStorageWriter, _P], _R],
) -> Callable[Concatenate[DeltaStorageWriter, _P], _R]:
    """Let a call of a save fail if another save has begun, and end its turn after the last one."""

    @functools.wraps(method)
    def call(writer: DeltaStorageWriter, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A rank that does not commit gets no call after it has written.
        last = "finish" if writer._is_coordinator else "write_data"
        with stream.turns_of(writer._path).call(writer._save, is_last=method.__name__ == last):
            return method(writer, *args, **kwargs)

    return call


# DCP waits for its writer, has one save under way, and raises what fails.
_NO_OPTIONS = (
    "device_cache_bytes",
    "max_pending",
    "on_busy",
    "capture",
    "on_error",
    "max_failures",
)


@typed
class DeltaStorageWriter(StorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    All steps go to one root, each as changes to the step before. A writer may be made anew for
    every save: the *shadow*, the copy that changes are found against, belongs to the process and
    stays until ``close``. The first save of a process writes everything. All writers of a root in
    one process have the same options.

    A save that fails on any rank makes no step and leaves earlier steps as they were. Objects that
    are not tensors are kept as ``torch.save`` bytes, and refused if a load would not accept them.
    Every rank needs DCP's collectives (``use_collectives=True``). Saves raise ``RootBusy``,
    ``UnsupportedLeaf`` and ``SaveFailed`` within DCP's ``CheckpointException``. See
    ``docs/how-to/dcp.md``.

    Args:
        root: A directory or an address of an object store, the same on every rank.
        step: The step of the next save if DCP is given no ``checkpoint_id``. A ``checkpoint_id`` is
            an integer, or a name or path that ends in one (``"step-1200"``).
        policy: The contract of each leaf and the length of chains. A policy that bounds or reuses
            leaves needs the learning rate and the betas in the state (``get_state_dict`` puts them
            there); without them masters or moments stay exact. Longer chains: smaller saves;
            shorter: faster restores. Default: ``Policy.exact()``.
        keep: The steps and leaves that stay after each save. Default: all.
        options: All else, as for ``Engine``; those that DCP leaves no choice for are refused.
        storage: The access to an object store. Default: from the environment.
        overwrite: ``True``: a save of a step that exists replaces it once it is complete.
            ``False``: such a save fails, and the step stays as it is.
        metrics: Numbers kept with the step, such as ``{"loss": loss, "gradient_norm": norm}``. A
            policy learns from these two whether training is stable. Of each, the largest value of
            all ranks counts, and NaN wins. They are of one step, so make a writer for each save.
            Default: none; the policy then judges by rates, step counts and moments alone.
        **other: None. An option that only ``FileSystemWriter`` has is refused with its alternative.

    Raises:
        TypeError: There is no such option.
        ValueError: An option has a value that it cannot have.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ObjectPath,
        *,
        step: int | None = None,
        policy: Policy | None = None,
        keep: Keep | None = None,
        options: SaveOptions | None = None,
        storage: ObjectStore | None = None,
        overwrite: bool = True,
        metrics: Mapping[str, float] | None = None,
        **other: Any,
    ) -> None:
        refuse("DeltaStorageWriter", other)
        super().__init__()
        self._overwrite = overwrite
        self._metrics = metric_numbers(metrics)
        self._path = place.of(root, storage).absolute()
        settings = Settings.of(policy, keep, options)
        require_defaults(settings.options, _NO_OPTIONS, type(self).__name__)
        # A copy on a device would gain nothing.
        self.settings = replace(settings, options=replace(settings.options, device_cache_bytes=0))
        self._default_step = None if step is None else names.step_of(step)
        # From checkpoint ids, by thread: asynchronous saves may share a writer.
        self._next_steps: dict[int, int] = {}
        self._save = ""  # an id of the save under way
        self._is_coordinator = False
        self._step = -1
        self._planned_save: _PlannedSave | None = None

    def close(self) -> None:
        """Release the shadow and the root, for all writers of this root in this process.

        The next save writes everything. A second call does nothing.

        Raises:
            ReceiptFailed: A save could not be read back and no call has raised it.
        """
        stream.release(self._path)

    # --- called by DCP ----------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Take the step of the next save from a ``checkpoint_id``.

        Args:
            checkpoint_id: A step, or a name that ends in one. Default: the writer's ``step``.

        Raises:
            ValueError: The name does not end in a number.
        """
        self._next_steps.pop(threading.get_ident(), None)
        if checkpoint_id is not None:
            self._next_steps[threading.get_ident()] = names.step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. It waits for a save of another thread to the same root.

        Args:
            is_coordinator: True on the rank that commits.
            *args: Ignored.
            **kwargs: ``use_collectives``, which must not be false. Others are ignored.

        Raises:
            ValueError: There are no collectives, or the step is not known.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "without collectives no rank knows when all ranks are done: save with"
                " use_collectives=True"
            )
        # A ``checkpoint_id`` counts for one save only; the writer may be used again without one.
        step = self._next_steps.pop(threading.get_ident(), self._default_step)
        if step is None:
            raise ValueError(
                "the step is not known: give save() a checkpoint_id that is or ends in the step's"
                " number, or the writer a step="
            )
        save = uuid.uuid4().hex
        stream.turns_of(self._path).begin(save)
        # Only now, because the save before may be of this writer.
        self._save, self._is_coordinator = save, is_coordinator
        self._step, self._planned_save = step, None

    @_in_turn
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the setup and the tensors of this rank, for the coordinator.

        The items stay: DCP has not yet decided which rank saves replicated tensors.

        Args:
            plan: The plan of this rank.

        Returns:
            The plan.

        Raises:
            UnsupportedLeaf: A tensor cannot be kept exactly.
        """
        holdings = None
        # A plan that DCP has cached comes without items. They are those of the save before.
        if getattr(plan, "usable", True):
            self._stream.held_items = plan.items
            tensors = dataclasses.replace(plan, items=_tensors(plan.items))
            holdings = Holdings.of(_held(tensors, {}))
        setup = RankSetup.of(self._path, self.settings)
        intent = Intent(self._step, setup, holdings, self._metrics)
        return dataclasses.replace(plan, storage_data=msgspec.msgpack.encode(intent))

    @_in_turn
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Cut the leaves into tiles and assign each tile to a rank.

        Args:
            plans: The plans of all ranks.

        Returns:
            The plans, each with the rank's task as ``storage_data``.

        Raises:
            RankFailed: The ranks have other options, or their parts do not fit together.
            RootBusy: Another process writes to the root.
            UnsupportedLeaf: A tensor cannot be kept exactly.
            SaveFailed: DCP sent cached plans of another root, or the step exists and may not be
                replaced.
        """
        intents = _intents(plans, self._step)
        setups = {rank: intent.setup for rank, intent in intents.items()}
        require_same_options({rank: setup.options for rank, setup in setups.items()})
        roots = [setups[rank].root if rank in setups else "its root" for rank in range(len(plans))]
        plans = _made_usable(plans, self._stream.plans)
        kinds: dict[str, _Content] = {}
        boxes_by_rank = [_held(plan, kinds) for plan in plans]
        tree = names.skeleton_of(
            (content.keys, names.OBJECT if content.shape is None else None)
            for content in kinds.values()
        )
        local_holdings = {
            rank: intent.holdings for rank, intent in intents.items() if intent.holdings is not None
        }
        metrics = worst_metrics(intent.metrics for intent in intents.values())
        tasks = self._stream.plan(
            self._step, boxes_by_rank, local_holdings, tree, metrics, overwrite=self._overwrite
        )
        self._planned_save = _PlannedSave(kinds, tree, roots)
        # Weak: DCP keeps a plan alive for as long as it may refer to it as a cached one.
        self._stream.plans = [weakref.ref(plan) for plan in plans]
        return [
            dataclasses.replace(plan, storage_data=msgspec.msgpack.encode(task))
            for plan, task in zip(plans, tasks, strict=True)
        ]

    @_in_turn
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tiles of this rank. They are durable when this returns.

        Args:
            plan: The plan of this rank from ``prepare_global_plan``.
            planner: The planner, which resolves the data.

        Returns:
            A future that is done: one result for each item of the plan, at least one.

        Raises:
            SaveFailed: The plan is not of this save, or the storage failed.
            UnsupportedLeaf: A tensor cannot be kept exactly, or a load would refuse an object.
            RankFailed: This rank does not see the folder of the coordinator.
        """
        # A planner may replace the plan that the coordinator returned.
        if not isinstance(plan.storage_data, bytes):
            raise SaveFailed(
                f"the planner {type(planner).__name__} has lost the plan's storage_data, which"
                " DeltaStorageWriter needs"
            )
        task = msgspec.msgpack.decode(plan.storage_data, type=TileTask)
        # The message of another save would let this rank write under a wrong number.
        if task.step != self._step:
            raise SaveFailed(
                f"this rank saves step {self._step}, the coordinator step {task.step}: every rank"
                " has to make the same calls"
            )
        # Before this rank makes a root of its own there.
        if task.probe:
            require_probe(self._path, task.probe, task.root)
        held_items = self._stream.held_items
        with beginning(task.step):
            # Large copies take turns by the number of the save, not of its segments.
            number = task.seq // self.settings.numbers_of_save
            copies = digests_of(_copies(held_items, plan, planner, task), number)
            if self.settings.policy.is_exact:
                local, state = _local((), plan, planner, task), None
            else:
                local = _local(held_items, plan, planner, task)
                state = _observed(held_items, plan.planner_data, planner, task.metrics)
            part = self._stream.save(task, local, copies, state)
        results = [WriteResult(item.index, _bytes_of(item), None) for item in plan.items]
        # The first result has the report of all items. A rank that holds copies only reports, too.
        first = results[0] if results else WriteResult(MetadataIndex(""), 0, None)
        report: Any = msgspec.msgpack.encode(part)
        results[:1] = [dataclasses.replace(first, storage_data=report)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @_in_turn
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the step exist. DCP calls this on the coordinator once every part is durable.

        Args:
            metadata: DCP's metadata of the save.
            results: The results of ``write_data`` of all ranks.

        Raises:
            SaveFailed: The save is not the one that was planned.
            RankFailed: A rank reports another step.
            RootBusy: Another process writes to the root.
        """
        # Taken out, so that a plan is finished once only.
        planned_save, self._planned_save = self._planned_save, None
        if planned_save is None:
            raise SaveFailed(f"step {self._step} was finished, but not planned, by this writer")
        _check(planned_save.kinds, metadata, self._step)
        # A rank without items has no result that could carry its report.
        empty_part = DurablePart(Report(self._step, (), ""), {})
        parts = [
            msgspec.msgpack.decode(of_rank[0].storage_data, type=DurablePart)
            if of_rank
            else empty_part
            for of_rank in results
        ]
        self._stream.commit(parts, planned_save.tree, planned_save.roots)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a ``checkpoint_id`` names a step.

        Args:
            checkpoint_id: The name or path.

        Returns:
            True if it ends in a number.
        """
        return names.is_step(checkpoint_id)

    @property
    def _stream(self) -> RootStream:
        return stream_of(self._path, self.settings)


def _intents(plans: list[SavePlan], step: int) -> dict[int, Intent]:
    """Return the intents of the ranks, by rank, as far as their plans have one of this step.

    With ``enable_plan_caching``, DCP may leave out the plan of a rank or give an earlier one.
    """
    intents: dict[int, Intent] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, bytes):
            with contextlib.suppress(msgspec.DecodeError):
                intent = msgspec.msgpack.decode(plan.storage_data, type=Intent)
                if intent.step == step:
                    intents[rank] = intent
    return intents


def _made_usable(plans: list[SavePlan], before: list[weakref.ref[SavePlan]]) -> list[SavePlan]:
    """Return the plans of all ranks.

    With ``enable_plan_caching`` DCP does not send a plan that has not changed. The plan of the save
    before takes its place: a rank that wrote by its own cached plan would have the task of an
    earlier save. DCP keeps these plans alive as long as it may refer to them.
    """
    if all(getattr(plan, "usable", True) for plan in plans):
        return plans
    cached = [ref() for ref in before] if len(before) == len(plans) else [None] * len(plans)
    usable = [plan if plan.usable else old for plan, old in zip(plans, cached, strict=True)]
    if None in usable:
        raise SaveFailed(
            "DCP's cached plans are not of this root: its planner has saved elsewhere. Save with a"
            " planner without enable_plan_caching"
        )
    return [plan for plan in usable if plan is not None]


def _held(plan: SavePlan, kinds: dict[str, _Content]) -> dict[str, HeldShards]:
    """Return the boxes that a rank writes, by leaf path.

    Args:
        plan: The plan of the rank.
        kinds: Receives the content of each name of the plan.

    Raises:
        UnsupportedLeaf: A tensor cannot be kept exactly.
        ValueError: The ranks have different content under one name.
    """
    boxes: dict[str, list[Box]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        content = _content(item, plan.planner_data)
        expected = kinds.setdefault(fqn, content)
        # Ranks that differ in type or shape would write parts of two leaves under one name.
        if expected != content:
            raise ValueError(f"{fqn!r} is {expected} on one rank and {content} on another")
        boxes.setdefault(fqn, []).append(_box(item))
    return {
        names.path_of(kinds[fqn].keys): HeldShards(
            kinds[fqn].dtype, kinds[fqn].shape or (), tuple(own_boxes)
        )
        for fqn, own_boxes in boxes.items()
    }


def _content(item: WriteItem, planner_data: object) -> _Content:
    keys = names.keys_of(item.index.fqn, planner_data)
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        return _Content(keys, "uint8", None)
    try:
        dtype = dtype_named(str(item.tensor_data.properties.dtype).removeprefix("torch.")).name
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(
            f"{item.index.fqn!r}: {error}; save value.view(torch.uint8)"
        ) from None
    return _Content(keys, dtype, tuple(item.tensor_data.size))


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        return ()
    chunk = item.tensor_data.chunk
    return tuple(
        slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def _copies(
    held_items: Sequence[WriteItem], plan: SavePlan, planner: SavePlanner, task: TileTask
) -> Iterator[shards.ShardCopy]:
    """Return the tiles that this rank holds and others write."""
    tiles = task.share.copied_tiles()
    items = [
        item
        for item in _tensors(held_items)
        if names.path_of(names.keys_of(item.index.fqn, plan.planner_data)) in tiles
    ]
    return shards.copies(_flat(items, plan.planner_data, planner), tiles)


def _local(
    held_items: Sequence[WriteItem], plan: SavePlan, planner: SavePlanner, task: TileTask
) -> Flat:
    """Return the tiles that this rank writes, as leaves.

    Args:
        held_items: All items that it holds, if our plan may give it tensors that DCP's does not.
        plan: Its plan.
        planner: Resolves the items.
        task: Its task.

    Raises:
        SaveFailed: The planner resolves an item to data that it has not planned.
    """
    items = list(plan.items)
    if held_items:
        items = [item for item in items if item.tensor_data is None] + _tensors(held_items)
    flat = _flat(items, plan.planner_data, planner)
    tiles = task.share.tiles()
    # Cached plans may be older than the task.
    if tiles.keys() - flat.arrays.keys():
        raise SaveFailed(
            f"step {task.step}: this rank was to write {min(tiles.keys() - flat.arrays.keys())!r},"
            " which is not in its plan"
        )
    return shards.local_flat(flat, tiles, _NO_TREE)


def _observed(
    items: Sequence[WriteItem],
    planner_data: object,
    planner: SavePlanner,
    metrics: Mapping[str, float],
) -> HeldState:
    """Return the state that a policy decides by."""
    # Without objects, whose sizes change: they would look like another optimizer.
    flat = _flat(_tensors(items), planner_data, planner)
    tree = tree_of_numbers(items, planner_data, planner)
    return shards.held_state(flat._replace(skeleton=tree), metrics)


def _tensors(items: Sequence[WriteItem]) -> list[WriteItem]:
    return [item for item in items if item.tensor_data is not None]


def _flat(items: Sequence[WriteItem], planner_data: object, planner: SavePlanner) -> Flat:
    """Return the data of items of this rank, as leaves that it holds in parts."""
    parts: dict[str, list[shards.Shard]] = {}
    arrays: dict[str, object] = {}
    array_leaves: dict[str, ArrayLeaf] = {}
    for item in items:
        content = _content(item, planner_data)
        path = names.path_of(content.keys)
        data = planner.resolve_data(item)
        if content.shape is None:
            if not isinstance(data, io.BytesIO):
                raise SaveFailed(
                    f"{item.index.fqn!r} was planned as bytes, but the planner gives a"
                    f" {type(data).__name__}"
                )
            # The size is known only now. The coordinator gets it with the report
            # (``DurablePart.sizes``).
            pickled = data.getvalue()
            objects.require_readable(pickled, item.index.fqn)
            arrays[path] = np.frombuffer(pickled, np.uint8)
            array_leaves[path] = ArrayLeaf((len(pickled),), "uint8", None, names.OBJECT)
            continue
        box = _box(item)
        tensor = _tensor_of(item, data, content, [s.stop - s.start for s in box])
        parts.setdefault(path, []).append(
            shards.Shard(tensor, content.shape, tuple(s.start for s in box))
        )
        arrays[path] = shards.Shards(tuple(parts[path]))
        array_leaves[path] = ArrayLeaf(content.shape, content.dtype)
    return Flat(_NO_TREE, arrays, array_leaves)


def _tensor_of(item: WriteItem, data: object, content: _Content, sizes: list[int]) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        leaf = leaves.describe(data)
        if leaf is None:
            raise UnsupportedLeaf(
                f"leaf {item.index.fqn!r}: its part on this rank is a {name_of(type(data))}, a"
                " tensor that wraps others, which DCP does not know; save"
                " {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}, under a"
                " key of each rank if it is sharded, or save it with Engine"
            )
        # A planner may convert data, which would not fit the tile that was planned.
        if leaf.dtype == content.dtype and list(leaf.shape) == sizes:
            return data
        raise SaveFailed(
            f"{item.index.fqn!r} was planned as {content.dtype}{sizes}, but the planner gives"
            f" {data.dtype}{list(data.shape)}"
        )
    raise SaveFailed(
        f"{item.index.fqn!r} was planned as {content.dtype}{sizes}, but the planner gives a"
        f" {type(data).__name__}"
    )


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    size: int = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return size


def _check(kinds: Mapping[str, _Content], metadata: Metadata, step: int) -> None:
    """Raise ``SaveFailed`` if the planned save is not the one that DCP finishes."""
    finished_shapes = {
        fqn: None if isinstance(entry, BytesStorageMetadata) else tuple(entry.size)
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    planned_shapes = {fqn: content.shape for fqn, content in kinds.items()}
    if finished_shapes != planned_shapes:
        wrong = sorted(
            fqn
            for fqn in finished_shapes.keys() | planned_shapes.keys()
            if finished_shapes.get(fqn, ...) != planned_shapes.get(fqn, ...)
        )
        raise SaveFailed(
            f"step {step} was planned without {wrong[0]!r}, or with another shape of it, as cached"
            " plans of another state may be. Save with a planner without enable_plan_caching"
        )
