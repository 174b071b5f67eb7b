"""Collect the data of a report: what the steps of a root hold, changed, and cost."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltacheck.errors import DeltacheckError, StorageFailed
from deltacheck.leaf.contracts import Bounded, name_of
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.policy.causes import MERGED, REST
from deltacheck.policy.stage import stable_start
from deltacheck.profile.record import Profile
from deltacheck.report import history
from deltacheck.report.cause_sizes import CauseCounter
from deltacheck.report.groups import classes, groups
from deltacheck.report.history import ReportedLeaf, Step
from deltacheck.report.segment_cost import Cost, cost_of
from deltacheck.store import layout
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from deltacheck.store.segment import Segment

PROFILE = "profile.json"  # the default profile, in the root
# Rows of the heat map. Larger: finer, but harder to read.
MOST_GROUPS = 40
MOST_CLASSES = 12  # leaf classes of the contracts


@dataclass(frozen=True, slots=True)
class HeldLeaves:
    """The leaves of one class that a step holds under one kind of contract.

    Attributes:
        of: Name of the leaf class.
        contract: ``bounded`` or ``reused``.
        norm: One of ``deltacheck.leaf.contracts.NORMS``; for reused leaves ``octaves`` or
            ``steps``.
        leaves: Number of leaves.
        limit: Limit of the leaf that is nearest to its limit.
        measured: Measured error of that leaf.
        age_steps: Age of the oldest reused leaf in updates of the optimizer.
    """

    of: str
    contract: str
    norm: str
    leaves: int
    limit: float
    measured: float
    age_steps: int = 0

    @property
    def used(self) -> float:
        """The measured error divided by the limit."""
        return self.measured / self.limit if self.limit else float(self.measured > 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed checkpoint.

    If its segments are not whole, ``problem`` says why, and the fields that need them are 0 or
    empty.

    Attributes:
        step: Training step.
        seq: Sequence number.
        time: Time of the save in seconds since the epoch.
        stage: Stage of the policy.
        reason: Why the policy is in that stage.
        raw_bytes: Size of the state in memory.
        leaves: Number of leaves.
        recorded_bytes: Size of its files according to the manifest.
        tables_bytes: Bytes of manifest, tables, indexes and digests among them.
        causes: Cause (``policy.causes``) -> bytes of the files that the save added; ``merged``:
            bytes written behind the training to shorten chains since the save before.
        changed: Group -> changed words / words of the leaves that were not written whole. ``None``
            if all were.
        held: The contracts that are not exact.
        exact_bytes: Size of the exact leaves in memory.
        bounded_bytes: Size of the bounded leaves in memory.
        reused_bytes: Size of the reused leaves in memory.
        depth: Largest number of deltas on a leaf.
        mean_depth: Mean number of deltas, weighted by bytes.
        read_bytes: Size of all files that a restore of the step reads.
        problem: Description of the damage.
    """

    step: int
    seq: int
    time: float
    stage: str
    reason: str
    raw_bytes: int
    leaves: int
    recorded_bytes: int
    tables_bytes: int
    causes: Mapping[str, int]
    changed: Mapping[str, float | None]
    held: tuple[HeldLeaves, ...]
    exact_bytes: int
    bounded_bytes: int
    reused_bytes: int
    depth: int
    mean_depth: float
    read_bytes: int
    problem: str | None

    @property
    def written_bytes(self) -> int:
        return sum(self.causes.values())


@dataclass(frozen=True, slots=True)
class LeafTotal:
    """Sums over the saves of one leaf, since its layout last changed.

    Attributes:
        raw_bytes: Size in memory.
        word_bytes: Size of a word.
        key_bytes: Stored size of its newest keyframe.
        saves: Number of saves that found it unchanged or wrote a delta.
        delta_bytes: Sum of their stored sizes.
        density: Sum of their densities.
    """

    raw_bytes: int
    word_bytes: int
    key_bytes: float
    saves: int = 0
    delta_bytes: float = 0.0
    density: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """The data of a root.

    Attributes:
        root: Path of the root.
        total_bytes: Size of all manifests, and of the segments that they name. The root may hold
            other segments, which ``deltacheck prune`` removes.
        writers: The processes that wrote the steps.
        steps: The checkpoints, oldest first.
        groups: Rows of the heat map, name -> leaf paths.
        leaves: Leaf path -> sums over its saves, for the leaves of the newest step.
        profile: Profile of the run.
        problems: Descriptions of the documents and steps that could not be read.
    """

    root: str
    total_bytes: int
    writers: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    groups: Mapping[str, tuple[str, ...]]
    leaves: Mapping[str, LeafTotal]
    profile: Profile | None
    problems: tuple[str, ...] = field(default=())

    @property
    def stable_start(self) -> int | None:
        """The first step in the stable stage; without one, that of the profile."""
        start = stable_start((step.step, step.stage) for step in self.steps)
        return self.profile.stable_start if start is None and self.profile is not None else start


