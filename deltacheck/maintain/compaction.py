"""Rewrite committed steps so that they take less time to restore, or less space.

``compact`` rewrites the newest step of a root without deltas.
``reclaim`` rewrites segments of which only a few leaves are needed. Neither needs the training that
saved the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deltacheck.errors import Damaged, StepNotFound
from deltacheck.leaf import tiles
from deltacheck.restore.chain import chains_at, resolve_chains, without_unneeded
from deltacheck.restore.leaf_kinds import Chain
from deltacheck.save.chains.kept_leaves import write_kept
from deltacheck.save.chains.whole_leaves import manifest_on, write_whole
from deltacheck.store import collect, layout
from deltacheck.store.commit import commit
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place, inside
from deltacheck.store.manifest import LeafEntry, Manifest, SegmentRef
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import Segment

# The metadata of an array of deltas, and what its file takes beyond its content.
_ARRAY_BYTES = 768
# Segments that `reclaim_history` looks at in one call, which a save waits for.
_SEGMENTS_OF_CALL = 128
# The default share of ``reclaim``.
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of ``compact``. The field names are keys in ``deltacheck prune --json``.

    Attributes:
        step: Training step.
        seq: Sequence number of the new checkpoint.
        leaves: Number of leaves that were written again. A leaf in tiles counts once.
        deltas: Length of the longest chain before.
        stored_bytes: Size of all new files.
    """

    step: int
    seq: int
    leaves: int
    deltas: int
    stored_bytes: int


