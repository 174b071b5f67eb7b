"""The comparison of tiles that several ranks hold: one rank writes them, and copies must be equal.

Each rank computes the digests of its copies when a save begins, and sends them with the report that
ends the save. So the comparison needs no message of its own. Rank 0 compares them with the digests
of what was written, before the step exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import U8
from deltacheck.errors import RankFailed
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.sharding import Copies, Plan
from deltacheck.leaf.spec import LeafSpec

# Copies up to this size are compared at every save. Larger: more is found at once; smaller: saves
# return sooner.
COMPARED_BYTES = 1 << 20
# Each larger copy is compared at one of this number of saves. Larger: saves return sooner; smaller:
# a difference is found earlier.
LARGE_EVERY = 16
_DIGEST_BYTES = 16


class Copy(Protocol):
    """A tile that this rank holds and another one writes."""

    @property
    def spec(self) -> LeafSpec:
        """The tile."""

    def content(self) -> U8:
        """Return its bytes, 1-D in C order."""


def digests_of(copies: Iterable[Copy], seq: int) -> bytes:
    """Return the digests of the copies of this rank, 16 bytes each.

    The digest of a copy that is not compared at this save is zero.

    Args:
        copies: The copies in the order of the plan.
        seq: The number of the save, one more at each.
    """
    digests = []
    for number, copy in enumerate(copies):
        # Staggered, so that large copies do not all make the same save longer.
        is_due = copy.spec.raw_bytes <= COMPARED_BYTES or (number + seq) % LARGE_EVERY == 0
        digests.append(
            bytes.fromhex(digest_of(copy.spec, copy.content())) if is_due else bytes(_DIGEST_BYTES)
        )
    return b"".join(digests)


def require_equal_copies(
    step: int,
    plan: Plan,
    copies: Copies,
    digests_by_rank: Sequence[bytes],
    tile_digests: NDArray[np.bytes_],
) -> None:
    """Raise ``RankFailed`` if a copy of a tile differs from what its rank has written.

    Args:
        step: The training step.
        plan: The tiles of all ranks.
        copies: The copies of all ranks.
        digests_by_rank: The results of ``digests_of``; empty for a rank that compares nothing.
        tile_digests: The written digest of each tile, 32 digits, ``S32 (tiles,)``.
    """
    for rank, digests in enumerate(digests_by_rank):
        if not digests:
            continue
        numbers = copies.of(rank)
        if len(digests) != _DIGEST_BYTES * numbers.size:
            raise RankFailed(
                f"rank {rank} reports {len(digests) // _DIGEST_BYTES} copies, the plan gives it"
                f" {numbers.size}"
            )
        reported = np.frombuffer(digests, np.uint64).reshape(-1, 2)
        expected = np.frombuffer(
            bytes.fromhex(tile_digests[numbers].tobytes().decode("ascii")), np.uint64
        ).reshape(-1, 2)
        differing = np.flatnonzero((reported != expected).any(axis=1) & reported.any(axis=1))
        if differing.size:
            number = int(differing[0])
            path, part, owner = _place_of(plan, int(numbers[number]))
            digest = tile_digests[numbers[number]].decode("ascii")
            raise RankFailed(
                f"step {step}: the copies of leaf {path!r}{part} on rank {owner} and on rank {rank}"
                f" differ: their digests are {digest} and {reported[number].tobytes().hex()}. One"
                " of them would be lost. Make them equal, or save what each rank has for itself"
                " under a key of its own, such as f'rank {rank}'"
            )


def _place_of(plan: Plan, number: int) -> tuple[str, str, int]:
    """Return the leaf of a tile, its box as text (empty for a whole leaf), and its writer."""
    for path, leaf in plan.items():
        if number < leaf.owners.size:
            part = ""
            if leaf.cuts is not None:
                bounds = [f"{side.start}:{side.stop}" for side in tiles.box(leaf.cuts, number)]
                part = f" [{', '.join(bounds)}]"
            return path, part, int(leaf.owners[number])
        number -= leaf.owners.size
    raise IndexError(number)
