"""Follow a run while it goes on: each committed step as what changed in it, for processes that keep
a copy of its weights.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacheck.errors import Damaged, DeltacheckError, StepNotFound, TreeMismatch
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec, batches
from deltacheck.restore import read
from deltacheck.restore.chain import Held, resolve_chains
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest, Tiles
from deltacheck.store.root import Root, StepRef, open_root, open_segments
from deltacheck.store.segment import Segment

# Leaves that are loaded together. Larger: fewer calls; that much more memory beside what is held.
_BATCH_BYTES = 256 << 20
# A change is told element by element where fewer than one in so many changed: a position takes 8
# bytes.
_SPARSE_BELOW = 4


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What became of one leaf. ``positions``: int64, ascending, of the changed elements of the
    flattened leaf; ``None``: all of them. ``values``: their new content, 1-D, in the leaf's own
    dtype. ``digest``: of the leaf's bytes with these values in place; empty where the leaf is
    stored in ``tiles``, which then has theirs.
    """

    spec: LeafSpec
    positions: NDArray[np.int64] | None
    values: NDArray[Any]
    digest: str
    tiles: Tiles | None = None

    def apply(self, array: NDArray[Any]) -> None:
        """Put the values into ``array``, a writable C-contiguous array of the leaf's shape and
        dtype, in place. Raises ``TreeMismatch``.
        """
        if (array.shape, array.dtype) != (
            self.spec.shape,
            self.spec.element.numpy,
        ) or not array.flags.c_contiguous:
            raise TreeMismatch(
                f"leaf {self.spec.path!r} is {self.spec.dtype}{list(self.spec.shape)}; the array to"
                " change is "
                f"{array.dtype}{list(array.shape)}{'' if array.flags.c_contiguous else ', not contiguous'}"
            )
        array.reshape(-1)[slice(None) if self.positions is None else self.positions] = self.values

    def check(self, array: NDArray[Any]) -> None:
        """Compare a copy of the leaf, of its shape, with the digests of the step. Raises
        ``Damaged`` where a bit of it is another.
        """
        if self.tiles is None:
            self._check(self.spec, array, self.digest)
            return
        for number, record in enumerate(self.tiles.records()):
            box = tiles.box(self.tiles.cuts, number)
            self._check(record.spec(tiles.name(self.spec.path, box)), array[box], record.digest)

    def _check(self, spec: LeafSpec, array: NDArray[Any], digest: str) -> None:
        found = digest_of(spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if found != digest:
            raise Damaged(
                f"leaf {spec.path!r}: this copy has digest {found}, the step has {digest}. Take the"
                " whole state again: follow(...) anew, or Follower.anchor()",
                leaf=self.spec.path,
            )


@dataclass(frozen=True, slots=True)
class Update:
    """One committed step. ``changes``: by leaf path, ties once; leaves that did not change are not
    in
    it.

    ``since``: the step that the changes are relative to, the update before; ``None`` where every
    leaf is given whole: in the first update, and where the follower had to begin again because the
    tree is another one, or after an error. ``names``: every path of the tree -> the path of the
    leaf in ``changes`` that it is tied to.
    """

    step: int
    seq: int
    since: int | None
    changes: Mapping[str, LeafChange]
    names: Mapping[str, str]
    metrics: Mapping[str, float | str]

    @property
    def changed_elements(self) -> int:
        """Elements that the update has new values for, of all leaves together; ties count once."""
        return sum(change.values.size for change in self.changes.values())


class Follower:
    """The committed steps of a root, one after the other, as they appear. Made by
    ``deltacheck.follow``; takes no lock, writes nothing.

    Holds one copy of the leaves that it follows, whose digests it has compared with the manifest's,
    and finds changes by comparing each step with it. So there is no gap between updates: what
    retention removes or a chain no longer offers is read whole and compared all the same. After an
    error the next update is whole.
    """

    def __init__(
        self,
        root: Root,
        wanted: Callable[[str], bool],
        newest_only: bool,
        poll_seconds: float,
        timeout: float | None,
    ) -> None:
        self._root = root
        self._wanted = wanted
        self._newest_only = newest_only
        self._poll_seconds = poll_seconds
        self._timeout = timeout
        self._seq = -1
        self._listed: list[Place] = []
        self._told: set[Place] = set()
        self.anchor()

    def __iter__(self) -> Iterator[Update]:
        """Every update, waiting for the next one; ends when none has come for ``timeout``
        seconds.
        """
        begin = time.monotonic()
        while True:
            update = self.poll()
            if update is not None:
                yield update
                begin = time.monotonic()
            elif self._timeout is not None and time.monotonic() - begin >= self._timeout:
                return
            else:
                time.sleep(self._poll_seconds)

    def poll(self) -> Update | None:
        """The next update, or ``None`` where no new step is committed.

        Raises ``Damaged`` or ``ChainBroken`` (naming leaf, step and file) where the step is not
        whole, ``ReplayNeeded`` where it is kept as gradients; the poll after that goes on with the
        step after it, whole.
        """
        found = self._next()
        if found is None:
            return None
        try:
            manifest = self._root.read(found.manifest_path)
            self._seq = manifest.seq
            return self._update(manifest)
        except FileNotFoundError:
            return None  # deleted since it was listed
        except DeltacheckError:
            self.anchor()
            raise

    def anchor(self) -> None:
        """Forget what is held: the next update gives every leaf whole."""
        self._step: int | None = None
        self._leaves: dict[str, _Leaf] = {}
        self._stored: dict[str, Held] = {}
        self._segments: list[Segment] = []

    def _next(self) -> StepRef | None:
        """The step whose turn it is. Raises, once, for a manifest that cannot be read."""
        listed = self._root.manifest_paths()
        if listed == self._listed:
            return None
        checkpoints, damaged = self._root.read_all()
        for path in sorted(damaged.keys() - self._told):
            self._told.add(path)
            raise damaged[path]
        newer = [ref for ref in checkpoints if ref.seq > self._seq]
        if len(newer) <= 1 or self._newest_only or self._seq < 0:
            self._listed = listed  # nothing is left to see before it changes
        if not newer:
            return None
        return newer[-1] if self._newest_only or self._seq < 0 else newer[0]

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
        since, segments = self._step, open_segments(self._root, manifest)
        changes: dict[str, LeafChange] = {}
        stale = [
            p
            for p in specs
            if p not in self._leaves or self._leaves[p].mark != (manifest.mark_of(p) or "")
        ]
        for paths in batches(stale, lambda path: specs[path].raw_bytes, _BATCH_BYTES):
            changes |= self._changes(manifest, paths)
        self._segments = (
            segments  # kept, so that those which the next step shares are not read again
        )
        self._step = manifest.step
        return Update(manifest.step, manifest.seq, since, changes, names, dict(manifest.metrics))

    def _changes(self, manifest: Manifest, paths: list[str]) -> dict[str, LeafChange]:
        known = {path: self._leaves[path] for path in paths if path in self._leaves}
        # What was cut otherwise is compared whole.
        recut = {
            p: self._bytes_of(leaf)
            for p, leaf in known.items()
            if _cuts_of(leaf.tiles) != _cuts_of(manifest.tiles.get(p))
        }
        changes = self._changes_of_whole(
            manifest, [path for path in paths if path not in manifest.tiles], recut
        )
        changes |= self._changes_of_tiled(
            manifest, [path for path in paths if path in manifest.tiles], recut
        )
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
        """Of leaves that are not stored in tiles. ``recut``: what is held of leaves that were cut
        otherwise.
        """
        leaves = resolve_leaves(self._root, manifest, paths, held=self._stored)
        stored: dict[str, NDArray[np.uint8]] = {}
        loaded = load_leaves(leaves, stored=stored)
        self._stored |= {
            path: Held(data, manifest.stored[path].digest) for path, data in stored.items()
        }
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
            positions = None if before is None else _changed_elements(spec, before, data)
            _note(changes, spec, positions, data.view(spec.element.numpy), digest, None)
        return changes

    def _changes_of_tiled(
        self, manifest: Manifest, paths: list[str], recut: Mapping[str, NDArray[np.uint8]]
    ) -> dict[str, LeafChange]:
        """Of leaves that are stored in tiles: only those that are others than before are read."""
        fresh = [
            name
            for path in paths
            for name in manifest.names_of(path)
            if not self._holds(manifest, name)
        ]
        before = {name: self._stored[name].data for name in fresh if name in self._stored}
        chains = resolve_chains(self._root, manifest, fresh, held=self._stored)
        loaded = read.read_chunks(
            chains, {name: list(range(one.spec.chunk_count)) for name, one in chains.items()}
        )
        self._stored |= {
            name: Held(data, manifest.stored[name].digest) for name, data in loaded.items()
        }
        changes: dict[str, LeafChange] = {}
        for path in paths:
            spec, of, known = manifest.spec(path), manifest.tiles[path], self._leaves.get(path)
            self._leaves[path] = _Leaf(spec, None, of, manifest.mark_of(path))
            positions = None
            if path not in recut and known is not None:
                names = {
                    number: name for number, name in enumerate(of.names(path)) if name in loaded
                }
                positions = _changed_in_tiles(
                    spec, of, {n: (before[name], loaded[name]) for n, name in names.items()}
                )
            values = self._bytes_of(self._leaves[path])
            if path in recut:
                positions = _changed_elements(spec, recut[path], values)
            _note(changes, spec, positions, values.view(spec.element.numpy), "", of)
        return changes

    def _holds(self, manifest: Manifest, name: str) -> bool:
        return name in self._stored and self._stored[name].digest == manifest.stored[name].digest

    def _bytes_of(self, leaf: _Leaf) -> NDArray[np.uint8]:
        """The bytes of a leaf as it is held."""
        if leaf.data is not None or leaf.tiles is None:
            assert leaf.data is not None
            return leaf.data
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
    of: Tiles | None,
) -> None:
    """Add what became of a leaf, if anything. ``values``: of all of it; they are not written to
    from here on.
    """
    values.flags.writeable = False
    if positions is None:
        changes[spec.path] = LeafChange(spec, None, values, digest, of)
    elif positions.size:
        changes[spec.path] = LeafChange(spec, positions, values[positions], digest, of)


