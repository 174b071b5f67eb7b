"""Find what each save did to each leaf, from manifests and segment tables. No leaf is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltacheck.errors import ChainBroken, DeltacheckError, StorageFailed
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import storage
from deltacheck.store.manifest import LeafEntry, Manifest, SegmentRef
from deltacheck.store.roots.root import Root, StepRef
from deltacheck.store.segment import Segment


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A leaf at one step, or one of its tiles, as it is stored.

    Attributes:
        spec: Spec of the stored array.
        kind: The form in which the step stored it: a keyframe, a delta or nothing.
        chain: The entries that a restore reads: the keyframe, then the deltas in order.
    """

    spec: LeafSpec
    kind: LeafKind
    chain: tuple[tuple[Segment, LeafEntry], ...]

    @property
    def depth(self) -> int:
        """The number of deltas that a restore applies."""
        return len(self.chain) - 1

    @property
    def words(self) -> int:
        return self.spec.raw_bytes // self.spec.word_bytes

    def changed_words(self) -> int | None:
        """Return the number of words that the save found changed; ``None`` for a keyframe.

        Reads the index of the delta. An array does not show what changed; of a leaf that is encoded
        whole, all words count.
        """
        if self.kind is LeafKind.UNCHANGED:
            return 0
        segment, entry = self.chain[-1]
        if entry.key is not None:
            return None
        rows = [
            segment.part(part).index[first : first + count, columns.CHANGED]
            for part, first, count in entry.delta
        ]
        return sum(int(row.sum(dtype="uint64")) for row in rows)


