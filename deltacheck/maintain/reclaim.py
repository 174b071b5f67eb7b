"""Free segments of which little is needed: what is needed is written whole to a new one, and the
steps
name that.

The new segment has the old one's sequence number, so every chain keeps its order: where a leaf's
chain passed through the old segment it begins at the new one, which holds the leaf as it was there,
and what comes after is a delta to the same digest. Each manifest is replaced in one rename when the
new segments are durable; at any moment every step is whole, as it was or as it will be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from deltacheck.errors import Damaged, StepNotFound
from deltacheck.leaf import tiles
from deltacheck.restore.chain import Chain, resolve_chains
from deltacheck.save.compactor import write_whole
from deltacheck.store import layout
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.manifest import LeafEntry, LeafRecord, Manifest, SegmentRef
from deltacheck.store.root import Root


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A segment that stands in for another. ``old``, ``new``: ids; ``leaves``: that are needed of
    it; bytes of all files of both.
    """

    old: str
    new: str
    leaves: int
    old_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What steps need of a segment: leaf path -> a manifest that needs it, and the leaf's entry.
    ``is_tight``: the segment has nothing else.
    """

    ref: SegmentRef
    leaves: Mapping[str, tuple[Manifest, LeafEntry]]
    is_tight: bool

    @property
    def leaf_count(self) -> int:
        """How many leaves these are, or are tiles of."""
        return len({tiles.leaf_of(path) for path in self.leaves})

    @property
    def whole_bytes(self) -> int:
        """Bytes of these leaves in memory: no less than what they take when they are written
        whole.
        """
        return sum(entry.spec(path).raw_bytes for path, (_, entry) in self.leaves.items())


def reclaim(
    root: Root, *, below: float = 0.5, dry_run: bool = False, io_timeout_seconds: float = 600.0
) -> tuple[Rewritten, ...]:
    """Rewrite every segment whose needed leaves, written whole, take no more than ``below`` of its
    size; collection then removes the old ones.

    Larger ``below``: more space freed, more read and written for it. ``dry_run``: ``new`` is then
    empty, ``new_bytes`` an upper bound.

    REQUIRES: the caller holds the lease. Raises ``Damaged`` where any step is not whole, before
    anything is written; ``StepNotFound`` in the root of a ``CheckpointManager``; ``ValueError`` for
    a share outside 0 to 1.
    """
    if not 0 <= below <= 1:
        raise ValueError(f"below must be a share between 0 and 1, not {below}")
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager: its steps cannot be written again in"
            " their place"
        )
    checkpoints, damaged = root.read_all()
    for error in damaged.values():
        raise Damaged(f"nothing is rewritten while a manifest cannot be read: {error}") from error
    manifests = {ref.manifest_path: root.read(ref.manifest_path) for ref in checkpoints}
    sparse = [
        need
        for need in needs(root, manifests.values())
        if not need.is_tight and need.whole_bytes <= below * need.ref.stored_bytes
    ]
    if dry_run:
        return tuple(
            Rewritten(n.ref.id, "", n.leaf_count, n.ref.stored_bytes, n.whole_bytes) for n in sparse
        )
    stands_in: dict[str, SegmentRef] = {}
    for need in sparse:
        writer = root.store.writer(layout.seq_of(need.ref.id))
        stands_in[need.ref.id] = write_whole(writer, _as_of(root, need), io_timeout_seconds)
    after = {
        path: _replaced(root, manifest, stands_in) for path, manifest in manifests.items()
    }  # all are checked before one is written
    for path, manifest in after.items():
        if manifest != manifests[path]:
            arrays.replace_file(path.parent, path.name, encode_manifest(manifest))
            sync_directory(path.parent)
    made = [(need, stands_in[need.ref.id]) for need in sparse]
    return tuple(
        Rewritten(n.ref.id, ref.id, n.leaf_count, n.ref.stored_bytes, ref.stored_bytes)
        for n, ref in made
    )


def needs(root: Root, manifests: Iterable[Manifest]) -> list[Need]:
    """What the steps need of each segment, by segment id. Raises ``Damaged`` or ``ChainBroken``
    where a step is not whole.
    """
    refs: dict[str, SegmentRef] = {}
    held: dict[str, int] = {}  # leaves of each segment
    leaves: dict[str, dict[str, tuple[Manifest, LeafEntry]]] = {}
    for manifest in manifests:
        refs |= {ref.id: ref for ref in manifest.segments}
        for path, found in resolve_chains(root, manifest, manifest.stored).items():
            for segment, entry in (found.key, *found.deltas):
                leaves.setdefault(segment.id, {}).setdefault(path, (manifest, entry))
                held[segment.id] = len(segment.table.leaves)
    return [
        Need(
            refs[name],
            of,
            len(of) == held[name] and all(entry.key is not None for _, entry in of.values()),
        )
        for name, of in sorted(leaves.items())
    ]


def _as_of(root: Root, need: Need) -> dict[str, Chain]:
    """The chains of a segment's needed leaves up to this segment."""
    seq = layout.seq_of(need.ref.id)
    found: dict[str, Chain] = {}
    for path, (manifest, entry) in need.leaves.items():
        until = tuple(ref for ref in manifest.segments if layout.seq_of(ref.id) <= seq)
        record = LeafRecord(entry.dtype, entry.shape, entry.chunk, entry.digest)
        found |= resolve_chains(
            root,
            msgspec.structs.replace(manifest.on(until), leaves={path: record}, tiles={}),
            [path],
        )
    return found


def _replaced(root: Root, manifest: Manifest, stands_in: Mapping[str, SegmentRef]) -> Manifest:
    """A manifest with new segments for old ones, without those that it needs no more; every chain
    of it checked by its digests.
    """
    if not stands_in.keys() & {ref.id for ref in manifest.segments}:
        return manifest
    after = manifest.on([stands_in.get(ref.id, ref) for ref in manifest.segments])
    chains = resolve_chains(root, after, after.stored).values()
    needed = {segment.id for found in chains for segment, _ in (found.key, *found.deltas)}
    return after.on([ref for ref in after.segments if ref.id in needed])
