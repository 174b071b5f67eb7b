"""Carry out a save of several ranks: each writes its tiles, and rank 0 commits one step for all.

At the beginning, on the training thread, the ranks agree on what is saved and who writes which
tile. That takes one exchange of a few bytes if nothing has changed since the last save. At the end,
behind the training, each rank reports which part of the step it has made durable. That exchange is
also the barrier: the step exists only after every rank's report, and every rank learns of it, or of
the first failure, before its own save is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacheck.codec.derivation import Derived
from deltacheck.errors import RankFailed
from deltacheck.leaf import sharding, tree
from deltacheck.leaf.contracts import weakest_of
from deltacheck.leaf.sharding import I64, Before, Copies, HeldShards, Holdings, Plan, Share
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.structs import inspect_types
from deltacheck.leaf.tiles import Cuts
from deltacheck.leaf.tree import Node
from deltacheck.save.ranks.channel import Ranks, consult
from deltacheck.save.ranks.replicas import require_equal_copies
from deltacheck.save.ranks.rules import (
    RankRules,
    content_digests,
    promises_of_leaves,
    rules_of_tiles,
    stored_digest,
)
from deltacheck.save.treatment.signals import Agreed, HeldState, Signals, combined
from deltacheck.store import compact, layout
from deltacheck.store.documents import Written
from deltacheck.store.lock.interrupts import Lock
from deltacheck.store.manifest import LeafRecord, Manifest, SegmentRef, Tiles
from deltacheck.store.roots.store import Store

# Hexadecimal digits of a tile's digest.
_DIGITS = 32

# The tiles that a rank writes: leaf path -> the leaf's cuts (``None``: it is whole), tile numbers.
RankTiles = Mapping[str, tuple[Cuts | None, list[int]]]


class SaveProposal(msgspec.Struct, frozen=True):
    """The first message of every rank when a save begins.

    Args:
        step: The training step.
        seq: The lowest sequence number that the rank can use.
        known: The rank holds what it held at the last save.
        tree: Digest of its tree.
        busy: It would rather skip this save.
        signals: What it has seen of the run, if the policy needs that.
    """

    step: int
    seq: int
    known: bool
    tree: str
    busy: bool
    signals: Signals | None = None


class Agreement(msgspec.Struct, frozen=True):
    """The answer of rank 0 to the proposals.

    Args:
        seq: The number of the checkpoint; no rank has used it.
        skip: Some rank is busy, and all skip the save.
        holdings: Rank 0 needs what every rank holds.
        trees: Rank 0 needs the tree of every rank.
        signals: The signals of all ranks.
    """

    seq: int
    skip: bool
    holdings: bool
    trees: bool
    signals: Signals | None = None


class Contribution(msgspec.Struct, frozen=True):
    """The second message of a rank, with what rank 0 has asked for.

    Args:
        holdings: What the rank holds of each leaf.
        tree: Its tree.
    """

    holdings: Holdings | None
    tree: dict[str, Any] | None


class Assignment(msgspec.Struct, frozen=True):
    """The answer of rank 0 to one rank's contribution.

    Args:
        share: The tiles that the rank writes.
        tree: The tree of all ranks, for rank 0 only.
    """

    share: Share | None
    tree: dict[str, Any] | None


class Report(msgspec.Struct, frozen=True):
    """The message of a rank when its part of a step is durable.

    Args:
        step: The training step.
        segments: The segments that its tiles need.
        digests: Digests of its tiles in the order of the plan, 32 digits each.
        copies: Digests of tiles that it holds and another rank writes (``copies.digests_of``).
        rules: The rules and the promises of its tiles that are not simply stored.
        merge_segments: Segments of compactions under way, which no step has yet.
        compactions: The numbers of these and of compactions that begin after this step.
        merged_bytes: Bytes of compactions that no step has stated.
    """

    step: int
    segments: tuple[SegmentRef, ...]
    digests: str
    copies: bytes = b""
    rules: RankRules = RankRules()
    merge_segments: tuple[str, ...] = ()
    compactions: tuple[int, ...] = ()
    merged_bytes: int = 0

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        tiles: RankTiles,
        copies: bytes,
        contents: Mapping[str, str],
        compactions: tuple[Iterable[str], Iterable[int]],
    ) -> Report:
        """Return the report of a rank.

        Args:
            manifest: The rank's part, its tiles as leaves.
            tiles: These tiles.
            copies: As the attribute.
            contents: The digests of leaves and tiles that are not simply stored, as they were read,
                by stored path.
            compactions: The segments and the numbers of its compactions that no step has yet.
        """
        segments, numbers = compactions
        return cls(
            manifest.step,
            manifest.segments,
            "".join(stored_digest(manifest, name) for name in stored_names(tiles)),
            copies,
            RankRules.of(manifest, contents),
            tuple(segments),
            tuple(numbers),
            manifest.merged_bytes,
        )


inspect_types(SaveProposal, Agreement, Contribution, Assignment, Report)


class Merges(NamedTuple):
    """The compactions of all ranks that no step has yet, for the rank that collects segments.

    Args:
        segments: The segments that they have written or read.
        numbers: Their numbers. The name of a segment that is about to be written is not known yet.
    """

    segments: frozenset[str] = frozenset()
    numbers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Merges:
        """Return the compactions that the ranks have reported with a save."""
        reports = tuple(reports)
        return cls(
            frozenset(name for report in reports for name in report.merge_segments),
            frozenset(seq for report in reports for seq in report.compactions),
        )

    def protected(self, store: Store) -> frozenset[str]:
        """Return the segments of ``store`` that a collection must spare for them."""
        names = store.segment_ids() if self.numbers else ()
        return self.segments.union(name for name in names if layout.seq_of(name) in self.numbers)


class AgreedSave(NamedTuple):
    """A save that the ranks have agreed on.

    Args:
        seq: The number of the checkpoint.
        tiles: The tiles that this rank writes.
        tree: The tree of all ranks.
        copies: The tiles that it holds and another rank writes.
        signals: The signals of all ranks.
    """

    seq: int
    tiles: RankTiles
    tree: Node
    copies: RankTiles
    signals: Signals | None = None


@dataclass(slots=True)
class _Exchange:
    """The result of the last exchange of holdings.

    Args:
        holdings: What this rank held then.
        tiles: The tiles that this rank writes.
        copies: The tiles that it holds and another rank writes.
        plan: The tiles of all ranks, on rank 0 only.
        copies_of_all: The copies of all ranks, on rank 0 only.
    """

    holdings: Holdings
    tiles: RankTiles
    copies: RankTiles
    plan: Plan | None
    copies_of_all: Copies | None


class Attempt:
    """A save that the ranks have begun. Exactly one of its methods reports its end on this rank.

    Attributes:
        save: The tiles that the ranks have agreed on.
        agreed: The agreement as the saver takes it. Its digests are complete when ``commit`` is
            called.
        copies: The digests of the copies that this rank holds of what other ranks write.

    Args:
        joint: The ranks.
        save: The tiles.
        held: The state of which this rank holds a part; ``None`` under a policy that is exact.
    """

    def __init__(self, joint: Joint, save: AgreedSave, held: HeldState | None = None) -> None:
        self.save = save
        self.agreed = Agreed(held, save.signals, cuts_of(save.tiles), self.abandon)
        self.copies = b""
        self._joint = joint
        self._lock = Lock()
        self._is_reported = False

    def commit(self, make: Callable[[Manifest], Written], manifest: Manifest) -> Written:
        """Report this rank's part, and wait for the step of all, as ``Joint.report``."""
        self._claim_report()
        return self._joint.report(manifest, make, self.copies, self.agreed.digests)

    def abandon(self, error: BaseException) -> None:
        """Report that this rank's part has failed: no step will exist.

        This waits for the other ranks. It does nothing if the end was reported before.
        """
        if self._claim_report():
            # Every rank gets the error as its own; here it is known already.
            with contextlib.suppress(RankFailed):
                consult(self._joint.ranks.end, error, lambda reports: [])

    def _claim_report(self) -> bool:
        """Return true for the first caller only: a second report would answer another save."""
        with self._lock:
            is_first, self._is_reported = not self._is_reported, True
            return is_first


