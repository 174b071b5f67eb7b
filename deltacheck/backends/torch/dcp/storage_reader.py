"""Read a step for ``torch.distributed.checkpoint.load``.

Each rank reads only the chunks that it needs. Objects are unpickled only after screening.
"""

from __future__ import annotations

import dataclasses
import io
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from torch.utils._pytree import tree_map

from deltacheck.backends.torch.dcp import names, objects
from deltacheck.backends.torch.dcp.foreign_options import refuse
from deltacheck.backends.torch.dcp.stream import Restored, follow_course, keep
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import StepNotFound, TreeMismatch, UnsupportedLeaf
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, whole
from deltacheck.restore import damage
from deltacheck.restore.content import Array, Loaded
from deltacheck.restore.resolve import require_contract, require_leaves
from deltacheck.restore.values import Request, StepReader, leaf_of_box
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root

# Bytes read at a time, in addition to the tensors that they are copied to.
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Stored:
    """A placeholder for a stored leaf that DCP does not know as a tensor."""

    path: str
    tag: str | None


class _Index(NamedTuple):
    """The leaves of a step under the names of DCP.

    ``tensors`` maps a name to the leaf path of a tensor. ``others`` maps a name to any other value,
    with ``_Stored`` and meta tensors as placeholders for stored leaves. ``ways`` maps a name to the
    key path.
    """

    tensors: dict[str, str]
    others: dict[str, object]
    ways: dict[str, tuple[str | int, ...]]
    owners: dict[int, str]  # id of a meta tensor -> leaf path


