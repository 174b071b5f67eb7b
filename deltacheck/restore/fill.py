"""Read leaves of one step and hand them to the code that places them.

Every restore does the same three things: it resolves leaves to their chains, loads whole leaves or
boxes of them, and places the content in memory of a framework. ``StepReader`` does the first two,
and calls the backend for the third. It also records what a saver needs to continue from the step:
the chains, and the bytes of those chains that were read whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from deltacheck.codec.base import U8
from deltacheck.leaf.spec import LeafSpec, batches
from deltacheck.leaf.tiles import Box
from deltacheck.restore.content import Array, Loaded, box_bytes, check_budget
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.restore.resolve import resolve_leaves, stored_chains
from deltacheck.restore.values import load_boxes, load_leaves
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

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