class Joint:
    """The saves of one root by several ranks, seen from one of them.

    Every rank must call the same methods in the same order.

    Attributes:
        groups: Return the leaves that one rank should treat together, from the specs of all leaves
            and the tree. ``None``: there are none.
        compactions: Return the segments and the numbers of this rank's compactions that no step has
            yet. ``None``: there are none.
        merges: The compactions of all ranks, on rank 0.

    Args:
        ranks: The channels between the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups: Callable[[Mapping[str, LeafSpec], Node], list[list[str]]] | None = None
        self.compactions: Callable[[], tuple[Iterable[str], Iterable[int]]] | None = None
        self.merges = Merges()
        self._tree: Node = {}
        self._plan: Plan | None = None
        self._copies: Copies | None = None
        self._exchange: _Exchange | None = None
        # The cuts of the last restored step. A tile that keeps its cell keeps its chain.
        self._before: dict[str, Before] = {}

    @property
    def is_first(self) -> bool:
        """True on rank 0, which commits."""
        return self.ranks.rank == 0

    def begin(
        self,
        step: int,
        seq: int,
        held: Mapping[str, HeldShards],
        skeleton: Node,
        busy: bool,
        signals: Signals | None = None,
    ) -> AgreedSave | None:
        """Agree on a save.

        Args:
            step: The training step.
            seq: The lowest sequence number that this rank can use.
            held: What this rank holds of each leaf.
            skeleton: The structure of its tree. Other ranks may have other leaves.
            busy: True: this rank would rather skip the save.
            signals: What this rank has seen of the run, if the policy needs that.

        Returns:
            The save; ``None`` if a rank is busy and all skip it.

        Raises:
            RankFailed: The ranks disagree. It is raised on every rank, and names a rank and the
                cause.
        """
        self._tree = skeleton
        # In the common case nothing has changed, and only the digest of the tree is sent.
        holdings = Holdings.of(held)
        is_known = self._exchange is not None and self._exchange.holdings == holdings
        digest = str(xxhash.xxh3_128_hexdigest(msgspec.json.encode(skeleton)))
        proposal = SaveProposal(step, seq, is_known, digest, busy, signals)
        agreement = decoded(
            consult(self.ranks.begin, encoded(proposal), _agree, "saves"), Agreement
        )
        # All skip or none, since a step needs the parts of every rank.
        if agreement.skip:
            return None
        tree_of_all = skeleton
        if agreement.holdings or agreement.trees:
            contribution = Contribution(
                holdings if agreement.holdings else None,
                skeleton if agreement.trees else None,
            )
            assignment = self._contribute(contribution)
            if assignment.share is not None:
                self._exchange = self._exchanged(holdings, assignment.share)
            # Only the manifest of rank 0 is written, so its tree alone must be that of all ranks.
            tree_of_all = assignment.tree or skeleton
        # If no holdings were asked for, every rank still has the exchange of an earlier save.
        assert self._exchange is not None
        exchange = self._exchange
        return AgreedSave(
            agreement.seq, exchange.tiles, tree_of_all, exchange.copies, agreement.signals
        )

    def fail(self, error: BaseException) -> None:
        """Report that this rank cannot begin; raise ``RankFailed``, as the other ranks do."""
        consult(self.ranks.begin, error, _agree)

    def agree(self, value: Any, decide: Callable[[list[Any]], Any], call: str) -> Any:
        """Let rank 0 decide on the values of all ranks, and return its decision on every rank.

        Args:
            value: This rank's plain value, or an exception if it has failed.
            decide: Return the decision, from the values in the order of ranks.
            call: The action of this rank, such as "restores". All ranks must do the same.

        Raises:
            RankFailed: A rank has failed or is lost.
        """

        def answer(messages: list[bytes]) -> Sequence[bytes]:
            decision = decide([decoded(message, Any) for message in messages])
            return [encoded(decision)] * len(messages)

        payload = value if isinstance(value, BaseException) else encoded(value)
        return decoded(consult(self.ranks.begin, payload, answer, call), Any)

    def resume(self, manifest: Manifest, held: Mapping[str, HeldShards] | None) -> list[str]:
        """Go on from a step that all ranks have restored; later saves keep its cuts if they fit.

        Args:
            manifest: The manifest of the step.
            held: What this rank will hold at the next save, if that is known.

        Returns:
            The stored leaves and tiles of the step that this rank will write.
        """
        self._tree = manifest.tree
        # The last exchange belongs to the save before, which may have been cut in other ways.
        self._exchange = None
        self._before = {path: Before(None) for path in manifest.leaves}
        self._before |= {path: Before(tiles.cuts) for path, tiles in manifest.tiles.items()}
        if held is None:
            return []
        holdings = Holdings.of(held)
        assignment = self._contribute(Contribution(holdings, None))
        assert assignment.share is not None
        self._exchange = self._exchanged(holdings, assignment.share)
        return [name for name in stored_names(self._exchange.tiles) if name in manifest.stored]

    def _exchanged(self, holdings: Holdings, share: Share) -> _Exchange:
        return _Exchange(holdings, share.tiles(), share.copied_tiles(), self._plan, self._copies)

    def report(
        self,
        manifest: Manifest,
        make: Callable[[Manifest], Written],
        copies: bytes = b"",
        contents: Mapping[str, str] | None = None,
    ) -> Written:
        """Report this rank's part, and wait for the step of all ranks.

        Args:
            manifest: This rank's part, its tiles as leaves.
            make: Make the step exist, on rank 0, from the manifest of all ranks.
            copies: The digests of tiles that this rank holds and another one writes.
            contents: As ``Report.of`` takes them.

        Raises:
            RankFailed: The part of some rank is missing, or copies differ, and no step exists.
        """
        exchange = self._exchange
        assert exchange is not None
        compactions = ((), ()) if self.compactions is None else self.compactions()
        report = Report.of(manifest, exchange.tiles, copies, contents or {}, compactions)

        def decide(messages: list[bytes]) -> Sequence[bytes]:
            assert exchange.plan is not None
            # Rank 0 gets here once every rank has reported: no step may exist before all of its
            # parts are durable.
            reports = [decoded(message, Report) for message in messages]
            # Before the commit, which may collect segments.
            self.merges = Merges.of(reports)
            result = make(merged(manifest, exchange.plan, reports, exchange.copies_of_all))
            # The bytes are counted once, in the report of rank 0.
            return [
                encoded((result.stored_bytes if rank == 0 else 0, result.digest))
                for rank in range(len(messages))
            ]

        return Written(
            *decoded(
                consult(self.ranks.end, encoded(report), decide, "ends a save"), tuple[int, str]
            )
        )

    def _contribute(self, contribution: Contribution) -> Assignment:
        answer = consult(self.ranks.begin, encoded(contribution), self._assign, "plans")
        assignment: Assignment = decoded(answer, Assignment)
        return assignment

    def _assign(self, messages: list[bytes]) -> Sequence[bytes]:
        """Plan the save on rank 0, and return every rank's assignment."""
        contributions = [decoded(message, Contribution) for message in messages]
        holdings = [c.holdings for c in contributions if c.holdings is not None]
        trees = [c.tree for c in contributions if c.tree is not None]
        tree_of_all = tree.merged(trees) if trees else None
        shares: Sequence[Share | None] = [None] * len(contributions)
        if holdings:
            before = self._before
            if self._exchange is not None and self._exchange.plan is not None:
                before = {
                    path: Before(leaf_plan.cuts, leaf_plan.owners)
                    for path, leaf_plan in self._exchange.plan.items()
                }
            # Without trees, that of rank 0 is the tree of all.
            groups = (
                []
                if self.groups is None
                else self.groups(sharding.specs(holdings), tree_of_all or self._tree)
            )
            self._plan = sharding.plan(holdings, before, groups)
            self._copies = sharding.copies(self._plan, holdings)
            shares = sharding.shares(self._plan, len(contributions), self._copies)
        # Only rank 0 writes the tree, so the others need not receive it.
        return [
            encoded(Assignment(share, tree_of_all if rank == 0 else None))
            for rank, share in enumerate(shares)
        ]


