"""Which step last changed each part of a leaf, told from digests: no leaf is read."""

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
from deltacheck.store.root import Root


@dataclass(frozen=True, slots=True)
class Blame:
    """``steps``: int64, per chunk of the leaf the oldest step since which it has had the same
    bytes.
    ``is_known``: bool, per chunk whether the step before that one is there and had others; else the
    content is as old as the oldest step that can be compared, or older. ``cuts``: of a leaf that is
    stored in tiles: the chunks are then those of its tiles, one tile after the other. ``spec``: of
    what is stored.
    """

    spec: LeafSpec
    steps: NDArray[np.int64]
    is_known: NDArray[np.bool_]
    cuts: Cuts | None = None

    def box(self, chunk: int) -> Box:
        """Where a chunk lies in the leaf. ``IndexError`` where there is none of that number."""
        tile_specs = [self.spec] if self.cuts is None else _tile_specs(self.spec, self.cuts)
        for number, spec in enumerate(tile_specs):
            if 0 <= chunk < spec.chunk_count:
                inner = grid.box(spec.shape, spec.chunk, chunk)
                at = (
                    [0] * len(inner)
                    if self.cuts is None
                    else [s.start for s in tiles.box(self.cuts, number)]
                )
                return tuple(
                    slice(first + s.start, first + s.stop)
                    for first, s in zip(at, inner, strict=True)
                )
            chunk -= spec.chunk_count
        raise IndexError(f"leaf {self.spec.path!r} has no such chunk")


def _tile_specs(leaf: LeafSpec, cuts: Cuts) -> Iterator[LeafSpec]:
    for number in range(tiles.count(cuts)):
        yield LeafSpec.of(
            leaf.path, tuple(s.stop - s.start for s in tiles.box(cuts, number)), leaf.dtype
        )


def blame(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Blame]:
    """For stored leaves of a step: since when each of their chunks has its content, among the steps
    that are there.

    Of a leaf that a policy keeps as codes, the codes are what is compared; one that ranks have cut
    otherwise before cannot be compared with that, and is as old as the first step of its cuts, or
    older. Reads segment tables and chunk digests, back to the step where nothing is left to find.
    Raises ``Damaged`` or ``ChainBroken`` where a step on the way is not whole, ``KeyError`` for a
    path that is not stored.
    """
    paths = list(dict.fromkeys(paths))
    names = {path: manifest.names_of(path) or [path] for path in paths}
    parts = _blamed(root, manifest, [name for of in names.values() for name in of])
    return {
        path: _joined(manifest, path, [parts[name] for name in of]) for path, of in names.items()
    }


def _joined(manifest: Manifest, path: str, parts: list[Blame]) -> Blame:
    if path not in manifest.tiles:
        return parts[0]
    steps, known = (
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.is_known for part in parts]),
    )
    return Blame(manifest.spec(path), steps, known, manifest.tiles[path].cuts)


def _blamed(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Blame]:
    """As ``blame``, of leaves and tiles by what they are stored as."""
    found: dict[str, Blame] = {}
    now: dict[str, NDArray[np.uint64]] = {}
    for path, link in resolve_chains(root, manifest, paths).items():
        count = link.spec.chunk_count
        found[path] = Blame(
            link.spec, np.full(count, manifest.step, np.int64), np.zeros(count, np.bool_)
        )
        now[path] = link.digests
    open_paths = {path for path, one in found.items() if one.steps.size}
    older = [ref for ref in root.checkpoints() if ref.seq < manifest.seq]
    for ref in reversed(older):
        if not open_paths:
            break
        before = root.read(ref.manifest_path)
        comparable = {
            path
            for path in open_paths
            if path in before.stored and before.stored[path].spec(path) == found[path].spec
        }
        open_paths -= {
            path for path in open_paths - comparable if _lies_otherwise(path, manifest, before)
        }
        links = resolve_chains(root, before, sorted(comparable))
        for path in sorted(open_paths):
            one = found[path]
            same = (
                (links[path].digests == now[path]).all(axis=1)
                if path in comparable
                else np.zeros(one.steps.size, np.bool_)
            )
            one.steps[same & ~one.is_known] = before.step
            one.is_known[~same] = True
            if one.is_known.all():
                open_paths.remove(path)
    return found


def _lies_otherwise(path: str, manifest: Manifest, before: Manifest) -> bool:
    """Whether an earlier step stores the leaf of ``path``, too, but one of the two steps has it in
    tiles. REQUIRES: it cannot be compared there.
    """
    leaf = tiles.leaf_of(path)
    if not before.names_of(leaf) or not (leaf in before.tiles or leaf in manifest.tiles):
        return False
    old, new = before.spec(leaf), manifest.spec(leaf)
    return (old.dtype, old.shape) == (new.dtype, new.shape)
