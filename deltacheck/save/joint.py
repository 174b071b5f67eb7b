"""A save that several ranks do together: each writes its tiles like a save of its own, and rank 0
commits one step for all.

At the beginning, on the training thread, the ranks agree on what is saved and who writes which
tile; that takes one exchange of a few bytes where nothing has changed since the save before. At the
end, behind the training, each rank reports what is durable of its part, which is also the barrier:
the step exists only after every rank's report, and every rank learns of it, or of the first
failure, before its own save is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from deltacheck.errors import RankFailed
from deltacheck.leaf import sharding, tree
from deltacheck.leaf.sharding import Before, Held, Holdings, Plan, Share
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.structs import known
from deltacheck.leaf.tiles import Cuts
from deltacheck.leaf.tree import Node
from deltacheck.save.channel import Ranks, consult
from deltacheck.store.documents import Written
from deltacheck.store.manifest import TILES, LeafRecord, Manifest, SegmentRef, Tiles

_DIGITS = 32


class Hello(msgspec.Struct, frozen=True):
    """What a rank says when a save begins. ``known``: it holds what it held at the save before.
    ``tree``: digest of its tree. ``busy``: it would rather skip this save.
    """

    step: int
    seq: int
    known: bool
    tree: str
    busy: bool


class Go(msgspec.Struct, frozen=True):
    """What rank 0 answers: the number of the checkpoint, which none of them has used, and what the
    save still needs to be told.
    """

    seq: int
    skip: bool
    holdings: bool
    trees: bool


class Told(msgspec.Struct, frozen=True):
    """What a rank then tells. ``copies``: digests of leaves of which every rank that has them has
    all.
    """

    holdings: Holdings | None
    tree: dict[str, Any] | None
    copies: dict[str, str] = {}


class Assigned(msgspec.Struct, frozen=True):
    """What rank 0 makes of that for one rank."""

    share: Share | None
    tree: dict[str, Any] | None


class Report(msgspec.Struct, frozen=True):
    """What a rank has made durable. ``segments``: those that its tiles need. ``digests``: of its
    tiles in the order of the plan, 32 digits each.
    """

    step: int
    segments: tuple[SegmentRef, ...]
    digests: str


known(Hello, Go, Told, Assigned, Report)


class Begun(NamedTuple):
    """A save that the ranks have agreed on. ``tiles``: what this rank writes: leaf path -> cuts
    (``None``: whole), numbers of its tiles. ``tree``: of all ranks. ``seq``: of the checkpoint.
    """

    seq: int
    tiles: Mapping[str, tuple[Cuts | None, list[int]]]
    tree: Node


@dataclass(slots=True)
class _Known:
    """What the last exchange of holdings gave. ``plan``: on rank 0 only."""

    holdings: Holdings
    tiles: Mapping[str, tuple[Cuts | None, list[int]]]
    plan: Plan | None


class Attempt:
    """A save that the ranks have begun: exactly one of its methods tells them how it ended here."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._lock = threading.Lock()
        self._told = False

    def commit(self, make: Callable[[Manifest], Written], manifest: Manifest) -> Written:
        """``Joint.commit``."""
        self._tell()
        return self._joint.commit(manifest, make)

    def abandon(self, error: BaseException) -> None:
        """This rank's part has failed: no step will exist. Waits for the other ranks; once the end
        was told does nothing.
        """
        if self._tell():
            with contextlib.suppress(RankFailed):  # what all ranks are told
                consult(self._joint.ranks.end, error, lambda reports: [])

    def _tell(self) -> bool:
        with self._lock:
            first, self._told = not self._told, True
            return first


