"""Selection of the sampled elements of each leaf.

The selection depends on the shape alone. So it is the same at every step, the samples of a weight,
its master and its moments hold the same elements, and equal leaves have equal samples.
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

# Contiguous elements of a block. Such a block touches at most two rows of most matrices and is
# about one burst of memory, so scattered single elements would hardly be cheaper to copy.
BLOCK = 64
_EMBEDDING = re.compile(r"emb|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The sampled blocks of every leaf.

    Attributes:
        specs: The specs of all leaves.
        roles: Their roles.
        starts: For each leaf path, the first element of each block: int64, ascending. A block has
            ``BLOCK`` elements, or all elements of a smaller leaf.
    """

    specs: Mapping[str, LeafSpec]
    roles: Roles
    starts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def elements(self, path: str) -> NDArray[np.int64]:
        """Return the offsets of the sampled elements in C order, int64 ``(blocks, width)``."""
        width = min(BLOCK, math.prod(self.specs[path].shape))
        offsets: NDArray[np.int64] = self.starts[path][:, None] + np.arange(width)
        return offsets


def plan_samples(specs: Mapping[str, LeafSpec], roles: Roles, blocks: int) -> SamplePlan:
    """Select about ``blocks`` blocks for each class of leaves, and at least one for each leaf.

    A class is a role. Input embeddings are a class of their own, because their rows change at very
    different rates.

    Args:
        specs: The specs of all leaves.
        roles: Their roles.
        blocks: The number of blocks of the largest class. Larger: less noise, more to copy;
            smaller: the opposite.
    """
    embeddings = {specs[path].shape for path in embedding_paths(specs, roles)}
    totals: dict[tuple[str, bool], int] = {}
    roles_of = roles.of()
    for path, spec in specs.items():
        kind = (roles_of[path][0] if path in roles_of else "other", spec.shape in embeddings)
        totals[kind] = totals.get(kind, 0) + math.prod(spec.shape)
    # Every leaf gets blocks in proportion to its share of the largest class, so that small classes
    # do not get more than they need.
    largest = {
        rows: max((size for kind, size in totals.items() if kind[1] is rows), default=1)
        for rows in (False, True)
    }
    sizes = {path: spec.shape for path, spec in specs.items() if math.prod(spec.shape)}
    return SamplePlan(
        specs,
        roles,
        {p: _starts(shape, blocks, largest[shape in embeddings]) for p, shape in sizes.items()},
    )


def embedding_paths(specs: Mapping[str, LeafSpec], roles: Roles) -> set[str]:
    """Return the leaves of parameters that are embeddings, judged by their names.

    An embedding is a matrix with one row for each token or position.
    """
    embeddings = {
        path for path, spec in specs.items() if len(spec.shape) == 2 and _EMBEDDING.search(path)
    }
    for p in roles.parameters:
        group = {path for path in (p.weight, p.master, p.first, p.second) if path is not None}
        embeddings |= group if embeddings & group else set()
    return embeddings


def _starts(shape: tuple[int, ...], blocks: int, largest: int) -> NDArray[np.int64]:
    """Return the first element of each block of a leaf.

    The leaf is divided into equal parts, and a hash selects one block from each (stratified
    sampling). A regular grid could coincide with the period of the data.
    """
    size = math.prod(shape)
    total = -(-size // BLOCK)
    count = min(total, max(1, round(blocks * size / largest)))
    edges = [total * i // count for i in range(count + 1)]
    draws = (xxhash.xxh3_64_intdigest(f"{shape}:{i}".encode()) for i in range(count))
    numbers = [
        low + draw % (high - low) for (low, high), draw in zip(pairwise(edges), draws, strict=True)
    ]
    return np.array([max(0, min(BLOCK * number, size - BLOCK)) for number in numbers], np.int64)
