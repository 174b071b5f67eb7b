"""Load leaves: read and verify their chains, and compute the leaves that are derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.errors import BudgetExceeded
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
from deltacheck.restore.resolve import stored_chains
from deltacheck.store.files.arrays import NO_BYTES

_Content = TypeVar("_Content")


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