def _cuts_of(of: Tiles | None) -> tiles.Cuts | None:
    return None if of is None else of.cuts


class _Leaf(NamedTuple):
    """A followed leaf. ``data``: ``None`` of one in ``tiles``, which are held as such. ``mark``:
    what
    tells whether a step has other bytes; of a leaf whose digest no manifest has, that of its bytes.
    """

    spec: LeafSpec
    data: NDArray[np.uint8] | None
    tiles: Tiles | None
    mark: object


def _changed_elements(
    spec: LeafSpec, before: NDArray[np.uint8], now: NDArray[np.uint8]
) -> NDArray[np.int64] | None:
    """Where two contents of a leaf differ in a bit; ``None`` where in so many elements that telling
    them one by one takes more memory.
    """
    differs = _differs(spec, before, now)
    positions = np.flatnonzero(differs)
    return (
        None
        if positions.size * _SPARSE_BELOW > differs.size
        else positions.astype(np.int64, copy=False)
    )


def _changed_in_tiles(
    spec: LeafSpec, of: Tiles, contents: Mapping[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]
) -> NDArray[np.int64] | None:
    """As ``_changed_elements``, in coordinates of the leaf. ``contents``: of the tiles whose
    digests differ, by number, before and now.
    """
    found = [np.zeros(0, np.int64)]
    for number, (before, now) in contents.items():
        box = tiles.box(of.cuts, number)
        inner = np.unravel_index(
            np.flatnonzero(_differs(spec, before, now)), [s.stop - s.start for s in box]
        )
        found.append(
            np.ravel_multi_index(
                [at + s.start for at, s in zip(inner, box, strict=True)], spec.shape
            )
        )
        if sum(part.size for part in found) * _SPARSE_BELOW > math.prod(spec.shape):
            return None
    return np.sort(np.concatenate(found))