def collect(
    path: str | os.PathLike[str],
    item: str | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> Record:
    """Collect the data of a report.

    Damaged steps are included, with their problem.

    Args:
        path: A root. In an object store, the sizes of files take a request for each.
        item: Item of the steps of a ``CheckpointManager``.
        profile: Profile of the run. Default: ``profile.json`` of the root, if it exists.

    Returns:
        The data.

    Raises:
        NotACheckpointRoot: If there is no root at ``path``.
        OSError: If the profile cannot be read.
        Damaged: If the root or the profile is damaged.
        UnsupportedFormat: If the profile has an unknown version.
        StorageFailed: If an object store does not answer, or refuses.
    """
    root = open_root(path, item)
    # A profile that was named must exist. The default one is optional, and a missing file is no
    # error.
    profile_path: Place = Path(profile) if profile is not None else storage.of(path) / PROFILE
    known_profile = (
        Profile.read(profile_path) if profile is not None or profile_path.is_file() else None
    )
    problems: list[str] = []
    committed = list(history.committed(root, problems))
    manifests = [checkpoint.manifest for checkpoint in committed]
    grouped, classed = _groups_of(manifests)
    segments = _Segments()
    causes = CauseCounter(segments.cost)
    steps = []
    # Totals are returned for the leaves of the newest step that could be read.
    present: Mapping[str, ReportedLeaf] = {}
    for step in history.steps(root, committed):
        present = step.states or present
        record = _step(step, segments, causes, grouped, classed)
        if record.problem is not None:
            problems.append(f"step {record.step}: {record.problem}")
        steps.append(record)
    writers = tuple(dict.fromkeys(manifest.writer for manifest in manifests))
    # Steps share segments, so each one is counted once by its name.
    refs = {ref.id: ref.stored_bytes for manifest in manifests for ref in manifest.segments}
    total_bytes = sum(refs.values()) + sum(checkpoint.manifest_bytes for checkpoint in committed)
    totals = {path: total for path, total in segments.totals.items() if path in present}
    return Record(
        str(root.path),
        total_bytes,
        writers,
        tuple(steps),
        grouped,
        totals,
        known_profile,
        tuple(problems),
    )


class _Segments:
    """The costs of segments, each measured once, and the sums of leaves over all saves."""

    def __init__(self) -> None:
        self._costs: dict[str, Cost] = {}
        self.totals: dict[str, LeafTotal] = {}
        self._specs: dict[str, LeafSpec] = {}

    def cost(self, segment: Segment) -> Cost:
        if segment.id not in self._costs:
            self._costs[segment.id] = cost_of(segment)
        return self._costs[segment.id]

    def _of(self, segment: Segment, name: str) -> float:
        return self.cost(segment).by_leaf.get(name, 0.0)

    def read_bytes(self, states: Mapping[str, ReportedLeaf]) -> float:
        """Return the bytes of values that a restore of these leaves reads."""
        parts = [item for state in states.values() for item in state.parts.items()]
        return sum(self._of(segment, name) for name, part in parts for segment, _ in part.chain)

    def count(self, path: str, state: ReportedLeaf, density: float | None) -> None:
        key = sum(self._of(part.chain[0][0], name) for name, part in state.parts.items())
        # Only a delta that this step wrote counts: the last link of an unchanged part is of an
        # earlier save.
        last = sum(
            self._of(part.chain[-1][0], name)
            for name, part in state.parts.items()
            if part.kind is LeafKind.DELTA
        )
        # The sums begin anew if the layout changes, for example from values to codes: sizes of the
        # former say nothing of those of the latter.
        fresh = self._specs.get(path) != state.spec
        self._specs[path] = state.spec
        old = LeafTotal(0, 1, 0.0) if fresh else self.totals[path]
        # A keyframe does not show what changed, so it is no observation of the density.
        compared = state.kind is not LeafKind.KEYFRAME
        self.totals[path] = LeafTotal(
            state.spec.raw_bytes,
            state.spec.word_bytes,
            key,
            old.saves + compared,
            old.delta_bytes + last,
            old.density + (density or 0.0),
        )


def _groups_of(
    manifests: Sequence[Manifest],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the groups of leaves, and the classes of those that are not exact, by name.

    They are made from all steps, so that a leaf keeps its row if it appears or disappears during
    the run.
    """
    sizes = {
        path: record.spec(path).raw_bytes
        for manifest in manifests
        for path, record in manifest.leaves.items()
    }
    sizes |= {
        path: manifest.spec(path).raw_bytes for manifest in manifests for path in manifest.tiles
    }
    # A leaf of which nothing is stored can have a contract too. It has no size here.
    promised = {path: sizes.get(path, 0) for manifest in manifests for path in manifest.contracts}
    return groups(sizes, MOST_GROUPS), classes(promised, MOST_CLASSES)


def _step(
    step: Step,
    segments: _Segments,
    causes: CauseCounter,
    grouped: Mapping[str, Sequence[str]],
    classes: Mapping[str, Sequence[str]],
) -> StepRecord:
    manifest = step.manifest
    by_cause: Mapping[str, int] = {
        MERGED: manifest.merged_bytes,
        REST: step.manifest.stored_bytes + step.manifest_bytes,
    }
    tables_bytes = step.manifest_bytes
    changed: dict[str, float | None] = {}
    problem, read_bytes, depth, mean_depth = step.problem, 0, 0, 0.0
    if step.states is not None:
        try:
            for segment in step.segments:
                cost = segments.cost(segment)
                # Only segments of its own sequence number are new. The step needs older ones too.
                if layout.seq_of(segment.id) == manifest.seq:
                    tables_bytes += cost.tables_bytes
            by_cause = causes.count(step)
            changed = _changed(step.states, segments, grouped)
            read_bytes = step.manifest_bytes + _read_bytes(step, segments)
            depth = max((state.depth for state in step.states.values()), default=0)
            raw = sum(state.spec.raw_bytes for state in step.states.values())
            mean_depth = (
                sum(s.depth * s.spec.raw_bytes for s in step.states.values()) / raw if raw else 0.0
            )
        except StorageFailed:
            raise
        except (DeltacheckError, OSError) as error:
            # A damaged step still has a row, with what its manifest says. The page shows the
            # problem.
            problem = str(error)
    contracts, by_contract = _held(manifest, classes)
    return StepRecord(
        step=manifest.step,
        seq=manifest.seq,
        time=manifest.time,
        stage=manifest.stage,
        reason=manifest.stage_reason,
        raw_bytes=manifest.raw_bytes,
        leaves=len(manifest.specs),
        recorded_bytes=step.manifest.stored_bytes + step.manifest_bytes,
        tables_bytes=tables_bytes,
        causes=by_cause,
        changed=changed,
        held=contracts,
        exact_bytes=by_contract["exact"],
        bounded_bytes=by_contract["bounded"],
        reused_bytes=by_contract["reused"],
        depth=depth,
        mean_depth=mean_depth,
        read_bytes=read_bytes,
        problem=problem,
    )


def _changed(
    states: Mapping[str, ReportedLeaf], segments: _Segments, grouped: Mapping[str, Iterable[str]]
) -> dict[str, float | None]:
    densities: dict[str, float | None] = {}
    for name, paths in grouped.items():
        words = changed_words = present = 0
        for path in paths:
            state = states.get(path)
            if state is None:
                continue
            present += 1
            count = state.changed_words()
            segments.count(
                path, state, None if count is None else count / state.words if state.words else 0.0
            )
            if count is not None:
                words, changed_words = words + state.words, changed_words + count
        if present:
            densities[name] = changed_words / words if words else None
    return densities


def _read_bytes(step: Step, segments: _Segments) -> int:
    """Return the size of the chains of all leaves, and of the tables of all segments."""
    tables = sum(segments.cost(segment).tables_bytes for segment in step.segments)
    assert step.states is not None
    return tables + round(segments.read_bytes(step.states))


def _held(
    manifest: Manifest, classes: Mapping[str, Sequence[str]]
) -> tuple[tuple[HeldLeaves, ...], dict[str, int]]:
    """Return the contracts of a step by leaf class, and the bytes of its state by contract."""
    # Leaves without a contract are exact, so everything begins there and is moved below.
    by_contract = {"exact": manifest.raw_bytes, "bounded": 0, "reused": 0}
    specs = manifest.specs
    for path, promise in manifest.contracts.items():
        by_contract[name_of(promise.terms)] += specs[path].raw_bytes
        by_contract["exact"] -= specs[path].raw_bytes
    contracts: dict[tuple[str, str, str], HeldLeaves] = {}
    for leaf_class, paths in classes.items():
        for path in paths:
            if path not in manifest.contracts:
                continue
            promise = manifest.contracts[path]
            terms = promise.terms
            age = promise.age(manifest.step)
            if isinstance(terms, Bounded):
                norm, limit, measured = terms.norm, terms.limit, promise.measured
            elif terms.max_drift is not None:
                # The drift measures an error. Without a limit of it, the age is all that is
                # limited.
                norm, limit, measured = "octaves", terms.max_drift, promise.measured
            else:
                norm, limit, measured = "steps", float(terms.max_age_steps), float(age)
            new = HeldLeaves(leaf_class, name_of(terms), norm, 1, limit, measured, age)
            old = contracts.get((leaf_class, new.contract, norm), new)
            # Ratios are compared, because limits differ between leaves of a class.
            worst = max(old, new, key=lambda contract: contract.used)
            # ``old is new`` for the first leaf, which is counted already.
            leaves = old.leaves + (old is not new)
            contracts[leaf_class, new.contract, norm] = HeldLeaves(
                leaf_class,
                new.contract,
                norm,
                leaves,
                worst.limit,
                worst.measured,
                max(old.age_steps, age),
            )
    return tuple(contracts.values()), by_contract
