"""Which step last changed each part of a leaf, told from digests: no leaf is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltacheck import chain
from deltacheck.records import LeafSpec
from deltacheck.store.root import Root
from deltacheck.store.schema import Manifest


@dataclass(frozen=True, slots=True)
class Blame:
    """``steps``: int64, per chunk of the leaf the oldest step since which it has had the same bytes. ``is_known``: bool, per chunk whether the step
    before that one is there and had others; else the content is as old as the oldest step that can be compared, or older.
    """

    spec: LeafSpec
    steps: NDArray[np.int64]
    is_known: NDArray[np.bool_]


def blame(root: Root, manifest: Manifest, paths: Iterable[str]) -> dict[str, Blame]:
    """For stored leaves of a step: since when each of their chunks has its content, among the steps that are there.

    Of a leaf that a policy keeps as codes, the codes are what is compared. Reads segment tables and chunk digests, back to the step where nothing is
    left to find. Raises ``Damaged`` or ``ChainBroken`` where a step on the way is not whole, ``KeyError`` for a path that is not stored.
    """
    found: dict[str, Blame] = {}
    now: dict[str, NDArray[np.uint64]] = {}
    for path, link in chain.resolve(root, manifest, paths).items():
        count = link.spec.chunk_count
        found[path] = Blame(link.spec, np.full(count, manifest.step, np.int64), np.zeros(count, np.bool_))
        now[path] = link.digests
    open_paths = {path for path, one in found.items() if one.steps.size}
    older = [ref for ref in root.checkpoints() if ref.seq < manifest.seq]
    for ref in reversed(older):
        if not open_paths:
            break
        before = root.read(ref.manifest_path)
        comparable = {
            path for path in open_paths if path in before.leaves and before.leaves[path].spec(path) == found[path].spec
        }
        links = chain.resolve(root, before, sorted(comparable))
        for path in sorted(open_paths):
            one = found[path]
            same = (links[path].digests == now[path]).all(axis=1) if path in comparable else np.zeros(one.steps.size, np.bool_)
            one.steps[same & ~one.is_known] = before.step
            one.is_known[~same] = True
            if one.is_known.all():
                open_paths.remove(path)
    return found
