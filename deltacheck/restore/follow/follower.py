"""Follow a run while it trains.

Each committed step is delivered as its changes, for processes that keep a copy of the weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import Damaged, StepNotFound, TreeMismatch
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.limits import Limits, applied, check_bytes
from deltacheck.leaf.spec import LeafSpec, batches
from deltacheck.restore import read
from deltacheck.restore.chain import KnownContent, known_content, resolve_chains
from deltacheck.restore.follow.new_steps import NewSteps, polled
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.manifest import Manifest, Tiles
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root, open_segments
from deltacheck.store.segment import Segment

# Leaves that are loaded together. Larger: fewer calls, but that much more memory beside the copy.
_BATCH_BYTES = 256 << 20
# Positions are listed if fewer than one element in this many changed. A position takes 8 bytes, so
# a dense list would take more memory than the values themselves.
_SPARSE_BELOW = 4


@typed
@dataclass(frozen=True, slots=True)
class LeafChange:
    """The change of one leaf between two steps.

    Args:
        spec: The leaf.
        positions: Positions of the changed elements in the flattened leaf, int64, ascending;
            ``None``: all elements.
        values: New values of these elements, 1-D, in the dtype of the leaf.
        digest: The digest of the leaf after the change; empty if the leaf is stored in tiles.
        tiles: The tiles of the leaf with their digests; ``None`` if it is stored whole.
    """

    spec: LeafSpec
    positions: NDArray[np.int64] | None
    values: NDArray[Any]
    digest: str
    tiles: Tiles | None = None

    def apply(self, array: NDArray[Any]) -> None:
        """Write the new values into an array, in place.

        Args:
            array: A writable C-contiguous array with the leaf's shape and dtype, which holds the
                leaf before the change.

        Raises:
            TreeMismatch: The array has another shape or dtype, or is not contiguous.
        """
        expected = (self.spec.shape, self.spec.element.numpy)
        if (array.shape, array.dtype) != expected or not array.flags.c_contiguous:
            layout = "" if array.flags.c_contiguous else ", not contiguous"
            raise TreeMismatch(
                f"leaf {self.spec.path!r} is {self.spec.dtype}{list(self.spec.shape)}; the array to"
                f" change is {array.dtype}{list(array.shape)}{layout}"
            )
        # A view of the caller's memory, because the array is contiguous.
        array.reshape(-1)[slice(None) if self.positions is None else self.positions] = self.values

    def check(self, array: NDArray[Any]) -> None:
        """Compare a copy of the leaf with the digests of the step.

        Args:
            array: The copy, after the change, in the leaf's shape.

        Raises:
            Damaged: The copy differs in at least one bit.
        """
        if self.tiles is None:
            self._check(self.spec, array, self.digest)
            return
        # Only the tiles have digests (docs/reference/format.md, section 3), the leaf as a whole has
        # none.
        for number, record in enumerate(self.tiles.records()):
            assert record is not None  # tiles that are computed are compared as whole leaves
            box = tiles.box(self.tiles.cuts, number)
            self._check(record.spec(tiles.name(self.spec.path, box)), array[box], record.digest)

    def _check(self, spec: LeafSpec, array: NDArray[Any], digest: str) -> None:
        copy_digest = digest_of(spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if copy_digest != digest:
            raise Damaged(
                f"leaf {spec.path!r}: this copy has digest {copy_digest}, the step has {digest}."
                " Take the whole state again: follow(...) anew, or Follower.anchor()",
                leaf=self.spec.path,
            )


@dataclass(frozen=True, slots=True)
class Update:
    """One committed step, as its changes.

    Args:
        step: The training step.
        seq: The number of the save in its root.
        since: The step that the changes are relative to, which is the step of the update before.
            ``None``: each leaf is delivered whole. This is so in the first update, after an error,
            and if the tree has changed.
        changes: The changed leaves by path; tied leaves once.
        names: Each path of the tree, and the path in ``changes`` of the leaf that it is tied to.
        metrics: The metrics of the save.
    """

    step: int
    seq: int
    since: int | None
    changes: Mapping[str, LeafChange]
    names: Mapping[str, str]
    metrics: Mapping[str, float | str]

    @property
    def changed_elements(self) -> int:
        """Return the number of elements with new values in all leaves; ties count once."""
        return sum(change.values.size for change in self.changes.values())


@typed
class Follower:
    """An iterator over the committed steps of a root as they appear, returned by ``follow``.

    It takes no lock and writes nothing. It holds one copy of the followed leaves, verified with the
    digests of the manifest, and finds changes by comparing each step with this copy. So there is no
    gap between updates: if retention has removed a step, the next one is compared all the same.
    After an error the next update is whole.

    Args:
        root: The root.
        wanted: Returns True for the paths to follow.
        newest_only: Skip steps that were committed while the consumer was busy.
        poll_seconds: Interval between two checks for a new step.
        timeout: End the iteration after this many seconds without a new step; ``None``: never.
        limits: The most that one call of ``poll`` may take; ``None``: the default limits.
    """

    def __init__(
        self,
        root: Root,
        wanted: Callable[[str], bool],
        newest_only: bool,
        poll_seconds: float,
        timeout: float | None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits
        self._root = root
        self._wanted = wanted
        self._newest_only = newest_only
        self._poll_seconds = poll_seconds
        self._timeout = timeout
        self._steps = NewSteps(root)
        self.anchor()

    def __iter__(self) -> Iterator[Update]:
        """Yield each update, and wait for the next one until ``timeout``."""
        return polled(self.poll, self._poll_seconds, self._timeout)

    def poll(self) -> Update | None:
        """Return the next update without waiting.

        After an exception the next call continues with the step after it, and delivers it whole.

        Returns:
            The update, or ``None`` if no new step is committed.

        Raises:
            Damaged: The step is not whole; names leaf, step and file. ``ChainBroken`` is one kind
                of it.
            BudgetExceeded: The step takes more than ``limits`` allows.
        """
        with applied(self._limits):
            return self._poll()

    def _poll(self) -> Update | None:
        reference = self._steps.next(self._newest_only)
        if reference is None:
            return None
        try:
            manifest = self._root.read(reference.manifest_path)
            # Set before the update is made: after an error the next call goes on with the next
            # step.
            self._steps.seq = manifest.seq
            return self._update(manifest)
        except FileNotFoundError:
            return None  # deleted since it was listed
        # The copy may be updated in part, so nothing may be compared with it.
        except BaseException:
            self.anchor()
            raise

    def anchor(self) -> None:
        """Discard the copy, so that the next update delivers every leaf whole."""
        self._step: int | None = None
        self._leaves: dict[str, _Leaf] = {}
        self._stored: dict[str, KnownContent] = {}
        self._segments: list[Segment] = []

    def _update(self, manifest: Manifest) -> Update:
        names = {
            path: owner
            for path, owner in tree.array_paths(manifest.tree).items()
            if self._wanted(path)
        }
        specs = {path: manifest.spec(path) for path in dict.fromkeys(names.values())}
        if not specs:
            raise StepNotFound(
                f"step {manifest.step} of {self._root.path} has none of the leaves that are to be"
                " followed"
            )
        if {path: leaf.spec for path, leaf in self._leaves.items()} != specs:
            self.anchor()
        # Before the first batch: all of them are held.
        check_bytes(
            self._root.store.path,
            (ref.id for ref in manifest.segments),
            sum(spec.raw_bytes for spec in specs.values()),
            f"what is followed of step {manifest.step}",
        )
        last_step, segments = self._step, open_segments(self._root, manifest)
        changes: dict[str, LeafChange] = {}
        # A leaf without a digest in the manifest, such as a bounded one, has a mark that never
        # equals "". It is compared at every step.
        stale = [
            p
            for p in specs
            if p not in self._leaves or self._leaves[p].mark != (manifest.mark_of(p) or "")
        ]
        for paths in batches(stale, lambda path: specs[path].raw_bytes, _BATCH_BYTES):
            changes |= self._changes(manifest, paths)
        # Held, because the store keeps no segment open by itself: those that the next step shares
        # are then not read again.
        self._segments = segments
        self._step = manifest.step
        return Update(
            manifest.step, manifest.seq, last_step, changes, names, dict(manifest.metrics)
        )

    def _changes(self, manifest: Manifest, paths: list[str]) -> dict[str, LeafChange]:
        copies = {path: self._leaves[path] for path in paths if path in self._leaves}
        # What was cut otherwise is compared whole.
        recut = {
            p: self._bytes_of(leaf)
            for p, leaf in copies.items()
            if _cuts_of(leaf.tiles) != _cuts_of(manifest.tiles.get(p))
        }
        # What is stored of tiles that are computed does not show which elements have changed.
        tiled = [p for p in paths if p in manifest.tiles and not manifest.tiles[p].forms]
        whole = [path for path in paths if path not in set(tiled)]
        changes = self._changes_of_whole(manifest, whole, recut)
        changes |= self._changes_of_tiled(manifest, tiled, recut)
        # Tiles of the earlier cuts are not read again, and would keep their memory.
        for path in recut:
            current = set(manifest.names_of(path))
            for name in [
                name for name in self._stored if tiles.leaf_of(name) == path and name not in current
            ]:
                del self._stored[name]
        return changes

    def _changes_of_whole(
        self, manifest: Manifest, paths: list[str], recut: Mapping[str, NDArray[np.uint8]]
    ) -> dict[str, LeafChange]:
        """Return the changes of leaves that are not stored in tiles, or in tiles that are computed.

        Args:
            recut: The copies of leaves that were cut into other tiles before.
        """
        leaves = resolve_leaves(self._root, manifest, paths, held=self._stored)
        chain_data: dict[str, NDArray[np.uint8]] = {}
        loaded = load_leaves(leaves, stored=chain_data)
        self._stored |= known_content(manifest, chain_data)
        changes: dict[str, LeafChange] = {}
        for path, (spec, _, data) in loaded.items():
            before = (
                recut[path]
                if path in recut
                else self._leaves[path].data
                if path in self._leaves
                else None
            )
            digest = manifest.digest_of(path) or digest_of(spec, data)
            self._leaves[path] = _Leaf(spec, data, None, digest)
            positions = None if before is None else changed_elements(spec, before, data)
            _note(changes, spec, positions, data.view(spec.element.numpy), digest, None)
        return changes

    def _changes_of_tiled(
        self, manifest: Manifest, paths: list[str], recut: Mapping[str, NDArray[np.uint8]]
    ) -> dict[str, LeafChange]:
        """Return the changes of leaves in tiles. Only tiles with another digest are read."""
        fresh = [
            name
            for path in paths
            for name in manifest.names_of(path)
            if not self._holds(manifest, name)
        ]
        # Taken before `self._stored` refers to the new content.
        before = {name: self._stored[name].data for name in fresh if name in self._stored}
        chains = resolve_chains(self._root, manifest, fresh, held=self._stored)
        loaded = read.read_chunks(chains)
        self._stored |= known_content(manifest, loaded)
        changes: dict[str, LeafChange] = {}
        for path in paths:
            spec, tiling, copy = manifest.spec(path), manifest.tiling(path), self._leaves.get(path)
            assert tiling is not None
            self._leaves[path] = _Leaf(spec, None, tiling, manifest.mark_of(path))
            positions = None
            if path not in recut and copy is not None:
                names = {
                    number: name for number, name in enumerate(tiling.names(path)) if name in loaded
                }
                # With equal cuts the copy had every tile, so `before` has all that were read.
                positions = _changed_in_tiles(
                    spec, tiling, {n: (before[name], loaded[name]) for n, name in names.items()}
                )
            values = self._bytes_of(self._leaves[path])
            if path in recut:
                positions = changed_elements(spec, recut[path], values)
            _note(changes, spec, positions, values.view(spec.element.numpy), "", tiling)
        return changes

    def _holds(self, manifest: Manifest, name: str) -> bool:
        return name in self._stored and self._stored[name].digest == manifest.stored[name].digest

    def _bytes_of(self, leaf: _Leaf) -> NDArray[np.uint8]:
        """Return the bytes of the copy of a leaf."""
        if leaf.data is not None or leaf.tiles is None:
            assert leaf.data is not None
            return leaf.data
        # Made anew at each call: a second whole copy of the leaves would double the memory.
        values = np.empty(leaf.spec.shape, leaf.spec.element.numpy)
        for number, name in enumerate(leaf.tiles.names(leaf.spec.path)):
            box = tiles.box(leaf.tiles.cuts, number)
            values[box] = self._stored[name].data.view(values.dtype).reshape(values[box].shape)
        return values.reshape(-1).view(np.uint8)


def _note(
    changes: dict[str, LeafChange],
    spec: LeafSpec,
    positions: NDArray[np.int64] | None,
    values: NDArray[Any],
    digest: str,
    tiling: Tiles | None,
) -> None:
    """Add the change of a leaf, if there is any.

    Args:
        positions: The changed elements; ``None``: all.
        values: All values of the leaf. They are made read-only, because consumers may keep them.
    """
    values.flags.writeable = False
    if positions is None:
        changes[spec.path] = LeafChange(spec, None, values, digest, tiling)
    elif positions.size:
        changes[spec.path] = LeafChange(spec, positions, values[positions], digest, tiling)


def _cuts_of(tiling: Tiles | None) -> tiles.Cuts | None:
    return None if tiling is None else tiling.cuts


class _Leaf(NamedTuple):
    """A followed leaf.

    Attributes:
        spec: The leaf.
        data: Its bytes; ``None`` if it is stored in tiles, which are held one by one.
        tiles: Its tiles, if it has any.
        mark: A value that differs if a step has other content: the digests of the manifest, or
            those of the bytes if no manifest has them.
    """

    spec: LeafSpec
    data: NDArray[np.uint8] | None
    tiles: Tiles | None
    mark: object


def changed_elements(
    spec: LeafSpec, before: NDArray[np.uint8], now: NDArray[np.uint8]
) -> NDArray[np.int64] | None:
    """Return the elements that differ in a bit; ``None`` if a list of them saves no memory."""
    differs = _differs(spec, before, now)
    positions = np.flatnonzero(differs)
    return (
        None
        if positions.size * _SPARSE_BELOW > differs.size
        else positions.astype(np.int64, copy=False)
    )


def _changed_in_tiles(
    spec: LeafSpec,
    tiling: Tiles,
    contents: Mapping[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]],
) -> NDArray[np.int64] | None:
    """Return the elements that differ, as ``changed_elements`` does, for a leaf in tiles.

    Args:
        contents: The content before and after of the tiles whose digests differ, by number.
    """
    positions = [np.zeros(0, np.int64)]
    for number, (before, now) in contents.items():
        box = tiles.box(tiling.cuts, number)
        inner = np.unravel_index(
            np.flatnonzero(_differs(spec, before, now)), [s.stop - s.start for s in box]
        )
        positions.append(
            np.ravel_multi_index(
                [index + s.start for index, s in zip(inner, box, strict=True)], spec.shape
            )
        )
        if sum(part.size for part in positions) * _SPARSE_BELOW > math.prod(spec.shape):
            return None
    # Tiles interleave in the flattened leaf, so positions ascend only within each tile.
    return np.sort(np.concatenate(positions))


def _differs(
    spec: LeafSpec, before: NDArray[np.uint8], now: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    """Return True for each element that differs in at least one bit."""
    # Bits are compared and not values: a NaN differs from itself, and -0.0 equals 0.0.
    width = spec.element.item_bytes
    word = np.dtype(f"u{min(width, 8)}")
    differs: NDArray[np.bool_] = before.view(word) != now.view(word)
    if width > word.itemsize:
        # The widest element, complex128, has 16 bytes: two words.
        element_differs: NDArray[np.bool_] = differs[::2] | differs[1::2]
        return element_differs
    return differs


@typed
def follow(
    path: str | os.PathLike[str],
    *,
    leaves: Iterable[str] | Callable[[str], bool] | None = None,
    item: str | None = None,
    newest_only: bool = False,
    poll_seconds: float = 0.2,
    timeout: float | None = None,
    storage: ObjectStore | None = None,
    limits: Limits | None = None,
) -> Follower:
    """Follow a run while it trains, beginning with the newest step, which is delivered whole.

    All values have been compared with the digests of their step.

    Args:
        path: The root: a directory, or a prefix of an object store.
        leaves: Paths to follow, or a function that returns True for such a path, for example
            ``lambda path: path.startswith("model/")``. Fewer leaves: less memory and less to read.
            ``None``: all leaves.
        item: The item of a ``CheckpointManager``'s steps, required if they have more than one.
        newest_only: Skip steps that were committed while the consumer was busy: less work, but not
            every step is delivered. ``False``: deliver every step that still exists.
        poll_seconds: Interval between two checks for a new step. Shorter: updates arrive earlier;
            longer: fewer requests to the storage.
        timeout: End the iteration after this many seconds without a new step. ``None``: never.
        storage: Access to an object store; ``None``: settings of the environment.
        limits: The most that the delivery of one step may take. Smaller: a forged step takes less;
            larger: larger steps pass. ``None``: what no root that this package wrote reaches.

    Returns:
        An iterator over updates.

    Raises:
        NotACheckpointRoot: There is no root at ``path``.
        UnsupportedFormat: The root needs a newer version of deltacheck.
    """
    if callable(leaves) or leaves is None:
        is_followed = leaves or (lambda path: True)
    else:
        is_followed = frozenset(leaves).__contains__
    return Follower(
        open_root(path, item, storage=storage),
        is_followed,
        newest_only,
        poll_seconds,
        timeout,
        limits,
    )
