"""Parts of a save with several ranks that are the same for every framework.

``Group`` is one rank's view of the ranks: how they agree, how a failure of one reaches all, and
which segments of the newest step rank 0 must protect. ``Piece``, ``pieces_held`` and ``own_tiles``
relate the parts of leaves in this process to the tiles that it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deltacheck.errors import RankFailed
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.sharding import Held
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.leaf.tree import Flat
from deltacheck.save.channel import Ranks
from deltacheck.save.joint import Joint
from deltacheck.store.documents import Written
from deltacheck.store.manifest import Manifest


class Group:
    """One rank of the ranks that save to one root.

    ``joint`` carries the agreements. ``segments`` are those of the newest step of all ranks; only
    rank 0 has them, for the collection.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.joint = Joint(ranks)
        self.segments: frozenset[str] = frozenset()

    @contextlib.contextmanager
    def sharing_failure(self) -> Iterator[None]:
        """Report an error that this rank raises inside to all ranks, before they agree.

        Without this, the other ranks would wait for this one until their timeout.
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank to all ranks."""
        with contextlib.suppress(RankFailed):  # which the others raise
            self.joint.fail(error)

    def call_on_first(self, action: Callable[[], object]) -> None:
        """Call ``action`` on rank 0 while every rank waits.

        Raises:
            RankFailed: The action failed; every rank raises.
        """

        def act(_: list[Any]) -> None:
            action()

        self.joint.agree(None, act)

    def maker(self, make: Callable[[Manifest], Written]) -> Callable[[Manifest], Written]:
        """Return ``make``, which commits a step, extended by a record of the step's segments."""

        def make_all(merged: Manifest) -> Written:
            document = make(merged)
            # Rank 0 collects, but has only its own chains. The next saves of the other ranks stand
            # on these segments.
            self.segments = frozenset(ref.id for ref in merged.segments)
            return document

        return make_all


class Piece(NamedTuple):
    """A dense part of a leaf in this process.

    ``values`` has the shape of the box. It is an array of the framework, or a NumPy array or
    scalar, which is whole.
    """

    box: Box
    values: Any


class Tile(NamedTuple):
    """A tile that this rank writes.

    ``name`` is the path that the tile is stored under, ``piece`` the part that contains it.
    ``piece`` is ``None`` only if the leaf has no elements.
    """

    name: str
    box: Box
    piece: Piece | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.box)


def pieces_held(flat: Flat, pieces_of: Callable[[str], Iterable[Piece]]) -> dict[str, Held]:
    """Return the boxes of each leaf that this process holds.

    Args:
        flat: The state.
        pieces_of: Returns the pieces of the leaf at a path.
    """
    return {
        path: Held(leaf.dtype, leaf.shape, tuple(piece.box for piece in pieces_of(path)))
        for path, leaf in flat.leaves.items()
    }


def own_tiles(
    flat: Flat,
    own: Mapping[str, tuple[Cuts | None, list[int]]],
    pieces_of: Callable[[str], Iterable[Piece]],
) -> Iterator[tuple[str, Tile]]:
    """Yield the leaf path and the tile for each tile that this rank writes.

    Args:
        flat: The state.
        own: Leaf path -> cuts (``None``: the leaf is stored whole) and numbers of this rank's
            tiles, as ``sharding.Share.tiles`` returns them.
        pieces_of: Returns the pieces of the leaf at a path.
    """
    for path, (cuts, numbers) in own.items():
        pieces: Sequence[Piece] = list(pieces_of(path))
        boxes = (
            [sharding.whole(flat.leaves[path].shape)]
            if cuts is None
            else [tiles.box(cuts, number) for number in numbers]
        )
        for name, box in zip(sharding.names_of(path, cuts, numbers), boxes, strict=True):
            # The plan cuts leaves so that each tile lies whole in one piece of the rank that writes
            # it (docs/reference/format.md, section 3).
            number = sharding.find(box, (piece.box for piece in pieces))
            yield path, Tile(name, box, None if number is None else pieces[number])
