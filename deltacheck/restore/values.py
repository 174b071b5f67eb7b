"""Load leaves: read and verify their chains, and compute what is derived."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from deltacheck.codec.base import U8, Codec
from deltacheck.errors import BudgetExceeded, Damaged
from deltacheck.leaf import grid, tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore import derive, read
from deltacheck.restore.buffers import byte_extents, chunk_bytes
from deltacheck.restore.chain import Chain
from deltacheck.restore.resolve import Formula, Leaf, Tiled, check_budget, stored_chains

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_Given = TypeVar("_Given")


class Loaded(NamedTuple):
    """The verified bytes of some chunks of a leaf, one after the other."""

    spec: LeafSpec
    chunks: list[int]
    data: U8


def load_leaves(
    leaves: Mapping[str, Leaf],
    chunks: Mapping[str, list[int]] | None = None,
    *,
    max_bytes: int | None = None,
    codec: Codec[Any] | None = None,
    stored: dict[str, U8] | None = None,
    into: Mapping[str, U8] | None = None,
) -> dict[str, Loaded]:
    """Read, decode, verify and compute leaves, or the named chunks of each.

    ``max_bytes``: refuse (``BudgetExceeded``) before anything is allocated if the result would be
    larger (default: the machine's memory). ``stored``: where to leave, by path, the bytes that the
    chains of ``leaves`` gave. ``into``: memory for whole leaves that are computed, by path; the
    ``data`` of those that were computed there is that memory, and nothing is written to it before
    everything that has a digest was verified. Raises ``Damaged`` naming the leaf and file.
    """
    named = chunks or {}
    # First what can be told without a list of chunks, which may itself be too long.
    check_budget(
        max_bytes, sum(leaf.spec.raw_bytes for path, leaf in leaves.items() if path not in named)
    )
    wanted = {
        path: named[path] if path in named else list(range(leaf.spec.chunk_count))
        for path, leaf in leaves.items()
    }
    needed: dict[str, set[int]] = {path: set() for path in stored_chains(leaves.values())}
    for path, leaf in leaves.items():
        for first, stop in _runs(leaf.spec, wanted[path]):
            _need(leaf, first, stop, needed)
    made = sum(
        chunk_bytes(leaf.spec, wanted[path])
        for path, leaf in leaves.items()
        if not isinstance(leaf, Chain)
    )

    def give(values: _Values) -> dict[str, Loaded]:
        proven_first = sorted(
            leaves.items(),
            key=lambda one: not (isinstance(one[1], Formula) and one[1].derived.digest),
        )
        data = {path: values.of(leaf, wanted[path]) for path, leaf in proven_first}
        return {path: Loaded(leaf.spec, wanted[path], data[path]) for path, leaf in leaves.items()}

    return _read(leaves, needed, made, give, max_bytes, codec, stored, into)


def load_boxes(
    leaves: Mapping[str, Leaf],
    boxes: Mapping[str, tiles.Box],
    *,
    max_bytes: int | None = None,
    codec: Codec[Any] | None = None,
    stored: dict[str, U8] | None = None,
) -> dict[str, Array]:
    """Read, decode, verify and compute a box of each leaf; only the chunks that it touches are
    read. Else as ``load``.
    """
    check_budget(max_bytes, sum(box_bytes(leaf.spec, boxes[path]) for path, leaf in leaves.items()))
    needed: dict[str, set[int]] = {path: set() for path in stored_chains(leaves.values())}
    chunks: dict[str, list[int]] = {}
    for path, leaf in leaves.items():
        spec = leaf.spec
        if isinstance(leaf, Tiled):
            _need_box(leaf, boxes[path], needed)
            continue
        chunks[path] = grid.chunks_of_slices(spec.shape, spec.chunk, boxes[path])
        for first, stop in _runs(spec, chunks[path]):
            _need(leaf, first, stop, needed)
    made = sum(
        (
            box_bytes(leaf.spec, boxes[path])
            if isinstance(leaf, Tiled)
            else chunk_bytes(leaf.spec, chunks[path])
        )
        for path, leaf in leaves.items()
        if not isinstance(leaf, Chain)
    )

    def give(values: _Values) -> dict[str, Array]:
        return {
            path: values.box(leaf, boxes[path], chunks.get(path, []))
            for path, leaf in leaves.items()
        }

    return _read(leaves, needed, made, give, max_bytes, codec, stored)


def _read(
    leaves: Mapping[str, Leaf],
    needed: Mapping[str, set[int]],
    made: int,
    give: Callable[[_Values], dict[str, _Given]],
    max_bytes: int | None,
    codec: Codec[Any] | None,
    stored: dict[str, U8] | None,
    into: Mapping[str, U8] | None = None,
) -> dict[str, _Given]:
    """Read the chunks ``needed`` of the chains of ``leaves`` and let ``give`` make of them what was
    asked for, ``made`` bytes of which are new.

    ``stored``: where to leave the bytes of chains that were read whole.
    """
    chains = stored_chains(leaves.values())
    reads = {path: sorted(numbers) for path, numbers in needed.items()}
    total = made + sum(chunk_bytes(chains[path].spec, numbers) for path, numbers in reads.items())
    check_budget(max_bytes, total)
    try:
        data = read.read_chunks(chains, reads, codec)
        if stored is not None:
            stored.update(
                {
                    path: data[path]
                    for path, numbers in reads.items()
                    if len(numbers) == chains[path].spec.chunk_count
                }
            )
        return give(_Values(reads, data, into or {}))
    except MemoryError as error:
        raise BudgetExceeded(
            f"this process cannot have the {total} bytes that the restore takes; name fewer leaves"
        ) from error


def unshared_paths(loaded: Mapping[str, Loaded], stored: Mapping[str, U8]) -> set[str]:
    """The leaves whose memory is theirs alone and all theirs: neither another leaf's, nor kept in
    ``stored``. Who has them may change it.
    """
    memory = {path: _memory_of(item.data) for path, item in loaded.items()}
    users = Counter(map(id, memory.values())) + Counter(
        id(_memory_of(data)) for data in stored.values()
    )
    return {
        path
        for path, of in memory.items()
        if of.flags.owndata and of.nbytes == loaded[path].data.nbytes and users[id(of)] == 1
    }


def _memory_of(array: Array) -> Array:
    """The array that a view is one of, in the end."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _runs(spec: LeafSpec, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """The elements of some chunks, as ranges ``(first, stop)``; those of neighbouring chunks as
    one.
    """
    bounds = spec.element_bounds()
    runs: list[tuple[int, int]] = []
    for number in chunks:
        first, stop = int(bounds[number]), int(bounds[number + 1])
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, stop))
    return runs


def _covering(spec: LeafSpec, first: int, stop: int) -> range:
    """The chunks that hold elements ``first`` to ``stop``."""
    bounds = spec.element_bounds()
    return range(
        int(np.searchsorted(bounds, first, "right")) - 1, int(np.searchsorted(bounds, stop, "left"))
    )


def _need(leaf: Leaf, first: int, stop: int, needed: dict[str, set[int]]) -> None:
    """Note which chunks of which chains elements ``first`` to ``stop`` of a leaf stand on."""
    if isinstance(leaf, Chain):
        needed[leaf.spec.path].update(_covering(leaf.spec, first, stop))
        return
    if isinstance(leaf, Tiled):
        for box in tiles.boxes_of_range(leaf.spec.shape, first, stop):
            _need_box(leaf, box, needed)
        return
    for part in (leaf.codes, *leaf.sources.values()):
        if part is not None:
            _need(part, first, stop, needed)


def _need_box(leaf: Tiled, box: tiles.Box, needed: dict[str, set[int]]) -> None:
    for one in tiles.overlaps(leaf.cuts, box):
        spec = leaf.chains[one.number].spec
        needed[spec.path].update(grid.chunks_of_slices(spec.shape, spec.chunk, one.in_tile))


class _Values:
    """Leaves from the chunks of chains that were read. ``reads``: their numbers, ascending;
    ``data``:
    their bytes; ``into``: memory for leaves that are computed whole; all by path.
    """

    def __init__(
        self, reads: Mapping[str, list[int]], data: Mapping[str, U8], into: Mapping[str, U8]
    ) -> None:
        self._reads = reads
        self._data = data
        self._into = into
        self._known: dict[tuple[str, int, int], Array] = {}

    def of(self, leaf: Leaf, chunks: list[int]) -> U8:
        """The bytes of a leaf's chunks, one after the other."""
        spec = leaf.spec
        if isinstance(leaf, Chain) and self._reads[spec.path] == chunks:
            return self._data[spec.path]
        runs = [
            self._range(leaf, first, stop).view(np.uint8) for first, stop in _runs(spec, chunks)
        ]
        values = runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.uint8), *runs])
        if isinstance(leaf, Formula) and leaf.derived.digest and len(chunks) == spec.chunk_count:
            _check_digest(leaf, leaf.derived.digest, values)
        return values

    def box(self, leaf: Leaf, box: tiles.Box, chunks: list[int]) -> Array:
        """A box of a leaf. ``chunks``: those that it touches, of leaves that are not tiled."""
        if isinstance(leaf, Tiled):
            out = np.empty([s.stop - s.start for s in box], leaf.spec.element.numpy)
            self._fill(leaf, box, out)
            return out
        return cut_box(Loaded(leaf.spec, chunks, self.of(leaf, chunks)), box)

    def _fill(self, leaf: Tiled, box: tiles.Box, out: Array) -> None:
        """``out``: of the box's shape."""
        for one in tiles.overlaps(leaf.cuts, box):
            spec = leaf.chains[one.number].spec
            tile = Loaded(spec, self._reads[spec.path], self._data[spec.path])
            out[one.in_box] = (
                as_array(tile)[one.in_tile]
                if len(tile.chunks) == spec.chunk_count
                else cut_box(tile, one.in_tile)
            )

    def _range(self, leaf: Leaf, first: int, stop: int) -> Array:
        """Elements ``first`` to ``stop`` of a leaf, 1-D."""
        spec = leaf.spec
        key = (spec.path, first, stop)
        if isinstance(leaf, Chain):
            covering = _covering(spec, first, stop)
            before = bisect.bisect_left(self._reads[spec.path], covering.start)
            begin = chunk_bytes(spec, self._reads[spec.path][:before]) // spec.element.item_bytes
            begin += first - int(spec.element_bounds()[covering.start])
            return self._data[spec.path].view(spec.element.numpy)[begin : begin + stop - first]
        if isinstance(leaf, Tiled):
            values = np.empty(stop - first, spec.element.numpy)
            at = 0
            for box in tiles.boxes_of_range(spec.shape, first, stop):
                shape = [s.stop - s.start for s in box]
                self._fill(leaf, box, values[at : at + math.prod(shape)].reshape(shape))
                at += math.prod(shape)
            return values
        if key not in self._known:
            codes = None if leaf.codes is None else self._range(leaf.codes, first, stop)
            sources = {
                path: self._range(source, first, stop) for path, source in leaf.sources.items()
            }
            memory = self._into.get(spec.path)
            size = (stop - first) * spec.element.item_bytes
            out = (
                None if memory is None or memory.nbytes != size else memory.view(spec.element.numpy)
            )
            try:
                self._known[key] = derive.compute(
                    leaf.derived, codes, sources, first, stop - first, out
                )
            except ValueError as error:  # of codes that no value has
                raise Damaged(
                    f"leaf {spec.path!r}: what is stored of it is not what it says: {error}"
                ) from error
        return self._known[key]