class Joint:
    """The saves of one root by several ranks, on one of them. Every rank calls the same methods in
    the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._planned: Plan | None = None
        self._known: _Known | None = None
        self._before: dict[str, Before] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self.ranks.rank == 0

    def begin(
        self,
        step: int,
        seq: int,
        held: Mapping[str, Held],
        skeleton: Node,
        busy: bool,
        copies: Callable[[], dict[str, str]] = dict,
    ) -> Begun | None:
        """Agree on a save: ``None`` where one of the ranks is busy, and all skip it.

        ``held``: what this rank holds of each leaf; ``skeleton``: of its tree, whose leaves may be
        other ones than those of other ranks. ``copies``: digests of leaves that must be the same on
        every rank that has them, asked for where the ranks plan anew. Raises ``RankFailed`` on
        every rank, naming the rank and the cause, where they disagree.
        """
        holdings = Holdings.of(held)
        known = self._known is not None and self._known.holdings == holdings
        digest = str(xxhash.xxh3_128_hexdigest(msgspec.json.encode(skeleton)))
        hello = Hello(step, seq, known, digest, busy)
        go = decoded(consult(self.ranks.begin, encoded(hello), _agree), Go)
        if go.skip:
            return None
        merged = skeleton
        if go.holdings or go.trees:
            told = Told(holdings, None, copies()) if go.holdings else Told(None, None)
            told = msgspec.structs.replace(told, tree=skeleton if go.trees else None)
            answer: Assigned = decoded(
                consult(self.ranks.begin, encoded(told), self._plan), Assigned
            )
            if answer.share is not None:
                self._known = _Known(holdings, answer.share.tiles(), self._planned)
            merged = answer.tree or skeleton
        assert self._known is not None
        return Begun(go.seq, self._known.tiles, merged)

    def fail(self, error: BaseException) -> None:
        """Let all ranks know that this one cannot begin; raises ``RankFailed`` as they do."""
        consult(self.ranks.begin, error, _agree)

    def agree(self, said: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 makes of what every rank says, on every rank. Plain values. Raises
        ``RankFailed``.
        """

        def answer(every: list[bytes]) -> Sequence[bytes]:
            return [encoded(decide([decoded(one, Any) for one in every]))] * len(every)

        return decoded(
            consult(
                self.ranks.begin, said if isinstance(said, BaseException) else encoded(said), answer
            ),
            Any,
        )

    def resume(self, manifest: Manifest, held: Mapping[str, Held] | None) -> list[str]:
        """Go on from a step that all ranks have restored: later saves keep its cuts where they fit.
        ``held``: as of the next save, where that is known. Returns what of the step's stored leaves
        and tiles this rank will write.
        """
        self._known = None
        self._before = {path: Before(None) for path in manifest.leaves}
        self._before |= {path: Before(cut.cuts) for path, cut in manifest.tiles.items()}
        if held is None:
            return []
        holdings = Holdings.of(held)
        told = Told(holdings, None)
        answer: Assigned = decoded(consult(self.ranks.begin, encoded(told), self._plan), Assigned)
        assert answer.share is not None
        self._known = _Known(holdings, answer.share.tiles(), self._planned)
        names = [
            name
            for path, (cuts, of) in self._known.tiles.items()
            for name in sharding.names_of(path, cuts, of)
        ]
        return [name for name in names if name in manifest.stored]

    def commit(self, manifest: Manifest, make: Callable[[Manifest], Written]) -> Written:
        """Report this rank's part, ``manifest`` (its tiles as leaves), and wait for the step of
        all.

        ``make(manifest of all)``, on rank 0: makes the step exist. Raises ``RankFailed``
        where any rank's part is missing: no step exists then.
        """
        known = self._known
        assert known is not None
        names = [
            name
            for path, (cuts, numbers) in known.tiles.items()
            for name in sharding.names_of(path, cuts, numbers)
        ]
        report = Report(
            manifest.step,
            manifest.segments,
            "".join(manifest.leaves[name].digest for name in names),
        )

        def decide(reports: list[bytes]) -> Sequence[bytes]:
            assert known.plan is not None
            made = make(merged(manifest, known.plan, [decoded(one, Report) for one in reports]))
            return [
                encoded((made.stored_bytes if rank == 0 else 0, made.digest))
                for rank in range(len(reports))
            ]

        return Written(*decoded(consult(self.ranks.end, encoded(report), decide), tuple[int, str]))

    def _plan(self, told: list[bytes]) -> Sequence[bytes]:
        """On rank 0."""
        every = [decoded(one, Told) for one in told]
        holdings = [one.holdings for one in every if one.holdings is not None]
        trees = [one.tree for one in every if one.tree is not None]
        shares: Sequence[Share | None] = [None] * len(every)
        if holdings:
            before = self._before
            if self._known is not None and self._known.plan is not None:
                before = {
                    path: Before(one.cuts, one.owners) for path, one in self._known.plan.items()
                }
            self._planned = sharding.plan(holdings, before)
            _check_copies([one.copies for one in every])
            shares = sharding.shares(self._planned, len(every))
        one_tree = tree.merged(trees) if trees else None
        # Only rank 0 writes it.
        return [
            encoded(Assigned(share, one_tree if rank == 0 else None))
            for rank, share in enumerate(shares)
        ]