def _agree(messages: list[bytes]) -> Sequence[bytes]:
    """Return the agreement on the proposals of all ranks, on rank 0."""
    proposals = [decoded(message, SaveProposal) for message in messages]
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.step != first.step:
            raise RankFailed(
                f"rank {rank} saves step {proposal.step}, rank 0 step {first.step}: every rank has"
                " to make the same calls"
            )
    agreement = Agreement(
        # The highest, because a number must be unused on every rank.
        max(proposal.seq for proposal in proposals),
        any(proposal.busy for proposal in proposals),
        not all(proposal.known for proposal in proposals),
        any(proposal.tree != first.tree for proposal in proposals),
        # The policy is the same on every rank, so all of them have signals or none.
        combined([proposal.signals for proposal in proposals if proposal.signals is not None])
        if first.signals is not None
        else None,
    )
    return [encoded(agreement)] * len(proposals)


def merged(
    manifest: Manifest, plan: Plan, reports: Sequence[Report], copies: Copies | None = None
) -> Manifest:
    """Return the manifest of all ranks.

    Args:
        manifest: The manifest of rank 0, with the tree of all ranks.
        plan: The tiles of all ranks.
        reports: The reports in the order of ranks.
        copies: The tiles that ranks hold while others write them; ``None``: none are compared.

    Raises:
        RankFailed: A report is of another step, or of other tiles than the plan, or a copy differs
            from what was written.
    """
    reported = _Reported.of(plan, reports)
    reported.require_planned(manifest.step)
    rules = [report.rules for report in reports]
    if copies is not None and copies.ranks.size:
        contents = content_digests(reported.digests(), plan, rules)
        by_rank = [report.copies for report in reports]
        require_equal_copies(manifest.step, plan, copies, by_rank, contents)
    refs = {ref.id: ref for report in reports for ref in report.segments}
    # Segments of a manifest ascend by name (docs/reference/format.md, section 3), and lanes refer
    # to their positions.
    segment_numbers = {name: number for number, name in enumerate(sorted(refs))}
    leaves, tiles, derived = _leaves_of_plan(plan, rules, manifest.step)
    is_left = _left_to_tables(plan, tiles)
    _add_digests(leaves, tiles, plan, reported.digests(is_left), is_left)
    contracts = promises_of_leaves(rules, manifest.step)
    manifest_of_all: Manifest = msgspec.structs.replace(
        manifest,
        segments=tuple(refs[name] for name in segment_numbers),
        leaves=leaves,
        tiles=tiles,
        lanes=tuple(
            tuple(sorted(segment_numbers[ref.id] for ref in report.segments)) for report in reports
        ),
        derived=derived,
        contracts=contracts,
        merged_bytes=sum(report.merged_bytes for report in reports),
        contract=weakest_of(contracts.values()),
        # Ranks of a pipeline may have other groups each; those that they share have one course.
        rates={group: rate for of_rank in rules for group, rate in of_rank.rates.items()},
        lane_digests=reported.lane_digests(is_left) if is_left.any() else (),
    )
    # A reader that does not know tiles would find leaves missing, so it must refuse the step.
    features = manifest_of_all.features
    return msgspec.structs.replace(manifest_of_all, must_understand=features)


