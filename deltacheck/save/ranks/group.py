"""Parts of a save with several ranks that are the same for every framework.

``Group`` is one rank's view of the ranks: how they agree, how a failure of one reaches all, and
which segments of the newest step rank 0 must protect. ``DensePart``, ``pieces_held`` and
``own_tiles`` relate the parts of leaves in this process to the tiles that it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from deltacheck.errors import RankFailed
from deltacheck.leaf import sharding, tiles
from deltacheck.leaf.sharding import HeldShards
from deltacheck.leaf.tiles import Box, Cuts
from deltacheck.leaf.tree import Flat, Node
from deltacheck.save.ranks.channel import Ranks
from deltacheck.save.ranks.folder_probe import Probe
from deltacheck.save.ranks.joint import Attempt, Joint, Merges
from deltacheck.save.ranks.rank_setup import (
    REMEDY,
    RankSetup,
    require_probe,
    require_same_options,
    require_visible,
)
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import HeldState
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import is_root_or_fresh
from deltacheck.store.roots.store import Store

_Taken = TypeVar("_Taken")
_Followed = TypeVar("_Followed")


class Group:
    """One rank of the ranks that save to one root.

    ``joint`` carries the agreements. ``segments`` are those of the newest step of all ranks, and
    ``roots`` the address of the root on each rank; only rank 0 has them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.joint = Joint(ranks)
        self.segments: frozenset[str] = frozenset()
        self.roots: list[str] = []

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

    @contextlib.contextmanager
    def same_setup(
        self, root: Place, setup: RankSetup, remedy: str = REMEDY
    ) -> Iterator[Callable[[], None]]:
        """Compare the options and the folders of all ranks, before anything is written.

        Args:
            root: The root of this rank, which need not exist.
            setup: The setup of this rank.
            remedy: Ends the message about a folder that differs.

        Returns:
            A context that gives a function. Rank 0 calls it in its next agreement, which shows that
            every rank has seen the probe, to remove it. The context removes it in any case.

        Raises:
            RankFailed: The ranks differ in an option or in the folder.
            NotACheckpointRoot: Rank 0 has found something else in the folder.
        """
        probes: list[Probe] = []

        def compare(setups: list[Any]) -> tuple[str, str]:
            ranks = [msgspec.convert(rank_setup, RankSetup) for rank_setup in setups]
            require_same_options({rank: of_rank.options for rank, of_rank in enumerate(ranks)})
            self.roots = [of_rank.root for of_rank in ranks]
            # The path may hold something else, in which no file must be put.
            is_root_or_fresh(root)
            probes.append(Probe(root))
            return probes[0].name, self.roots[0]

        def remove() -> None:
            for probe in probes:
                probe.remove()

        try:
            message = msgspec.to_builtins(setup)
            name, first_root = self.joint.agree(message, compare, "opens a root")
            with self.sharing_failure():
                require_probe(root, name, first_root, remedy)
            yield remove
        finally:
            remove()

    def open_together(
        self,
        root: Place,
        setup: RankSetup,
        take: Callable[[], _Taken],
        follow: Callable[[], _Followed],
        release: Callable[[_Taken], object],
        *,
        call: str = "opens a root",
        remedy: str = REMEDY,
    ) -> _Taken | _Followed:
        """Open a root on every rank, and on none if it fails on one.

        Nothing is left behind if a rank has other options or does not see the folder of rank 0.

        Args:
            root: The root of this rank, which need not exist.
            setup: The setup of this rank.
            take: Make the root unless it exists, and take the right to write to it; called on
                rank 0.
            follow: Open it on another rank, after rank 0: no rank may touch a root that rank 0
                cannot open.
            release: Give back what ``take`` has taken.
            call: Names the call in messages.
            remedy: Ends the message about a folder that differs.

        Raises:
            RankFailed: The ranks differ in an option or in the folder, or opening failed on a rank.
                That rank raises its own error itself.
        """
        taken: list[_Taken] = []
        try:
            with self.same_setup(root, setup, remedy) as remove_probe:

                def take_first() -> None:
                    # Before the root is made, which must be empty.
                    remove_probe()
                    taken.append(take())

                self.call_on_first(take_first, call)
            with self.sharing_failure():
                opened = taken[0] if taken else follow()
            # Every rank waits here, so that none saves to a root that another one could not open.
            self.call_on_first(lambda: None, call)
        except BaseException:
            for of_first in taken:
                release(of_first)
            raise
        return opened

    def begin_joint(
        self,
        saver: Saver,
        step: int,
        seq: int,
        holdings: Mapping[str, HeldShards],
        tree: Node,
        held: HeldState | None,
        *,
        busy: bool = False,
    ) -> Attempt | None:
        """Agree on a save.

        Args:
            saver: The saver of this rank.
            step: The training step.
            seq: The lowest sequence number that this rank can use.
            holdings: What this rank holds of each leaf.
            tree: The structure of its state.
            held: The state of which it holds a part; ``None`` under a policy that is exact.
            busy: True: this rank would rather skip the save.

        Returns:
            The save that has begun; ``None`` if a rank is busy and all skip it.

        Raises:
            RankFailed: A rank failed, or the ranks disagree.
        """
        with self.sharing_failure():
            signals = None if held is None else saver.signals(step, held)
        save = self.joint.begin(step, seq, holdings, tree, busy, signals)
        if save is None:
            return None
        # The ranks share one store, so none may use a lower number again.
        saver.number_from(save.seq)
        return Attempt(self.joint, save, held)

    def call_on_first(self, action: Callable[[], object], call: str = "tags or deletes") -> None:
        """Call ``action`` on rank 0 while every rank waits. ``call`` names it in messages.

        Raises:
            RankFailed: The action failed; every rank raises.
        """

        def act(_: list[Any]) -> None:
            action()

        self.joint.agree(None, act, call)

    def protected(self, store: Store) -> frozenset[str]:
        """Return the segments of other ranks that a collection must spare, on rank 0.

        These are the bases of their next saves, and their compactions under way.
        """
        return self.segments | self.joint.merges.protected(store)

    def forget_segments(self) -> None:
        """Protect nothing until the next step: every rank begins new chains."""
        self.segments, self.joint.merges = frozenset(), Merges()

    def maker(
        self, make: Callable[[Manifest], Written] | None, root: Place
    ) -> Callable[[Manifest], Written]:
        """Return ``make``, which commits a step, with what the step of several ranks needs beside.

        Before the commit, the new segments of other ranks are looked for in ``root``, the store of
        rank 0. After it, the segments of the step are recorded. Other ranks than 0 need no
        ``make``.
        """

        def make_all(merged: Manifest) -> Written:
            assert make is not None, "only rank 0 makes a step exist"
            require_visible(root, merged, self.roots, self.segments)
            document = make(merged)
            # Rank 0 collects, but has only its own chains. The next saves of the other ranks stand
            # on these segments.
            self.segments = frozenset(ref.id for ref in merged.segments)
            return document

        return make_all