@typed
class DeltaStorageReader(StorageReader):
    """Reads a step into the state that ``torch.distributed.checkpoint.load`` is given.

    Any number of ranks may load a step, and every byte is verified. A tensor of another dtype than
    the saved one is refused. Errors during a load arrive inside DCP's ``CheckpointException``:
    ``StepNotFound``, ``ContractNotMet``, ``TreeMismatch``, ``UnsupportedLeaf`` (naming the object
    that would run code), ``Damaged`` or ``ChainBroken`` (naming step, leaf, file and the steps that
    still restore), ``BudgetExceeded``.

    Args:
        root: A root written by ``DeltaStorageWriter``, by an ``Engine`` or from JAX.
        step: A number or a tag; ``None``: the newest. A ``checkpoint_id`` (an integer, or a name or
            path that ends in one) takes precedence.
        resume: ``True``: keep what was read for this process's next save to the root, which then
            writes changes. This takes as much memory as the shadow of a saving process, even if no
            save follows. ``False``: the next save writes whole leaves.
        allow_pickle: ``False``: refuse objects that ``torch.load(weights_only=True)`` refuses.
            ``True``: give all objects to Python's unpickler, so that the author of the root can run
            code in this process.
        contract: Refuse a step with a leaf that was saved under a weaker contract than ``"exact"``
            or ``"bounded"``; ``None``: accept all.
        max_bytes: Refuse to allocate more than this on a rank; ``None``: the memory of the machine.
        expected_digest: Refuse a step whose manifest has another digest.
        storage: Access to an object store; ``None``: from the environment.
        **other: None. An option that only ``FileSystemReader`` has is refused by name.

    Raises:
        NotACheckpointRoot: There is no root.
        TypeError: There is no such option.
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
        **other: Any,
    ) -> None:
        refuse("DeltaStorageReader", other)
        super().__init__()
        # Absolute, because saves find a restored step by the path of its root.
        self._root: Root = open_root(place.of(root, storage).absolute())
        self._default_step = self._step = step
        self._resume = resume
        self._allow_pickle = allow_pickle
        self._contract = contract
        self._max_bytes = max_bytes
        self._expected_digest = expected_digest
        # The step that ``read_metadata`` has chosen, for the calls of DCP that follow it.
        self._read: tuple[Manifest, _Index] | None = None

    # --- what DCP calls ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Set the step for all later loads.

        Args:
            checkpoint_id: The step, as an integer or a name or path that ends in one; ``None``: the
                step of the constructor.

        Raises:
            ValueError: The id does not name a step.
        """
        self._step = self._default_step if checkpoint_id is None else names.step_of(checkpoint_id)

    # No **kwargs: with them DCP would ask again for "rank local metadata", which does not exist,
    # after this has failed.
    def read_metadata(self) -> Metadata:
        """Return the content of the step as DCP describes it.

        Returns:
            DCP's metadata, with a chunk for each stored tile.

        Raises:
            StepNotFound, ContractNotMet, UnsupportedLeaf: The step cannot be loaded as requested.
        """
        manifest = self._root.manifest(self._step)
        self._root.require_digest(manifest, self._expected_digest)
        require_leaves(self._root, manifest)
        require_contract(manifest, self._contract)
        index = _index(manifest)
        self._read = manifest, index
        entries: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in index.others}
        entries |= {fqn: _described(manifest, path) for fqn, path in index.tensors.items()}
        return Metadata({fqn: entries[fqn] for fqn in index.ways}, planner_data=dict(index.ways))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: ``read_metadata`` has read everything.

        Args:
            metadata: Not used.
            is_coordinator: Not used.
            *args: Not used.
            **kwargs: Not used.
        """

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the step that this rank reads to its plan.

        Args:
            plan: The plan of this rank.

        Returns:
            The plan with the step and its digest.
        """
        manifest, _ = self._opened()
        return dataclasses.replace(
            plan, storage_data=(manifest.step, self._root.digest_of(manifest))
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse ranks that read different steps.

        They do if another process commits a step between their calls.

        Args:
            plans: The plans of all ranks.

        Returns:
            The same plans.

        Raises:
            StepNotFound: The ranks read different steps.
        """
        # The digest too: a run that was resumed may save the number of a step again.
        choices = [plan.storage_data for plan in plans]
        if any(choice != choices[0] for choice in choices):
            steps = ", ".join(f"rank {rank} step {step}" for rank, (step, _) in enumerate(choices))
            raise StepNotFound(
                f"the ranks do not read the same step: {steps}. Name the step to load"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, verify and place the content that this rank's plan requests.

        Args:
            plan: The plan of this rank.
            planner: Knows the tensors to fill.

        Returns:
            A future that is done.

        Raises:
            Damaged, ChainBroken, TreeMismatch, UnsupportedLeaf, BudgetExceeded: The content cannot
                be read or does not fit.
        """
        manifest, index = self._opened()
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
        # Everything is in its place already, but DCP expects a future.
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return ``True`` if the id names a step.

        Args:
            checkpoint_id: Any id.

        Returns:
            ``True`` if it names a step.
        """
        return names.is_step(checkpoint_id)

    # --- internal ---------------------------------------------------------------------------------

    def _opened(self) -> tuple[Manifest, _Index]:
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
        # In batches, because DCP has allocated the tensors, and all boxes at once would need as
        # much again.
        reader.boxes(requests, place, batch_bytes=_BATCH_BYTES)
        # Kept after the last box only: a load that has failed is no base of a save.
        follow_course(self._root.path, manifest)
        if self._resume:
            keep(self._root.path, Restored(manifest, reader.chains, reader.stored))

    def _object(self, fqn: str, manifest: Manifest, index: _Index) -> io.BytesIO:
        """Return bytes for DCP's planner to unpickle.

        Unless pickles are allowed, ``torch.save`` of this process has written them, from values
        that were loaded without running code.
        """
        value = index.others[fqn]
        if isinstance(value, _Stored) and value.tag == names.OBJECT:
            content = self._load(value.path, manifest).data.tobytes()
            # The user has accepted that the author of the root may run code here.
            if self._allow_pickle:
                return io.BytesIO(content)
            value = objects.read(content, fqn, manifest.step)
        else:

            def content_of(leaf: Any) -> Any:
                path = leaf.path if isinstance(leaf, _Stored) else index.owners.get(id(leaf))
                if path is None:
                    return leaf
                return leaves.place(self._load(path, manifest), getattr(leaf, "tag", None))

            value = tree_map(content_of, value)
        # DCP's planner unpickles without a check. It gets only what this process has pickled
        # itself.
        safe = io.BytesIO()
        torch.save(value, safe)
        safe.seek(0)
        return safe

    def _load(self, path: str, manifest: Manifest) -> Loaded:
        reader = StepReader(self._root, manifest, max_bytes=self._max_bytes, keep=False)
        return reader.whole([path])[path]


def _index(manifest: Manifest) -> _Index:
    """Return the content of a step under the names that DCP's own flattening gives."""
    owners: dict[int, str] = {}
    # Keeps the tensors alive, because an id of a deleted tensor would be used again.
    stand_ins = []

    def place(path: str, owner: str, tag: str | None) -> object:
        spec = manifest.spec(owner)
        dtype = getattr(torch, spec.dtype, None)
        if tag in (names.OBJECT, tree.NUMPY_ARRAY, tree.NUMPY_SCALAR) or not isinstance(
            dtype, torch.dtype
        ):
            return _Stored(owner, tag)
        # DCP's own flattening tells tensors from other values. A meta tensor takes no memory.
        stand_in = torch.empty(spec.shape, dtype=dtype, device="meta")
        stand_ins.append(stand_in)
        owners[id(stand_in)] = owner
        return stand_in

    state = tree.unflatten(manifest.tree, place)
    if not isinstance(state, dict):
        raise UnsupportedLeaf(
            f"step {manifest.step} has type {type(state).__name__}, and DCP loads dicts; restore it"
            " with deltacheck.open"
        )
    try:
        # DCP's own function, so that the names are those of the target, whatever its rules are.
        flat, ways = flatten_state_dict(state)
    except ValueError as error:
        raise UnsupportedLeaf(
            f"step {manifest.step} has names that are one to DCP: {error}; restore it with"
            " deltacheck.open"
        ) from None
    tensors = {
        fqn: owners[id(value)] for fqn, value in flat.items() if isinstance(value, torch.Tensor)
    }
    other_values = {fqn: value for fqn, value in flat.items() if fqn not in tensors}
    return _Index(tensors, other_values, ways, owners)


def _described(manifest: Manifest, path: str) -> TensorStorageMetadata:
    spec = manifest.spec(path)
    if path in manifest.tiles:
        cuts = manifest.tiles[path].cuts
        # A chunk for each tile, so that each rank requests only the tiles that it needs.
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
    """Return the box of a leaf that an item requests."""
    # The offset is optional in DCP's index. Without it the chunk begins with the leaf.
    offset = item.storage_index.offset or (0,) * len(item.lengths)
    starts = [a + b for a, b in zip(offset, item.storage_offsets, strict=True)]
    return tuple(
        slice(start, start + size) for start, size in zip(starts, item.lengths, strict=True)
    )


def _place(item: ReadItem, planner: LoadPlanner, leaf: Loaded, step: int) -> None:
    """Copy a box to the tensor that the planner has for it."""
    tensor = leaves.tensor_of(leaf)
    target = planner.resolve_tensor(item).detach()
    # ``copy_`` would convert the values without a word, and broadcast another shape.
    if target.dtype != tensor.dtype or target.shape != tensor.shape:
        raise TreeMismatch(
            f"leaf {item.storage_index.fqn!r} is {tensor.dtype}{list(tensor.shape)} in step {step},"
            f" {target.dtype}{list(target.shape)} in the target. Load it into a tensor of the saved"
            " type, and convert that"
        )
    leaves.copyable(target).copy_(leaves.copyable(tensor))
    planner.commit_tensor(item, target)