def _agree(hellos: list[bytes]) -> Sequence[bytes]:
    """On rank 0: what a save needs to be told."""
    every = [decoded(one, Hello) for one in hellos]
    first = every[0]
    for rank, one in enumerate(every):
        if one.step != first.step:
            raise RankFailed(
                f"rank {rank} saves step {one.step}, rank 0 step {first.step}: every rank has to"
                " make the same calls"
            )
    seq = max(one.seq for one in every)
    go = Go(
        seq,
        any(one.busy for one in every),
        not all(one.known for one in every),
        any(one.tree != first.tree for one in every),
    )
    return [encoded(go)] * len(every)


def _check_copies(every: Sequence[Mapping[str, str]]) -> None:
    known: dict[str, tuple[int, str]] = {}
    for rank, copies in enumerate(every):
        for path, digest in copies.items():
            first, expected = known.setdefault(path, (rank, digest))
            if digest != expected:
                raise RankFailed(
                    f"the copies of leaf {path!r} on rank {first} and on rank {rank} differ:"
                    f" {expected} and {digest}. One of them would be lost; save what each rank has"
                    " for itself under a key of its own, such as f'rank {rank}'"
                )


def merged(mine: Manifest, planned: Plan, reports: Sequence[Report]) -> Manifest:
    """The manifest of all ranks. ``mine``: rank 0's own, which has the tree of all. Raises
    ``RankFailed`` where a report is not of this step.
    """
    for rank, report in enumerate(reports):
        if report.step != mine.step:
            raise RankFailed(f"rank {rank} reports step {report.step}, rank 0 step {mine.step}")
    owners = sharding.owners_of(planned)
    digests = np.zeros(owners.size, f"S{_DIGITS}")
    order = np.argsort(owners, kind="stable")
    edges = np.searchsorted(owners[order], np.arange(len(reports) + 1))
    for rank, report in enumerate(reports):
        own = order[edges[rank] : edges[rank + 1]]
        if len(report.digests) != _DIGITS * own.size:
            raise RankFailed(
                f"rank {rank} reports {len(report.digests) // _DIGITS} tiles, the plan gives it"
                f" {own.size}"
            )
        digests[own] = np.frombuffer(report.digests.encode("ascii"), f"S{_DIGITS}")
    refs = {ref.id: ref for report in reports for ref in report.segments}
    number = {name: at for at, name in enumerate(sorted(refs))}
    leaves, cut, at = {}, {}, 0
    for path, one in planned.items():
        of = digests[at : at + one.owners.size].tobytes().decode("ascii")
        at += one.owners.size
        if one.cuts is None:
            spec = LeafSpec.of(path, one.shape, one.dtype)
            leaves[path] = LeafRecord(spec.dtype, spec.shape, spec.chunk, of, int(one.owners[0]))
        else:
            cut[path] = Tiles(one.dtype, one.cuts, of, tuple(one.owners.tolist()))
    found: Manifest = msgspec.structs.replace(
        mine,
        segments=tuple(refs[name] for name in number),
        leaves=leaves,
        tiles=cut,
        lanes=tuple(tuple(sorted(number[ref.id] for ref in report.segments)) for report in reports),
        must_understand=(TILES,),
    )
    return found


def encoded(value: object) -> bytes:
    """A message of this protocol, as the ranks send it."""
    return msgspec.msgpack.encode(value)


def decoded(content: bytes, kind: Any) -> Any:
    """What ``encoded`` wrote, checked against ``kind``.

    Raises:
        msgspec.DecodeError: it is nothing of this kind.
    """
    return msgspec.msgpack.decode(content, type=kind)