class DensePart(NamedTuple):
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
    piece: DensePart | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.box)


def pieces_held(
    flat: Flat, pieces_of: Callable[[str], Iterable[DensePart]]
) -> dict[str, HeldShards]:
    """Return the boxes of each leaf that this process holds.

    Args:
        flat: The state.
        pieces_of: Returns the pieces of the leaf at a path.
    """
    return {
        path: HeldShards(leaf.dtype, leaf.shape, tuple(piece.box for piece in pieces_of(path)))
        for path, leaf in flat.leaves.items()
    }


def own_tiles(
    flat: Flat,
    own: Mapping[str, tuple[Cuts | None, list[int]]],
    pieces_of: Callable[[str], Iterable[DensePart]],
) -> Iterator[tuple[str, Tile]]:
    """Yield the leaf path and the tile for each tile that this rank writes.

    Args:
        flat: The state.
        own: Leaf path -> cuts (``None``: the leaf is stored whole) and numbers of this rank's
            tiles, as ``sharding.Share.tiles`` returns them.
        pieces_of: Returns the pieces of the leaf at a path.
    """
    for path, (cuts, numbers) in own.items():
        pieces: Sequence[DensePart] = list(pieces_of(path))
        boxes = (
            [tiles.whole(flat.leaves[path].shape)]
            if cuts is None
            else [tiles.box(cuts, number) for number in numbers]
        )
        for name, box in zip(sharding.names_of(path, cuts, numbers), boxes, strict=True):
            # The plan cuts leaves so that each tile lies whole in one piece of the rank that writes
            # it (docs/reference/format.md, section 3).
            number = sharding.find(box, (piece.box for piece in pieces))
            yield path, Tile(name, box, None if number is None else pieces[number])