@dataclass(frozen=True, slots=True)
class _Reported:
    """The tiles of all ranks with what the ranks have reported of them.

    Args:
        owners: The writers of all tiles.
        reports: The reports in the order of ranks.
        numbers: The tiles of each rank.
    """

    owners: I64
    reports: Sequence[Report]
    numbers: Sequence[I64]

    @classmethod
    def of(cls, plan: Plan, reports: Sequence[Report]) -> _Reported:
        """Return the tiles of a plan."""
        owners = sharding.owners_of(plan)
        return cls(owners, reports, sharding.by_rank(owners, len(reports)))

    def require_planned(self, step: int) -> None:
        """Raise ``RankFailed`` unless the reports are of a step, and of the tiles of the plan."""
        for rank, report in enumerate(self.reports):
            if report.step != step:
                raise RankFailed(f"rank {rank} reports step {report.step}, rank 0 step {step}")
        for rank, (report, numbers) in enumerate(zip(self.reports, self.numbers, strict=True)):
            # A report names no tiles: its digests are in the order of the plan, so their number
            # must match.
            if len(report.digests) != _DIGITS * numbers.size:
                raise RankFailed(
                    f"rank {rank} reports {len(report.digests) // _DIGITS} tiles, the plan gives it"
                    f" {numbers.size}"
                )

    def digests(self, is_left: NDArray[np.bool_] | None = None) -> NDArray[np.bytes_]:
        """Return the digests of all tiles, ``S32 (tiles,)``; zeros for those left out.

        Args:
            is_left: The tiles to leave out; ``None``: none.
        """
        # Vectorized: a model on thousands of ranks has millions of tiles.
        digests = np.zeros(self.owners.size, f"S{_DIGITS}")
        for report, numbers in zip(self.reports, self.numbers, strict=True):
            is_needed = slice(None) if is_left is None else ~is_left[numbers]
            reported = np.frombuffer(report.digests.encode("ascii"), f"S{_DIGITS}")
            digests[numbers[is_needed]] = reported[is_needed]
        return digests

    def lane_digests(self, is_left: NDArray[np.bool_]) -> tuple[str, ...]:
        """Return the digest of each rank's lane: of the tiles that the manifest leaves to tables.

        Args:
            is_left: These tiles.
        """
        return tuple(
            compact.lane_digest(_left_digests(report.digests, is_left[numbers]))
            for report, numbers in zip(self.reports, self.numbers, strict=True)
        )


