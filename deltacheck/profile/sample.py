"""Which elements of a leaf are looked at: the same at every step, and the same for all leaves of
one
shape.

So the sample of a weight, its master and its moments hold the same elements, and equal leaves have
equal samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.parameters import Roles

BLOCK = 64  # contiguous elements: at most two rows of most matrices, one burst of memory
_EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is looked at. ``starts``: leaf path -> first element of each block, ascending, int64; a
    block has ``BLOCK`` elements, or all there are.
    """

    specs: Mapping[str, LeafSpec]
    roles: Roles
    starts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def elements(self, path: str) -> NDArray[np.int64]:
        """Offsets of the sampled elements in C order, int64 ``(blocks, width)``."""
        width = min(BLOCK, math.prod(self.specs[path].shape))
        offsets: NDArray[np.int64] = self.starts[path][:, None] + np.arange(width)
        return offsets


def plan(specs: Mapping[str, LeafSpec], found: Roles, blocks: int) -> Plan:
    """About ``blocks`` blocks for each class, by size, and one at least for each leaf. Larger: less
    noise, more to copy.

    A class is a role, with input embeddings apart: their rows are touched at very different rates.
    """
    embeddings = {specs[path].shape for path in embedding_paths(specs, found)}
    totals: dict[tuple[str, bool], int] = {}
    roles_of = found.of()
    for path, spec in specs.items():
        kind = (roles_of[path][0] if path in roles_of else "other", spec.shape in embeddings)
        totals[kind] = totals.get(kind, 0) + math.prod(spec.shape)
    largest = {
        rows: max((size for kind, size in totals.items() if kind[1] is rows), default=1)
        for rows in (False, True)
    }
    sizes = {path: spec.shape for path, spec in specs.items() if math.prod(spec.shape)}
    return Plan(
        specs,
        found,
        {p: _starts(shape, blocks, largest[shape in embeddings]) for p, shape in sizes.items()},
    )


def embedding_paths(specs: Mapping[str, LeafSpec], found: Roles) -> set[str]:
    """Leaves of parameters that are embeddings, to judge by their names: matrices, one row for each
    token or position.
    """
    called = {
        path for path, spec in specs.items() if len(spec.shape) == 2 and _EMBEDDING.search(path)
    }
    for p in found.parameters:
        own = {path for path in (p.weight, p.master, p.first, p.second) if path is not None}
        called |= own if called & own else set()
    return called


def _starts(shape: tuple[int, ...], blocks: int, largest: int) -> NDArray[np.int64]:
    """One block, chosen by a hash, from each of as many equal parts of the leaf as it gets
    blocks.
    """
    size = math.prod(shape)
    there = -(-size // BLOCK)
    count = min(there, max(1, round(blocks * size / largest)))
    edges = [there * i // count for i in range(count + 1)]
    draws = (xxhash.xxh3_64_intdigest(f"{shape}:{i}".encode()) for i in range(count))
    chosen = [
        low + draw % (high - low) for (low, high), draw in zip(pairwise(edges), draws, strict=True)
    ]
    return np.array([max(0, min(BLOCK * number, size - BLOCK)) for number in chosen], np.int64)
