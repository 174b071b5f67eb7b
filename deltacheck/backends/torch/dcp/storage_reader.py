"""The reader that ``torch.distributed.checkpoint.load`` calls: each rank reads the chunks that it
needs, and nothing is unpickled unscreened.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from deltacheck.backends.torch.dcp import names
from deltacheck.backends.torch.dcp.stream import Restored, keep
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import Damaged, DeltacheckError, StepNotFound, TreeMismatch, UnsupportedLeaf
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.sharding import whole
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box
from deltacheck.restore import damage
from deltacheck.restore.content import Array, Loaded
from deltacheck.restore.fill import Request, StepReader, leaf_of_box
from deltacheck.restore.resolve import require_contract
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

_BATCH_BYTES = 256 << 20  # read at a time, beside the tensors that they go to


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stands for a leaf that is no tensor for DCP."""

    path: str
    tag: str | None


class _Index(NamedTuple):
    """A step as DCP names it: by name, the leaf path of each tensor, and every other value with
    ``_Stored`` and meta tensors for what is stored.
    """

    tensors: dict[str, str]
    others: dict[str, object]
    ways: dict[str, tuple[str | int, ...]]
    owners: dict[int, str]  # id of a meta tensor -> leaf path


class DeltaStorageReader(StorageReader):
    """Reads a step of a root into the state that ``torch.distributed.checkpoint.load`` is given, on
    any number of ranks, every byte verified.

    ``root``: one that ``DeltaStorageWriter`` wrote, or an ``Engine``, or JAX. ``step``: a number or
    a tag; by default the newest. A ``checkpoint_id`` (an integer, or a name or path that ends in
    one) goes before it. ``resume``: whether this process will save to the root, too: what was read
    is then kept for its next save to compare with, which is written as changes and not whole. It
    takes as much memory as the shadow of a saving process, but already now, and for ever where no
    save follows. ``allow_pickle``: whether what ``torch.save`` has written, objects that are no
    tensors, is given to Python's unpickler as it is. ``False``: what
    ``torch.load(weights_only=True)`` does not take is refused; ``True``: any object comes back, and
    whoever wrote the root runs code in this process. ``contract``: refuse a step with a leaf that
    was saved under a weaker one than ``"exact"`` or ``"bounded"``. ``max_bytes``: refuse before
    allocating more than this on a rank. ``expected_digest``: refuse a step whose manifest has
    another digest than this. ``storage``: how an object store is reached.

    A tensor of another dtype than the saved one is refused. Raises ``NotACheckpointRoot``, and by
    way of DCP's ``CheckpointException``: ``StepNotFound``, ``ContractNotMet``, ``TreeMismatch``,
    ``UnsupportedLeaf`` naming the object that would run code, ``Damaged`` or ``ChainBroken``
    (naming step, leaf, file and the steps that still restore), ``BudgetExceeded``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ObjectPath,
        step: int | str | None = None,
        *,
        resume: bool = False,
        allow_pickle: bool = False,
        contract: str | None = None,
        max_bytes: int | None = None,
        expected_digest: str | None = None,
        storage: ObjectStore | None = None,
    ) -> None:
        super().__init__()
        self._root: Root = open_root(place.of(root, storage).absolute())
        self._default_step = self._step = step
        self._resume = resume
        self._allow_pickle = allow_pickle
        self._contract = contract
        self._max_bytes = max_bytes
        self._expected_digest = expected_digest
        self._read: tuple[Manifest, _Index] | None = None

    # --- what DCP calls ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Take the step from a ``checkpoint_id``, for all loads to come."""
        self._step = self._default_step if checkpoint_id is None else names.step_of(checkpoint_id)

    # Without **kwargs: DCP would ask again for "rank local metadata", which there is none of, where
    # this has failed.
    def read_metadata(self) -> Metadata:
        """What the step holds, as DCP has it."""
        manifest = self._root.manifest(self._step)
        self._root.require_digest(manifest, self._expected_digest)
        require_contract(manifest, self._contract)
        index = _index(manifest)
        self._read = manifest, index
        described: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in index.others}
        described |= {fqn: _described(manifest, path) for fqn, path in index.tensors.items()}
        return Metadata({fqn: described[fqn] for fqn in index.ways}, planner_data=dict(index.ways))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: ``read_metadata`` has read all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which step this rank reads."""
        manifest, _ = self._known()
        return dataclasses.replace(
            plan, storage_data=(manifest.step, self._root.digest_of(manifest))
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse ranks that read different steps, as they may where one is committed meanwhile."""
        read = [plan.storage_data for plan in plans]
        if any(one != read[0] for one in read):
            steps = ", ".join(f"rank {rank} step {step}" for rank, (step, _) in enumerate(read))
            raise StepNotFound(
                f"the ranks do not read the same step: {steps}. Name the step to load"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, verify and place what this rank's plan asks for."""
        manifest, index = self._known()
        with damage.named(self._root, manifest):
            self._tensors(
                [item for item in plan.items if item.type is not LoadItemType.BYTE_IO],
                planner,
                manifest,
                index,
            )
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object(item.storage_index.fqn, manifest, index))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        return names.is_step(checkpoint_id)

    # --- our side ---------------------------------------------------------------------------------

    def _known(self) -> tuple[Manifest, _Index]:
        if self._read is None:
            raise StepNotFound("DCP has not asked this reader for its metadata yet")
        return self._read

    def _tensors(
        self, items: list[ReadItem], planner: LoadPlanner, manifest: Manifest, index: _Index
    ) -> None:
        reader = StepReader(self._root, manifest, max_bytes=self._max_bytes, keep=self._resume)

        def place(number: int, spec: LeafSpec, box: Array) -> None:
            _place(items[number], planner, leaf_of_box(spec, box), manifest.step)

        requests = {
            number: Request(index.tensors[item.storage_index.fqn], _box(item))
            for number, item in enumerate(items)
        }
        reader.boxes(requests, place, batch_bytes=_BATCH_BYTES)
        if self._resume:
            keep(self._root.path, Restored(manifest, reader.chains, reader.stored))

    def _object(self, fqn: str, manifest: Manifest, index: _Index) -> io.BytesIO:
        """What DCP's planner will unpickle: written by ``torch.save`` in this process, of values
        that nothing was run for.
        """
        value = index.others[fqn]
        if isinstance(value, _Stored) and value.tag == names.OBJECT:
            content = self._load(value.path, manifest).data.tobytes()
            if self._allow_pickle:
                return io.BytesIO(content)
            value = _screened(content, fqn, manifest.step)
        else:

            def real(one: Any) -> Any:
                path = one.path if isinstance(one, _Stored) else index.owners.get(id(one))
                return (
                    one
                    if path is None
                    else leaves.place(self._load(path, manifest), getattr(one, "tag", None))
                )

            value = optree.tree_map(real, value, none_is_leaf=True)  # type: ignore[arg-type]
        safe = io.BytesIO()
        torch.save(value, safe)
        safe.seek(0)
        return safe

    def _load(self, path: str, manifest: Manifest) -> Loaded:
        reader = StepReader(self._root, manifest, max_bytes=self._max_bytes, keep=False)
        return reader.whole([path])[path]