def _check_digest(leaf: Formula, recorded: str, values: U8) -> None:
    spec = leaf.spec
    found = digest_of(spec, values)
    if found != recorded:
        raise Damaged(
            f"leaf {spec.path!r} follows from {leaf.derived.of!r} by {leaf.derived.how}, but that"
            f" gives digest {found} where {recorded} was saved: this machine computes it otherwise"
            " than the one that saved it. Restore on one of that kind",
            leaf=spec.path,
        )


def as_array(item: Loaded) -> Array:
    """A whole leaf as a NumPy array of its own dtype and shape. REQUIRES: all chunks are loaded."""
    return item.data.view(item.spec.element.numpy).reshape(item.spec.shape)


def cut_box(item: Loaded, slices: Sequence[slice]) -> Array:
    """The box ``slices`` (bounded, step 1) of a leaf, from the loaded chunks, which cover it."""
    spec = item.spec
    out = np.empty([s.stop - s.start for s in slices], spec.element.numpy)
    wanted = set(grid.chunks_of_slices(spec.shape, spec.chunk, slices))
    for chunk, (begin, end) in zip(item.chunks, byte_extents(spec, item.chunks), strict=True):
        if chunk not in wanted:
            continue
        box = grid.box(spec.shape, spec.chunk, chunk)
        values = (
            item.data[begin:end].view(spec.element.numpy).reshape([s.stop - s.start for s in box])
        )
        common = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(box, slices, strict=True)
        ]
        to = tuple(
            slice(c.start - s.start, c.stop - s.start) for c, s in zip(common, slices, strict=True)
        )
        out[to] = values[
            tuple(
                slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, box, strict=True)
            )
        ]
    return out


