"""Load leaves: read and verify their chains, and compute the leaves that are derived from them.

Every restore does the same three things: it resolves leaves to their chains, loads whole leaves or
boxes of them, and places the content in memory of a framework. ``StepReader`` does the first two,
and calls the backend for the third. It also records what a saver needs to continue from the step:
the chains, and the bytes of those chains that were read whole.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import BudgetExceeded
from deltacheck.leaf.spec import LeafSpec, batches
from deltacheck.leaf.tiles import Box
from deltacheck.restore import read
from deltacheck.restore.content import (
    Array,
    Loaded,
    box_bytes,
    boxes_of_chunks,
    check_budget,
    chunk_bytes,
)
from deltacheck.restore.leaf_kinds import Chain, Leaf, LoadedChunks
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.store.files.arrays import NO_BYTES
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

_Content = TypeVar("_Content")
_Key = TypeVar("_Key", bound=Hashable)


class Request(NamedTuple):
    """A box of a leaf to read."""

    leaf: str
    box: Box


class StepReader:
    """A reader of the leaves of one step.

    ``chains`` has the chains of all leaves read so far, and ``stored`` the bytes of those that were
    read whole, both by stored path. A saver that adopts them writes its next step as changes.

    Args:
        root: The root to read from.
        manifest: The step to read.
        max_bytes: Refuse a read that would allocate more than this; ``None``: the memory of the
            machine.
        keep: Record ``stored``. This keeps the bytes of the whole chains in memory; pass ``False``
            if no save continues from the step.
    """

    def __init__(
        self, root: Root, manifest: Manifest, *, max_bytes: int | None = None, keep: bool = True
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.chains: dict[str, Chain] = {}
        self.stored: dict[str, U8] = {}
        self._max_bytes = max_bytes
        self._keep = keep

    def whole(
        self,
        paths: Sequence[str] | None = None,
        *,
        into: Callable[[], Mapping[str, U8]] | None = None,
    ) -> dict[str, Loaded]:
        """Return whole leaves, verified.

        Args:
            paths: The leaves; ``None``: all leaves of the step.
            into: Gives memory for leaves that are computed, by path. It is called after the step
                was resolved, so that a step that cannot be read has no effect on the caller.

        Raises:
            StepNotFound, Damaged, ChainBroken, BudgetExceeded: As ``resolve_leaves``
                and ``load_leaves`` raise them.
        """
        leaves = resolve_leaves(self.root, self.manifest, paths, max_bytes=self._max_bytes)
        loaded = load_leaves(
            leaves,
            max_bytes=self._max_bytes,
            stored=self.stored if self._keep else None,
            into=None if into is None else into(),
        )
        self.chains |= stored_chains(leaves.values())
        return loaded

    def boxes(
        self,
        requests: Mapping[_Key, Request],
        place: Callable[[_Key, LeafSpec, Array], None],
        *,
        batch_bytes: int | None = None,
    ) -> None:
        """Read a box for each request and pass it to ``place(key, spec of the leaf, box)``.

        Equal requests are read once and share one array, which ``place`` must not change. Only
        tiles and chunks that a box touches are read.

        Args:
            requests: The boxes, by any key.
            place: Puts a box where it belongs. It is called for a batch after the whole batch was
                verified.
            batch_bytes: Read boxes of about this many bytes at a time. Larger: fewer reads of
                chunks that several boxes touch; smaller: less memory. ``None``: all at once, so
                that nothing is placed before everything was verified.

        Raises:
            StepNotFound, Damaged, ChainBroken, BudgetExceeded: As ``resolve_leaves`` and
                ``load_boxes`` raise them.
        """
        # One resolution for each leaf. Tiles between two boxes are resolved, too, but not read.
        hulls = _hulls(requests.values())
        leaves = resolve_leaves(
            self.root, self.manifest, list(hulls), max_bytes=self._max_bytes, boxes=hulls
        )
        self.chains |= stored_chains(leaves.values())
        keys: dict[tuple[str, tuple[tuple[int, int], ...]], list[_Key]] = {}
        for key, (path, box) in requests.items():
            keys.setdefault((path, tuple((s.start, s.stop) for s in box)), []).append(key)
        # Neighbours in a leaf share chunks, so they should be read in one batch.
        groups = [keys[position] for position in sorted(keys)]
        boxes = [requests[group[0]] for group in groups]
        sizes = [box_bytes(leaves[path].spec, box) for path, box in boxes]
        # The batches together make the result, which the caller holds whole.
        check_budget(self._max_bytes, sum(sizes))
        largest_batch = sum(sizes) if batch_bytes is None else batch_bytes
        for batch in batches(range(len(boxes)), sizes.__getitem__, largest_batch):
            arrays = load_boxes(
                # A leaf may have several boxes, so their numbers are the keys.
                {str(number): leaves[boxes[number].leaf] for number in batch},
                {str(number): boxes[number].box for number in batch},
                max_bytes=self._max_bytes,
                stored=self.stored if self._keep else None,
            )
            for number in batch:
                # Taken out, so that its memory is free again once it is placed.
                array = arrays.pop(str(number))
                for key in groups[number]:
                    place(key, leaves[boxes[number].leaf].spec, array)


def leaf_of_box(spec: LeafSpec, box: Array) -> Loaded:
    """Return a box of a leaf as a loaded leaf of the box's shape."""
    # The bytes of an array can be viewed only if it is contiguous.
    data = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
    return Loaded(dataclasses.replace(spec, shape=box.shape), [], data)