@dataclass(frozen=True, slots=True)
class ReportedLeaf:
    """A leaf at one step.

    Attributes:
        spec: Spec of the stored leaf.
        parts: Stored path -> part. The leaf itself, or its tiles.
    """

    spec: LeafSpec
    parts: Mapping[str, StoredPart]

    @property
    def kind(self) -> LeafKind:
        """The kind of all parts; ``DELTA`` if the parts differ in kind."""
        kinds = {part.kind for part in self.parts.values()}
        return kinds.pop() if len(kinds) == 1 else LeafKind.DELTA

    @property
    def depth(self) -> int:
        """The largest number of deltas that a restore applies to a part."""
        return max(part.depth for part in self.parts.values())

    @property
    def words(self) -> int:
        return self.spec.raw_bytes // self.spec.word_bytes

    def changed_words(self) -> int | None:
        """Return the number of words that the save found changed.

        ``None`` if it wrote a part whole. Reads the indexes of the deltas.
        """
        counts = [part.changed_words() for part in self.parts.values()]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over leaves of one step.

    ``words`` and ``changed_words`` count the leaves that were not written whole. Their quotient is
    the density. ``raw_bytes`` is the size of all leaves.
    """

    keyframes: int
    deltas: int
    unchanged: int
    raw_bytes: int
    words: int
    changed_words: int

    @property
    def density(self) -> float | None:
        """Changed words / words, ``None`` if every leaf was written whole."""
        return self.changed_words / self.words if self.words else None


def leaf_states(manifest: Manifest, segments: Sequence[Segment]) -> dict[str, ReportedLeaf]:
    """Return the state of every leaf of a step, in ascending order of the paths.

    ``segments`` are those of the manifest, in its order.

    Raises:
        ChainBroken: If a leaf has no keyframe.
    """
    states: dict[str, ReportedLeaf] = {}
    every = columns.entries_by_path(segments)
    for path in sorted([*manifest.leaves, *manifest.tiles]):
        names = manifest.names_of(path)
        if not names:  # all of its tiles are computed from others
            continue
        spec = manifest.leaves[path].spec(path) if path in manifest.leaves else manifest.spec(path)
        if path in manifest.tiles:
            # What is stored may be codes. Tiles of a leaf rarely differ in this.
            spec = LeafSpec.of(path, spec.shape, manifest.stored[names[0]].dtype)
        states[path] = ReportedLeaf(
            spec,
            {name: _part(name, manifest, every.get(name, ()), segments) for name in names},
        )
    return states


def _part(
    path: str,
    manifest: Manifest,
    every: Sequence[tuple[int, LeafEntry]],
    segments: Sequence[Segment],
) -> StoredPart:
    chain = [(segments[number], entry) for number, entry in _entries_of(path, manifest, every)]
    # A save writes segments of its own sequence number (format.md, section 1), so the newest entry
    # tells if this save wrote it.
    segment, entry = chain[0]
    if layout.seq_of(segment.id) != manifest.seq:
        kind = LeafKind.UNCHANGED
    else:
        kind = LeafKind.DELTA if entry.key is None else LeafKind.KEYFRAME
    return StoredPart(manifest.stored[path].spec(path), kind, tuple(reversed(chain)))


def _entries_of(
    path: str, manifest: Manifest, every: Sequence[tuple[int, LeafEntry]]
) -> list[tuple[int, LeafEntry]]:
    """Return the entries that a restore of a leaf reads, the newest first."""
    # Older entries than the newest keyframe are of chains that have ended.
    for count, (_, entry) in enumerate(reversed(every), 1):
        if entry.is_whole:
            return list(every[: -count - 1 : -1])
    raise ChainBroken(
        f"step {manifest.step}, leaf {path!r}: none of the step's segments holds its keyframe"
    )


def summed(states: Iterable[ReportedLeaf]) -> StepSums:
    """Sum over leaves. Reads the indexes of their deltas."""
    changed = [(state, state.changed_words()) for state in states]
    kinds = [state.kind for state, _ in changed]
    return StepSums(
        keyframes=kinds.count(LeafKind.KEYFRAME),
        deltas=kinds.count(LeafKind.DELTA),
        unchanged=kinds.count(LeafKind.UNCHANGED),
        raw_bytes=sum(state.spec.raw_bytes for state, _ in changed),
        words=sum(state.words for state, count in changed if count is not None),
        changed_words=sum(count for _, count in changed if count is not None),
    )


def by_class(
    states: Mapping[str, ReportedLeaf], levels: int
) -> dict[tuple[str, str], list[ReportedLeaf]]:
    """Group leaves by the first ``levels`` components of their path and by their type."""
    groups: dict[tuple[str, str], list[ReportedLeaf]] = {}
    for path, state in states.items():
        prefix = "/".join(path.split("/")[:levels])
        groups.setdefault((prefix, state.spec.dtype), []).append(state)
    return dict(sorted(groups.items()))


@dataclass(frozen=True, slots=True)
class Step:
    """One committed checkpoint.

    ``segments`` are those of the manifest, in its order, and ``states`` its leaves. If its segments
    are not whole, they are empty and ``None``, and ``problem`` says why.
    """

    ref: StepRef
    manifest: Manifest
    manifest_bytes: int
    segments: tuple[Segment, ...]
    states: dict[str, ReportedLeaf] | None
    problem: str | None


class Committed(NamedTuple):
    """A manifest that was read, and its size."""

    ref: StepRef
    manifest: Manifest
    manifest_bytes: int


def committed(root: Root, problems: list[str]) -> Iterator[Committed]:
    """Yield the checkpoints of a root, oldest first.

    The errors of manifests that cannot be read are appended to ``problems``.
    """
    checkpoints, damaged = root.read_all()
    problems += [str(error) for error in damaged.values()]
    for ref in checkpoints:
        try:
            # Not by the root, which would keep every manifest.
            manifest = root.with_tables(read_manifest(ref.manifest_path))
            yield Committed(ref, manifest, storage.size_of(ref.manifest_path))
        except FileNotFoundError:
            continue  # deleted by a running training since it was listed
        except StorageFailed:
            raise  # this says nothing of the manifest
        except DeltacheckError as error:
            problems.append(str(error))


def steps(root: Root, checkpoints: Iterable[Committed]) -> Iterator[Step]:
    """Yield the leaf states of each checkpoint.

    Neighbouring steps share most of their segments, so tables are kept from one step to the next.
    """
    open_segments: dict[SegmentRef, Segment] = {}
    for checkpoint in checkpoints:
        refs = checkpoint.manifest.segments
        try:
            # Only the tables that this step needs are kept, so memory does not grow with the number
            # of steps.
            open_segments = {ref: open_segments.get(ref) or root.store.segment(ref) for ref in refs}
            segments = tuple(open_segments.values())
            states = leaf_states(checkpoint.manifest, list(segments))
        except StorageFailed:
            raise
        except DeltacheckError as error:
            yield Step(*checkpoint, (), None, str(error))
        else:
            yield Step(*checkpoint, segments, states, None)