def _left_to_tables(plan: Plan, tiles: Mapping[str, Tiles]) -> NDArray[np.bool_]:
    """Return true for each tile whose digest the tables of the segments have as well.

    These are all tiles of a leaf, or none. The manifest leaves such digests to the tables.
    """
    is_compact = compact.pays(tiles)
    leaves_left = [is_compact and path in tiles and all(tiles[path].codes) for path in plan]
    sizes = [leaf_plan.owners.size for leaf_plan in plan.values()]
    return np.repeat(np.array(leaves_left, bool), np.array(sizes, np.int64))


def _add_digests(
    leaves: dict[str, LeafRecord],
    tiles: dict[str, Tiles],
    plan: Plan,
    digests: NDArray[np.bytes_],
    is_left: NDArray[np.bool_],
) -> None:
    """Give the leaves of a plan, whole or in tiles, their digests but for those left out."""
    first = 0
    for path, leaf_plan in plan.items():
        start, first = first, first + leaf_plan.owners.size
        if is_left[start:first].any():
            continue
        text = digests[start:first].tobytes().decode("ascii")
        if path in leaves:
            leaves[path] = msgspec.structs.replace(leaves[path], digest=text)
        elif path in tiles:
            tiles[path] = msgspec.structs.replace(tiles[path], digests=text)