def _index(manifest: Manifest) -> _Index:
    """How DCP would name what a step holds, by its own way to flatten a state."""
    owners: dict[int, str] = {}
    kept = []  # as long as their ids are asked for

    def place(path: str, owner: str, tag: str | None) -> object:
        spec = manifest.spec(owner)
        dtype = getattr(torch, spec.dtype, None)
        if tag in (names.OBJECT, tree.NUMPY_ARRAY, tree.NUMPY_SCALAR) or not isinstance(
            dtype, torch.dtype
        ):
            return _Stored(owner, tag)
        stand_in = torch.empty(spec.shape, dtype=dtype, device="meta")
        kept.append(stand_in)
        owners[id(stand_in)] = owner
        return stand_in

    state = tree.unflatten(manifest.tree, place)
    if not isinstance(state, dict):
        raise UnsupportedLeaf(
            f"step {manifest.step} is a {type(state).__name__}, and DCP loads dicts; restore it"
            " with deltacheck.open"
        )
    try:
        flat, ways = flatten_state_dict(state)
    except ValueError as error:
        raise UnsupportedLeaf(
            f"step {manifest.step} has names that are one to DCP: {error}; restore it with"
            " deltacheck.open"
        ) from None
    tensors = {
        fqn: owners[id(value)] for fqn, value in flat.items() if isinstance(value, torch.Tensor)
    }
    others = {fqn: value for fqn, value in flat.items() if fqn not in tensors}
    return _Index(tensors, others, ways, owners)


def _described(manifest: Manifest, path: str) -> TensorStorageMetadata:
    spec = manifest.spec(path)
    if path in manifest.tiles:
        cuts = manifest.tiles[path].cuts
        boxes = [tiles.box(cuts, number) for number in range(tiles.count(cuts))]
    else:
        boxes = [whole(spec.shape)]
    chunks = [
        ChunkStorageMetadata(
            torch.Size([s.start for s in box]), torch.Size([s.stop - s.start for s in box])
        )
        for box in boxes
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, spec.dtype)), torch.Size(spec.shape), chunks
    )


def _box(item: ReadItem) -> Box:
    """What of its leaf an item asks for."""
    offset = item.storage_index.offset or (0,) * len(item.lengths)
    starts = [a + b for a, b in zip(offset, item.storage_offsets, strict=True)]
    return tuple(
        slice(start, start + size) for start, size in zip(starts, item.lengths, strict=True)
    )


def _place(item: ReadItem, planner: LoadPlanner, leaf: Loaded, step: int) -> None:
    """Copy a box to the tensor that the planner has for it."""
    tensor = leaves.tensor_of(leaf)
    target = planner.resolve_tensor(item).detach()
    if target.dtype != tensor.dtype or target.shape != tensor.shape:
        raise TreeMismatch(
            f"leaf {item.storage_index.fqn!r} is {tensor.dtype}{list(tensor.shape)} in step {step},"
            f" {target.dtype}{list(target.shape)} in the target. Load it into a tensor of the saved"
            " type, and convert that"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _screened(content: bytes, fqn: str, step: int) -> object:
    """What ``torch.save`` has written, loaded without running code. Raises ``UnsupportedLeaf``
    where that cannot be.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).strip().split("\n")
        text = next(
            (line.strip() for line in why if "Unsupported" in line or "GLOBAL" in line), why[0]
        )
        raise UnsupportedLeaf(
            f"{fqn!r} of step {step} is an object that only running its pickle would give back:"
            f" {text}. If you trust whoever wrote this root, DeltaStorageReader(root,"
            " allow_pickle=True) does; torch.serialization.add_safe_globals lets single classes"
            " through"
        ) from None
    except DeltacheckError:
        raise
    except Exception as error:
        raise Damaged(
            f"{fqn!r} is not what torch.save has written: {type(error).__name__}: {error}", leaf=fqn
        ) from error
