"""What the save of a step did to each leaf, told from its manifest and its segments' tables: no
leaf is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltacheck.errors import ChainBroken, DeltacheckError
from deltacheck.leaf.spec import LeafKind, LeafSpec
from deltacheck.store import layout
from deltacheck.store import segment as columns
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import storage
from deltacheck.store.manifest import LeafEntry, Manifest, SegmentRef
from deltacheck.store.root import Root, StepRef
from deltacheck.store.segment import Segment


@dataclass(frozen=True, slots=True)
class Part:
    """What is stored of a leaf at one step, or of one of its tiles. ``chain``: what a restore
    reads, the keyframe and then the deltas in order.
    """

    spec: LeafSpec
    kind: LeafKind
    chain: tuple[tuple[Segment, LeafEntry], ...]

    @property
    def depth(self) -> int:
        """Deltas that a restore applies."""
        return len(self.chain) - 1

    @property
    def words(self) -> int:
        return self.spec.raw_bytes // self.spec.word_bytes

    def changed_words(self) -> int | None:
        """Words that this step's save found changed; ``None`` for a keyframe, which says nothing
        about that. Reads the index of the delta.
        """
        if self.kind is LeafKind.UNCHANGED:
            return 0
        segment, entry = self.chain[-1]
        if entry.is_whole:
            return None
        rows = [
            segment.part(part).index[first : first + count, columns.CHANGED]
            for part, first, count in entry.delta
        ]
        return sum(int(row.sum(dtype="uint64")) for row in rows)


@dataclass(frozen=True, slots=True)
class LeafState:
    """One leaf at one step. ``spec``: of what is stored; ``parts``: by the path that each is stored
    under, the leaf itself or its tiles.
    """

    spec: LeafSpec
    parts: Mapping[str, Part]

    @property
    def kind(self) -> LeafKind:
        """As all of its parts were stored; ``DELTA``, too, where they were not stored alike."""
        kinds = {part.kind for part in self.parts.values()}
        return kinds.pop() if len(kinds) == 1 else LeafKind.DELTA

    @property
    def depth(self) -> int:
        """Most deltas that a restore applies to a part."""
        return max(part.depth for part in self.parts.values())

    @property
    def words(self) -> int:
        return self.spec.raw_bytes // self.spec.word_bytes

    def changed_words(self) -> int | None:
        """Words that this step's save found changed; ``None`` where it has written a part whole.
        Reads the indexes of the deltas.
        """
        counts = [part.changed_words() for part in self.parts.values()]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True, slots=True)
class Change:
    """Leaves of one step taken together.

    ``words``, ``changed_words``: of the leaves that were not written whole; their quotient is the
    density. ``raw_bytes``: of all of them.
    """

    keyframes: int
    deltas: int
    unchanged: int
    raw_bytes: int
    words: int
    changed_words: int

    @property
    def density(self) -> float | None:
        """Changed words / words, ``None`` where every leaf was written whole."""
        return self.changed_words / self.words if self.words else None


def stored_bytes(manifest: Manifest) -> int:
    """Bytes of the segments that this step's save wrote; 0 where nothing had changed."""
    return sum(
        ref.stored_bytes for ref in manifest.segments if layout.seq_of(ref.id) == manifest.seq
    )


def leaf_states(manifest: Manifest, segments: Sequence[Segment]) -> dict[str, LeafState]:
    """Every leaf of a step, paths ascending. ``segments``: those of the manifest, in its order.

    Raises ``ChainBroken`` where a leaf has no keyframe.
    """
    found: dict[str, LeafState] = {}
    every = columns.entries_by_path(segments)
    for path in sorted([*manifest.leaves, *manifest.tiles]):
        spec = manifest.leaves[path].spec(path) if path in manifest.leaves else manifest.spec(path)
        found[path] = LeafState(
            spec,
            {
                name: _part(name, manifest, every.get(name, ()), segments)
                for name in manifest.names_of(path)
            },
        )
    return found


