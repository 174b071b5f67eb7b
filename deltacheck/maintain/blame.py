"""Find the step that last changed each part of a leaf, from digests alone. No leaf is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltacheck.leaf import grid, tiles
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.restore.chain import resolve_chains
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root


@dataclass(frozen=True, slots=True)
class Blame:
    """The origin of each chunk of a leaf.

    Attributes:
        spec: Spec of the stored leaf.
        steps: int64, for each chunk the oldest step since which it has had the same bytes.
        is_known: bool, for each chunk whether the step before that one exists and had other bytes.
            If false, the content is as old as the oldest step that can be compared, or older.
        cuts: Tiling of a leaf that is stored in tiles, else ``None``. The chunks are those of the
            tiles, one tile after the other.
        stored_dtypes: For each tile, the element type of what is stored of it, ``None`` for a tile
            that is computed from others and has no chunks. Empty: that of the leaf.
    """

    spec: LeafSpec
    steps: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    cuts: Cuts | None = None
    stored_dtypes: tuple[str | None, ...] = ()

    def box(self, chunk: int) -> Box:
        """Return the slices of the leaf that a chunk covers.

        Raises:
            IndexError: If there is no chunk of that number.
        """
        # Chunk numbers of a leaf in tiles continue from tile to tile, in the order of the digests
        # that ``_join`` puts together.
        number = chunk
        for tile, spec in [(0, self.spec)] if self.cuts is None else self._stored_tiles():
            if 0 <= number < spec.chunk_count:
                inner = grid.box(spec.shape, spec.chunk, number)
                origin = (
                    [0] * len(inner)
                    if self.cuts is None
                    else [axis.start for axis in tiles.box(self.cuts, tile)]
                )
                return tuple(
                    slice(first + axis.start, first + axis.stop)
                    for first, axis in zip(origin, inner, strict=True)
                )
            number -= spec.chunk_count
        raise IndexError(f"leaf {self.spec.path!r} has {self.steps.size} chunks, no chunk {chunk}")

    def _stored_tiles(self) -> Iterator[tuple[int, LeafSpec]]:
        """Yield the number and the spec of each tile that is stored."""
        assert self.cuts is not None
        dtypes = self.stored_dtypes or (self.spec.dtype,) * tiles.count(self.cuts)
        for number, dtype in enumerate(dtypes):
            if dtype is not None:
                shape = tuple(axis.stop - axis.start for axis in tiles.box(self.cuts, number))
                yield number, LeafSpec.of(self.spec.path, shape, dtype)


def blame(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Blame]:
    """Find the step that last changed each chunk of some stored leaves.

    Segment tables and chunk digests are read backwards from the step, until the origin of every
    chunk is known. If a policy stores a leaf as codes, the codes are compared. Tiles are compared
    only with steps that have the same tiles; at the first such step the chunks count as "or older".

    Args:
        root: Root to read.
        manifest: Manifest of the step to begin with.
        paths: Paths of stored leaves.

    Returns:
        Leaf path -> origin of its chunks.

    Raises:
        Damaged: If a step on the way is not whole.
        ChainBroken: The same, if a chain has no keyframe.
        KeyError: If a path is not stored.
    """
    # ``paths`` may be an iterator, and a path that is named twice must not be resolved twice.
    paths = list(dict.fromkeys(paths))
    names = {path: manifest.names_of(path) or [path] for path in paths}
    stored_paths = [name for tile_names in names.values() for name in tile_names]
    parts = _blame_stored(root, manifest, stored_paths)
    return {
        path: _join(manifest, path, [parts[name] for name in tile_names])
        for path, tile_names in names.items()
    }


def _join(manifest: Manifest, path: str, parts: list[Blame]) -> Blame:
    if path not in manifest.tiles:
        return parts[0]
    steps = np.concatenate([part.steps for part in parts])
    is_known = np.concatenate([part.is_known for part in parts])
    cut = manifest.tiles[path]
    dtypes = tuple(map(cut.stored_dtype, range(len(cut.lanes)))) if cut.forms else ()
    return Blame(manifest.spec(path), steps, is_known, cut.cuts, dtypes)


def _blame_stored(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Blame]:
    """Find the origin of the chunks of leaves and tiles, by the paths they are stored under."""
    origins: dict[str, Blame] = {}
    digests: dict[str, NDArray[np.uint64]] = {}
    for path, chain in resolve_chains(root, manifest, paths).items():
        count = chain.spec.chunk_count
        # Until an older step is read, each chunk is as old as the step itself "or older".
        origins[path] = Blame(
            chain.spec, np.full(count, manifest.step, np.int64), np.zeros(count, np.bool_)
        )
        digests[path] = chain.digests
    # Leaves without elements have no chunk whose origin could be found.
    open_paths = {path for path, origin in origins.items() if origin.steps.size}
    # Sequence numbers decide what came before: a resumed run repeats training steps (format.md,
    # section 1).
    older = [ref for ref in root.checkpoints() if ref.seq < manifest.seq]
    for ref in reversed(older):
        if not open_paths:
            break
        before = root.read(ref.manifest_path)
        comparable = {
            path
            for path in open_paths
            if path in before.stored and before.stored[path].spec(path) == origins[path].spec
        }
        # If only the tiling differs, the bytes may be the same: the origin stays unknown.
        open_paths -= {
            path for path in open_paths - comparable if _tiled_otherwise(path, manifest, before)
        }
        chains = resolve_chains(root, before, sorted(comparable))
        for path in sorted(open_paths):
            origin = origins[path]
            # A leaf that the older step lacks, or has in another shape, counts as changed
            # altogether.
            is_equal = (
                (chains[path].digests == digests[path]).all(axis=1)
                if path in comparable
                else np.zeros(origin.steps.size, np.bool_)
            )
            # A known origin stays, even if a still older step happens to have the same bytes again.
            origin.steps[is_equal & ~origin.is_known] = before.step
            origin.is_known[~is_equal] = True
            if origin.is_known.all():
                open_paths.remove(path)
    return origins


def _tiled_otherwise(path: str, manifest: Manifest, before: Manifest) -> bool:
    """Return whether an earlier step stores the same leaf in other tiles.

    ``path`` must be one that cannot be compared with that step.
    """
    leaf = tiles.leaf_of(path)
    if not before.names_of(leaf) or not (leaf in before.tiles or leaf in manifest.tiles):
        return False
    old, new = before.spec(leaf), manifest.spec(leaf)
    return (old.dtype, old.shape) == (new.dtype, new.shape)