def _leaves_of_plan(
    plan: Plan, rules: Sequence[RankRules], step: int
) -> tuple[dict[str, LeafRecord], dict[str, Tiles], dict[str, Derived]]:
    """Return what is stored of whole leaves, the leaves in tiles, and the rules of whole leaves.

    The first two have no digests.
    """
    whole_leaves: dict[str, LeafRecord] = {}
    tiles: dict[str, Tiles] = {}
    derived: dict[str, Derived] = {}
    # Many leaves have the same owners, and share one object.
    owners_by_bytes: dict[bytes, tuple[int, ...]] = {}
    for path, leaf_plan in plan.items():
        if leaf_plan.cuts is None:
            owner = int(leaf_plan.owners[0])
            dtype = leaf_plan.dtype
            if path in rules[owner].derived:
                derived[path] = rules[owner].derived[path]
                dtype = rules[owner].codes.get(path, "")
            if dtype:
                spec = LeafSpec.of(path, leaf_plan.shape, dtype)
                whole_leaves[path] = LeafRecord(spec.dtype, spec.shape, spec.chunk, "", owner)
        else:
            key = leaf_plan.owners.tobytes()
            owners = owners_by_bytes.get(key)
            if owners is None:
                owners = owners_by_bytes[key] = tuple(leaf_plan.owners.tolist())
            tiled = Tiles(leaf_plan.dtype, leaf_plan.cuts, "", owners)
            tiles[path] = rules_of_tiles(tiled, path, owners, rules, step)
    return whole_leaves, tiles, derived


def _left_digests(digests: str, is_left: NDArray[np.bool_]) -> str:
    """Return those digests of a report that the manifest leaves to the tables."""
    if is_left.all():
        return digests
    reported = np.frombuffer(digests.encode("ascii"), f"S{_DIGITS}")
    return reported[is_left].tobytes().decode("ascii")


def stored_names(tiles: RankTiles) -> list[str]:
    """Return the names under which one rank's tiles are stored."""
    return [
        name
        for path, (cuts, numbers) in tiles.items()
        for name in sharding.names_of(path, cuts, numbers)
    ]


def cuts_of(tiles: RankTiles) -> dict[str, Cuts | None]:
    """Return the cuts of each leaf of which a rank writes tiles; ``None``: it is whole."""
    return {path: cuts for path, (cuts, _) in tiles.items()}


def encoded(value: object) -> bytes:
    """Return a message of this protocol, as the ranks send it."""
    return msgspec.msgpack.encode(value)


def decoded(content: bytes, kind: Any) -> Any:
    """Return the message that ``encoded`` wrote, checked against ``kind``.

    Raises:
        msgspec.DecodeError: The content is no message of this kind.
    """
    return msgspec.msgpack.decode(content, type=kind)