def compact(root: Root) -> Compacted | None:
    """Replace the newest step by one without deltas: leaves that have any are written whole.

    Every step restores as before, bit for bit. Until the new manifest is committed nothing has
    changed; then the old manifest is deleted. Segments that no step needs any more stay until they
    are collected. A few leaves are in memory at a time. The caller must hold the lease.

    Args:
        root: An engine root.

    Returns:
        The result, or ``None`` if there are no deltas.

    Raises:
        StepNotFound: If there is no step, or if the root belongs to a ``CheckpointManager``.
        Damaged: If the step is not whole. Nothing has been written then.
        ChainBroken: The same, if a chain has no keyframe.
    """
    _refuse_manager(root)
    before = root.manifest()
    chains = resolve_chains(root, before, before.stored)
    with_deltas = {path: leaf for path, leaf in sorted(chains.items()) if leaf.deltas}
    if not with_deltas:
        return None
    seq = root.next_seq()
    written = write_whole(root.store.writer(seq), with_deltas)
    # Leaves that were not written again stay where they are.
    needed_ids = {leaf.key[0].id for leaf in chains.values() if not leaf.deltas}
    segments = (*(ref for ref in before.segments if ref.id in needed_ids), written)
    after = manifest_on(root, before, seq, segments, "compacting")
    receipt = commit(root.path, after, root.store.durability)
    # The old manifest is deleted last. A kill before it leaves two checkpoints of one nonce, of
    # which the collection removes the older.
    collect.delete_checkpoint(root, before.seq)
    return Compacted(
        step=before.step,
        seq=seq,
        leaves=len({tiles.leaf_of(path) for path in with_deltas}),
        deltas=max(len(leaf.deltas) for leaf in with_deltas.values()),
        stored_bytes=written.stored_bytes + receipt.stored_bytes,
    )


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A segment that was rewritten. The field names are keys in ``deltacheck prune --json``.

    Attributes:
        old: Identifier of the old segment.
        new: Identifier of the new segment; empty in a dry run.
        leaves: Number of leaves that are needed.
        old_bytes: Size of all files of the old segment.
        new_bytes: Size of all files of the new segment; an upper bound in a dry run.
    """

    old: str
    new: str
    leaves: int
    old_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """The leaves that steps need of a segment.

    Attributes:
        ref: The segment.
        leaves: Leaf path -> a manifest that needs it, and the leaf's entry in the segment.
        is_tight: True if the segment would be written again as it is.
        is_whole: True if all leaves are written whole, which takes no more bytes than their deltas.
        needed_bytes: An upper bound of the bytes of a new segment with these leaves.
    """

    ref: SegmentRef
    leaves: Mapping[str, tuple[Manifest, LeafEntry]]
    is_tight: bool
    is_whole: bool
    needed_bytes: int

    @property
    def leaf_count(self) -> int:
        """The number of leaves. A leaf in tiles counts once."""
        return len({tiles.leaf_of(path) for path in self.leaves})


def reclaim(root: Root, *, below: float = _SHARE, dry_run: bool = False) -> tuple[Rewritten, ...]:
    """Rewrite segments of which only a few leaves are needed, so that the old ones can be removed.

    The new segment has the old one's sequence number, so every chain keeps its order. Deltas are
    copied as they are, unless keyframes of all leaves take fewer bytes. Each manifest is replaced
    by one rename after the new segments are durable, so every step is whole at any moment. The
    caller must hold the lease.

    Args:
        root: An engine root.
        below: Rewrite a segment if its needed leaves take at most this share of its size. Larger:
            more space is freed; smaller: fewer bytes are read and written.
        dry_run: If true, change nothing.

    Returns:
        The segments that were rewritten, or would be.

    Raises:
        Damaged: If a step is not whole. Nothing has been written then.
        StepNotFound: If the root belongs to a ``CheckpointManager``.
        ValueError: If ``below`` is not between 0 and 1.
    """
    if not 0 <= below <= 1:
        raise ValueError(f"below must be a share between 0 and 1, not {below}")
    manifests = _manifests(root)
    sparse = [need for need in needs(root, manifests.values()) if _is_sparse(need, below)]
    if dry_run:
        return tuple(
            Rewritten(need.ref.id, "", need.leaf_count, need.ref.stored_bytes, need.needed_bytes)
            for need in sparse
        )
    return _replace(root, manifests, sparse)


def reclaim_history(
    root: Root, protected: Collection[str], examined: set[str]
) -> tuple[Rewritten, ...]:
    """Do what ``reclaim`` does for the segments that only steps with removed leaves need.

    Such a segment does not lose more leaves, so it is looked at once. This bounds the work beside a
    training, whose next save goes on from the segments of whole steps.

    Args:
        root: An engine root. The caller holds its lease, and no step is committed meanwhile.
        protected: Segments to leave alone.
        examined: Segments that were looked at before; those of this call are added.

    Returns:
        The segments that were rewritten.

    Raises:
        Damaged: If a step is not whole. No manifest has been replaced then.
    """
    manifests = _manifests(root)
    of_whole_steps = {
        ref.id
        for manifest in manifests.values()
        if not manifest.absent
        for ref in manifest.segments
    }
    every = {ref.id for manifest in manifests.values() for ref in manifest.segments}
    # Names sort by age. The newest are needed by the fewest steps.
    candidates = set(
        sorted(every - of_whole_steps - set(protected) - examined)[-_SEGMENTS_OF_CALL:]
    )
    concerned = {
        path: manifest
        for path, manifest in manifests.items()
        if not candidates.isdisjoint(ref.id for ref in manifest.segments)
    }
    sparse = [
        need
        for need in needs(root, concerned.values())
        if need.ref.id in candidates and _is_sparse(need, _SHARE)
    ]
    rewritten = _replace(root, concerned, sparse)
    examined |= candidates | {segment.new for segment in rewritten}
    return rewritten


def _manifests(root: Root) -> dict[Place, Manifest]:
    """Return all manifests of a root that may be rewritten, by their places."""
    _refuse_manager(root)
    manifests, damaged = root.manifests()
    for error in damaged.values():
        # The segments that an unreadable manifest needs are unknown.
        raise Damaged(f"nothing is rewritten while a manifest cannot be read: {error}") from error
    return manifests


def _is_sparse(need: Need, share: float) -> bool:
    # A tight segment would only be written again as it is.
    return not need.is_tight and need.needed_bytes <= share * need.ref.stored_bytes


def _replace(
    root: Root, manifests: Mapping[Place, Manifest], sparse: Sequence[Need]
) -> tuple[Rewritten, ...]:
    """Rewrite segments, and let all manifests that name them name the new ones."""
    replacements: dict[str, SegmentRef] = {}
    for need in sparse:
        replacements[need.ref.id] = _rewritten(root, need)
    # All manifests are checked against the new segments before the first one is replaced.
    renewals = {
        path: _with_replacements(root, manifest, replacements)
        for path, manifest in manifests.items()
    }
    for path, manifest in renewals.items():
        if manifest != manifests[path]:
            # A rename either leaves the old manifest or puts the new one in its place. Both of them
            # restore, because the old segment is removed by a later collection only.
            folder = inside(root.path, path.parent)
            arrays.replace_file(folder, path.name, encode_manifest(manifest))
            sync_directory(path.parent)
    return tuple(
        Rewritten(
            need.ref.id,
            replacements[need.ref.id].id,
            need.leaf_count,
            need.ref.stored_bytes,
            replacements[need.ref.id].stored_bytes,
        )
        for need in sparse
    )


def needs(root: Root, manifests: Iterable[Manifest]) -> list[Need]:
    """Return the leaves that steps need of each segment, ordered by the segments' identifiers.

    Raises:
        Damaged: If a step is not whole.
        ChainBroken: If a chain has no keyframe.
    """
    refs: dict[str, SegmentRef] = {}
    segments: dict[str, Segment] = {}
    leaves: dict[str, dict[str, tuple[Manifest, LeafEntry]]] = {}
    for manifest in manifests:
        # Several steps name the same segment. They agree in its reference, which has the table's
        # digest.
        refs |= {ref.id: ref for ref in manifest.segments}
        for path, leaf in resolve_chains(root, manifest, manifest.stored).items():
            for segment, entry in (leaf.key, *leaf.deltas):
                # The entry of a path is the same for every step that needs it, so the first
                # manifest is enough.
                leaves.setdefault(segment.id, {}).setdefault(path, (manifest, entry))
                segments[segment.id] = segment
    return [_need(refs[name], segments[name], entries) for name, entries in sorted(leaves.items())]


def _need(
    ref: SegmentRef, segment: Segment, leaves: Mapping[str, tuple[Manifest, LeafEntry]]
) -> Need:
    """Return a need with the cheaper way to write it again."""
    entries = {path: entry for path, (_, entry) in leaves.items()}
    deltas = [entry for entry in entries.values() if entry.key is None]
    is_all = len(entries) == len(segment.table.leaves)
    raw = {path: entry.spec(path).raw_bytes for path, entry in entries.items()}
    copied = (
        sum(map(segment.delta_bytes, deltas))
        + sum(raw[path] for path, entry in entries.items() if entry.key is not None)
        + (_ARRAY_BYTES * segment.table.delta_arrays if deltas else 0)
    )
    whole = sum(raw.values())
    is_whole = bool(deltas) and whole <= copied
    return Need(ref, leaves, is_all and not is_whole, is_whole, whole if is_whole else copied)


def _rewritten(root: Root, need: Need) -> SegmentRef:
    """Write the needed leaves of a segment again.

    The new segment has the same sequence number with another nonce: chains are ordered by it
    (format.md, section 6).
    """
    seq = layout.seq_of(need.ref.id)
    if need.is_whole:
        chains: dict[str, Chain] = {}
        for path, (manifest, entry) in need.leaves.items():
            earlier = [ref for ref in manifest.segments if layout.seq_of(ref.id) <= seq]
            chains |= chains_at(root, manifest, earlier, {path: entry.record(entry.digest)})
        return write_whole(root.store.writer(seq), chains)
    entries = {path: entry for path, (_, entry) in need.leaves.items()}
    deltas = {path: entry for path, entry in entries.items() if entry.key is None}
    keyframes = {
        path: entry.record(entry.digest) for path, entry in entries.items() if path not in deltas
    }
    manifest, _ = next(iter(need.leaves.values()))
    segment = root.store.segment(need.ref)
    chains = chains_at(root, manifest, [need.ref], keyframes)
    return write_kept(root.store, segment, seq, deltas, chains)


def _with_replacements(
    root: Root, manifest: Manifest, replacements: Mapping[str, SegmentRef]
) -> Manifest:
    """Return a manifest that names new segments instead of old ones.

    Every chain is checked by its digests, and segments that are not needed any more are left out.
    """
    # An unchanged manifest is not replaced, so its digest, which a caller may have stored, stays.
    if not replacements.keys() & {ref.id for ref in manifest.segments}:
        return manifest
    after = manifest.on(
        [replacements.get(ref.id, ref) for ref in manifest.segments],
        {ref.id: old for old, ref in replacements.items()},
    )
    root.with_tables(after)
    return without_unneeded(root, after)


def _refuse_manager(root: Root) -> None:
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager: Orbax owns its steps, so they cannot"
            " be rewritten. Make an engine root of a step with deltacheck branch"
        )