def _part(
    path: str,
    manifest: Manifest,
    every: Sequence[tuple[int, LeafEntry]],
    segments: Sequence[Segment],
) -> Part:
    chain: list[tuple[Segment, LeafEntry]] = []
    for number, entry in reversed(every):
        chain.append((segments[number], entry))
        if entry.is_whole:
            own = layout.seq_of(chain[0][0].id) == manifest.seq
            kind = (
                LeafKind.UNCHANGED
                if not own
                else LeafKind.DELTA
                if len(chain) > 1
                else LeafKind.KEYFRAME
            )
            return Part(manifest.stored[path].spec(path), kind, tuple(reversed(chain)))
    raise ChainBroken(
        f"step {manifest.step}, leaf {path!r}: none of the step's segments holds its keyframe"
    )


def summed(states: Iterable[LeafState]) -> Change:
    """Leaves taken together. Reads the indexes of their deltas."""
    changed = [(state, state.changed_words()) for state in states]
    kinds = [state.kind for state, _ in changed]
    return Change(
        keyframes=kinds.count(LeafKind.KEYFRAME),
        deltas=kinds.count(LeafKind.DELTA),
        unchanged=kinds.count(LeafKind.UNCHANGED),
        raw_bytes=sum(state.spec.raw_bytes for state, _ in changed),
        words=sum(state.words for state, count in changed if count is not None),
        changed_words=sum(count for _, count in changed if count is not None),
    )


def by_class(
    states: Mapping[str, LeafState], levels: int
) -> dict[tuple[str, str], list[LeafState]]:
    """Leaves grouped by the first ``levels`` components of their path and by their type."""
    groups: dict[tuple[str, str], list[LeafState]] = {}
    for path, state in states.items():
        prefix = "/".join(path.split("/")[:levels])
        groups.setdefault((prefix, state.spec.dtype), []).append(state)
    return dict(sorted(groups.items()))


@dataclass(frozen=True, slots=True)
class Step:
    """One committed checkpoint.

    ``segments``: those of the manifest, in its order. ``states``: its leaves. Where its segments
    are not whole, they are empty and ``None``, and ``problem`` says why.
    """

    ref: StepRef
    manifest: Manifest
    manifest_bytes: int
    segments: tuple[Segment, ...]
    states: dict[str, LeafState] | None
    problem: str | None

    @property
    def stored_bytes(self) -> int:
        return stored_bytes(self.manifest)


class Committed(NamedTuple):
    """A manifest that was read, and its size."""

    ref: StepRef
    manifest: Manifest
    manifest_bytes: int


def committed(root: Root, unreadable: list[str]) -> list[Committed]:
    """The checkpoints of a root, oldest first. What is wrong with manifests that cannot be read is
    added to ``unreadable``.
    """
    found: list[Committed] = []
    for path in root.manifest_paths():
        try:
            manifest = read_manifest(path)
            found.append(
                Committed(
                    StepRef(manifest.step, manifest.seq, path), manifest, storage.size_of(path)
                )
            )
        except FileNotFoundError:
            continue  # deleted by a running training since it was listed
        except DeltacheckError as error:
            unreadable.append(str(error))
    return sorted(found, key=lambda one: one.ref.seq)


def steps(root: Root, found: Iterable[Committed]) -> Iterator[Step]:
    """What the save of each checkpoint did. A segment's table is read once for neighbouring steps,
    which share most of theirs.
    """
    known: dict[SegmentRef, Segment] = {}
    for ref, manifest, manifest_bytes in found:
        segments: tuple[Segment, ...] = ()
        states, problem = None, None
        try:
            known = {
                needed: known.get(needed) or root.store.segment(needed)
                for needed in manifest.segments
            }
            states = leaf_states(manifest, list(known.values()))
            segments = tuple(known.values())
        except DeltacheckError as error:
            problem = str(error)
        yield Step(ref, manifest, manifest_bytes, segments, states, problem)