def box_bytes(spec: LeafSpec, box: Sequence[slice]) -> int:
    """Bytes of a bounded box of a leaf."""
    size: int = math.prod(s.stop - s.start for s in box) * spec.element.item_bytes
    return size


def bounded_slices(
    path: str, shape: Sequence[int], slices: Sequence[slice | int]
) -> tuple[slice, ...]:
    """User slices of a leaf as bounded step-1 slices, one an axis; an integer keeps its axis with
    length 1.

    Raises ``ValueError`` for more axes than the leaf has, a step other than 1 or an index out of
    range.
    """
    if len(slices) > len(shape):
        raise ValueError(
            f"leaf {path!r} has shape {tuple(shape)}; {len(slices)} slices are too many"
        )
    found = []
    for size, wanted in zip(
        shape, [*slices, *[slice(None)] * (len(shape) - len(slices))], strict=True
    ):
        if isinstance(wanted, int):
            if not -size <= wanted < size:
                raise ValueError(
                    f"leaf {path!r}: index {wanted} is out of range for an axis of {size}"
                )
            wanted = slice(wanted % size, wanted % size + 1)
        start, stop, step = wanted.indices(size)
        if step != 1:
            raise ValueError(f"leaf {path!r}: only slices of step 1 can be restored, not {wanted}")
        found.append(slice(start, max(start, stop)))
    return tuple(found)