def _hulls(requests: Iterable[Request]) -> dict[str, Box]:
    """Return, for each leaf, the smallest box that contains all requested boxes of it."""
    hulls: dict[str, Box] = {}
    for path, box in requests:
        hull = hulls.get(path, box)
        hulls[path] = tuple(
            slice(min(a.start, b.start), max(a.stop, b.stop))
            for a, b in zip(hull, box, strict=True)
        )
    return hulls


def load_leaves(
    leaves: Mapping[str, Leaf],
    chunks: Mapping[str, list[int]] | None = None,
    *,
    max_bytes: int | None = None,
    stored: dict[str, U8] | None = None,
    into: Mapping[str, U8] | None = None,
) -> dict[str, Loaded]:
    """Read, decode, verify and compute leaves.

    Args:
        leaves: The leaves, by any key.
        chunks: Numbers of the chunks to load, ascending, by the same keys. Leaves without an entry
            are loaded whole.
        max_bytes: Refuse to allocate more than this; ``None``: the memory of the machine.
        stored: Receives the bytes of the chains that were read whole, by stored path.
        into: Memory for leaves that are computed whole, by path. Nothing is written to it before
            all content that has a digest was verified.

    Returns:
        The loaded chunks, by key. Leaves may share memory with each other and with ``stored``
        (``unshared_paths``).

    Raises:
        BudgetExceeded: The result would be larger than ``max_bytes``. Nothing was read.
        Damaged: Content differs from what was saved; names leaf and file.
    """
    chunk_lists = chunks or {}
    # Whole leaves are checked first: the list of their chunks may itself be too long for memory.
    check_budget(
        max_bytes,
        sum(leaf.spec.raw_bytes for path, leaf in leaves.items() if path not in chunk_lists),
    )
    numbers = {
        path: chunk_lists[path] if path in chunk_lists else list(range(leaf.spec.chunk_count))
        for path, leaf in leaves.items()
    }
    boxes = {path: boxes_of_chunks(leaf.spec, numbers[path]) for path, leaf in leaves.items()}
    # Several boxes of a leaf are copied into one memory.
    joined = [path for path in leaves if len(boxes[path]) > 1]
    joined_bytes = sum(chunk_bytes(leaves[path].spec, numbers[path]) for path in joined)

    def load(loaded: LoadedChunks) -> dict[str, Loaded]:
        data: dict[str, U8] = {}
        # Computed leaves with a digest come first: they are verified while they are computed, and
        # the caller's memory (into) must not be written before.
        for path in sorted(leaves, key=lambda path: not leaves[path].is_verified_whole):
            values = [leaves[path].values(box, loaded) for box in boxes[path]]
            runs: list[U8] = [array.reshape(-1).view(np.uint8) for array in values]
            data[path] = runs[0] if len(runs) == 1 else np.concatenate([NO_BYTES, *runs])
        return {path: Loaded(leaf.spec, numbers[path], data[path]) for path, leaf in leaves.items()}

    return _read(leaves, boxes, load, max_bytes, stored, into, joined_bytes)