def _differs(
    spec: LeafSpec, before: NDArray[np.uint8], now: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    """Per element, whether a bit of it is another."""
    width = spec.element.item_bytes
    word = np.dtype(f"u{min(width, 8)}")
    differs: NDArray[np.bool_] = before.view(word) != now.view(word)
    if width > word.itemsize:
        both: NDArray[np.bool_] = differs[::2] | differs[1::2]  # the widest element has 16 bytes
        return both
    return differs


def follow(
    path: str | os.PathLike[str],
    *,
    leaves: Iterable[str] | Callable[[str], bool] | None = None,
    item: str | None = None,
    newest_only: bool = False,
    poll_seconds: float = 0.2,
    timeout: float | None = None,
    storage: ObjectStore | None = None,
) -> Follower:
    """Follow a run live: an iterator over its committed steps as changed leaves, beginning with the
    newest step, whole.

    ``leaves``: paths, or a function that says whether a path is followed, such as ``lambda path:
    path.startswith("model/")``; fewer: less memory and less to read; by default all. ``item``: of a
    ``CheckpointManager``'s steps, where they have several. ``newest_only``: leave out steps that
    were committed while the consumer was busy: less work, but not every step is seen.
    ``poll_seconds``: between two looks for a new step; shorter: sooner there, more calls to the
    storage. ``timeout``: the iteration ends when nothing new has come for so many seconds;
    ``None``: never. ``storage``: how an object store is reached.

    Every value has been compared with the digests of its step; a step that is not whole raises, and
    the one after it comes whole. Raises ``NotACheckpointRoot``, ``UnsupportedFormat``.
    """
    if callable(leaves) or leaves is None:
        wanted = leaves or (lambda path: True)
    else:
        chosen = frozenset(leaves)
        wanted = chosen.__contains__
    return Follower(
        open_root(path, item, storage=storage), wanted, newest_only, poll_seconds, timeout
    )