def load_boxes(
    leaves: Mapping[str, Leaf],
    boxes: Mapping[str, Box],
    *,
    max_bytes: int | None = None,
    stored: dict[str, U8] | None = None,
) -> dict[str, Array]:
    """Read, decode, verify and compute a box of each leaf.

    Only the chunks that a box touches are read. Arguments and exceptions are those of
    ``load_leaves``.

    Args:
        leaves: The leaves, by any key.
        boxes: The box of each leaf, by the same keys; bounded, step 1.
        max_bytes: As in ``load_leaves``.
        stored: As in ``load_leaves``.

    Returns:
        The boxes, by key.
    """
    check_budget(max_bytes, sum(box_bytes(leaf.spec, boxes[path]) for path, leaf in leaves.items()))

    def load(loaded: LoadedChunks) -> dict[str, Array]:
        # No views: a save changes what `stored` receives.
        return {path: leaf.copied(boxes[path], loaded) for path, leaf in leaves.items()}

    return _read(leaves, {path: [boxes[path]] for path in leaves}, load, max_bytes, stored)


def _read(
    leaves: Mapping[str, Leaf],
    boxes: Mapping[str, Sequence[Box]],
    load: Callable[[LoadedChunks], dict[str, _Content]],
    max_bytes: int | None,
    stored: dict[str, U8] | None,
    into: Mapping[str, U8] | None = None,
    joined_bytes: int = 0,
) -> dict[str, _Content]:
    """Read the chunks that boxes of leaves come from, and let ``load`` make the result of them.

    Args:
        joined_bytes: The memory that ``load`` allocates beside that of the boxes.
    """
    chains = stored_chains(leaves.values())
    # A chain of which no chunk is needed has an entry, too, since `read_chunks` takes the chunks of
    # every chain.
    chunk_sets: dict[str, set[int]] = {path: set() for path in chains}
    total = joined_bytes
    for path, leaf in leaves.items():
        for box in boxes[path]:
            leaf.add_needed(box, chunk_sets)
            total += leaf.computed_bytes(box)
    chunks = {path: sorted(numbers) for path, numbers in chunk_sets.items()}
    total += sum(chunk_bytes(chains[path].spec, numbers) for path, numbers in chunks.items())
    check_budget(max_bytes, total)
    try:
        data = read.read_chunks(chains, chunks)
        # Whole chains only: a save can continue from a leaf only if it has all of its content. It
        # needs no content of a leaf that it stores whole anyway.
        if stored is not None:
            whole = {
                part.spec.path
                for leaf in leaves.values()
                for part in leaf.parts
                # Not codes, which the next save compares with the leaf.
                if isinstance(part, Chain) and part.is_stored_whole
            }
            stored.update(
                {
                    path: data[path]
                    for path, numbers in chunks.items()
                    if len(numbers) == chains[path].spec.chunk_count and path not in whole
                }
            )
        return load(LoadedChunks(chunks, data, into or {}))
    # A limit of the process (ulimit) may be below the budget, which is checked against the machine.
    except MemoryError as error:
        raise BudgetExceeded(
            f"this process cannot have the {total} bytes that the restore takes; name fewer leaves"
        ) from error


def unshared_paths(loaded: Mapping[str, Loaded], stored: Mapping[str, U8]) -> set[str]:
    """Return the leaves that own all of their memory, so that a caller may change it.

    A leaf is not among them if another leaf or ``stored`` refers to the same memory.
    """
    memory = {path: _owner_of(item.data) for path, item in loaded.items()}
    # Counted by identity, because arrays cannot be hashed.
    references = Counter(map(id, memory.values())) + Counter(
        id(_owner_of(data)) for data in stored.values()
    )
    return {
        path
        for path, array in memory.items()
        # A change through a view would reach the neighbours in a block, and a kept view would hold
        # all of the block.
        if array.flags.owndata
        and array.nbytes == loaded[path].data.nbytes
        and references[id(array)] == 1
    }


def _owner_of(array: Array) -> Array:
    """Return the array at the end of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
