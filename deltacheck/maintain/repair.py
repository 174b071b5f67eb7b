"""Heal damaged steps from what other steps and leaves still have, and say plainly what is lost.

A chunk is known by its digest, so the bytes that a damaged file held may be found wherever the same
digest stands: in a keyframe after it, in a tied leaf or a replica, in a step that was compacted; a
leaf that ranks have cut otherwise is put together from those tiles; a low-precision copy follows
from its master. What is healed is written whole to new segments, and steps get new manifests:
nothing that is committed is written to. Documents that are replaced or set aside are kept in
``<root>.damaged``; segments that no step needs any more stay for ``gc``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deltacheck.codec.base import U8, U64
from deltacheck.errors import Damaged, NotACheckpointRoot, StepNotFound
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import chunk_digests, digest_of, leaf_digest
from deltacheck.maintain import verify
from deltacheck.maintain.survey import Lineage, Survey, batches, stored_chunks, survey, tables
from deltacheck.restore import derive, read
from deltacheck.restore.chain import Chain
from deltacheck.restore.content import byte_extents
from deltacheck.restore.read import apply_entry
from deltacheck.save.whole_leaves import WholeLeaves, manifest_on
from deltacheck.store import collect, layout
from deltacheck.store.commit import commit
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import MANAGER_STORE, Root, Store, open_root

_FLOATS = ("float32", "float64")  # that others may be a cast of


@dataclass(frozen=True, slots=True)
class Healed:
    """A leaf of a step, or the tile of one that ``source`` begins with, that was written again,
    from ``source``.
    """

    step: int
    leaf: str
    source: str


@dataclass(frozen=True, slots=True)
class Lost:
    """What cannot be healed: ``chunks`` of a leaf of a step (empty: which ones is not known; of a
    leaf
    in tiles, those of the tile that ``problem`` begins with), or, without a leaf, a whole step.
    """

    step: int | None
    leaf: str | None
    chunks: tuple[int, ...]
    problem: str


@dataclass(slots=True)
class Repaired:
    """What a repair did, or would do.

    ``documents``: ``zarr.json`` files that were written again. ``steps``: the steps that were
    healed. ``removed``: what a lossy repair set aside. ``backup``: where replaced and removed
    documents are kept, ``None`` where there are none.
    """

    documents: list[str] = field(default_factory=list)
    healed: list[Healed] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    backup: str | None = None
    stored_bytes: int = 0


def repair_root_document(path: Path, result: Repaired, *, dry_run: bool = False) -> None:
    """Write the ``zarr.json`` of a root that has lost its own. Raises ``NotACheckpointRoot`` where
    nothing shows that it was one.
    """
    for store in (path, path / MANAGER_STORE):
        if Store(store).segment_ids():
            try:
                open_root(path)
                return
            except Damaged:
                document = store / "zarr.json"
                result.documents.append(str(document))
                if not dry_run:
                    _Backup(path, result).keep(document)
                    about = {
                        "format": layout.FORMAT,
                        "version": layout.VERSION,
                        "must_understand": [],
                    }
                    arrays.replace_file(
                        store, "zarr.json", layout.group_json({layout.ATTRIBUTE: about})
                    )
                return
    raise NotACheckpointRoot(
        f"{path} is not a deltacheck root, and no segments show that it was one"
    )


def repair(
    root: Root,
    step: int | None = None,
    *,
    dry_run: bool = False,
    lossy: bool = False,
    result: Repaired | None = None,
    io_timeout_seconds: float = 600.0,
) -> Repaired:
    """Heal the steps of a root (by default all of them) as far as other data allows.

    A step is healed whole or not at all. Without ``lossy`` what cannot be healed stays as it is and
    is named. ``lossy``: steps that cannot be healed, and manifests that cannot be read, are set
    aside, so that the newest step restores and ``gc`` works again: their other leaves go with them.
    ``dry_run`` changes nothing. ``done``: a report to go on with.

    Holds one leaf in memory at a time, and the digests of all chunks. REQUIRES: the caller holds
    the lease (a dry run needs none). Raises ``StepNotFound``, and ``StorageFailed`` for an object
    store: copy the root to a disk.
    """
    result = result or Repaired()
    root = root.afresh()
    backup = _Backup(storage.local(root.path, "a repair"), result)
    checkpoints, unreadable = root.read_all()
    manifests = {ref.manifest_path: root.read(ref.manifest_path) for ref in checkpoints}
    if step is not None and step not in root.steps() and not unreadable:
        raise StepNotFound(f"{root.path} has no step {step}")
    for path, error in sorted(unreadable.items()):
        result.lost.append(
            Lost(
                None, None, (), f"{error}: the step cannot be healed, nothing else says what it was"
            )
        )
        if lossy and (step is None or step not in root.steps()):
            result.removed.append(str(path))
            if not dry_run:
                backup.set_aside(path.parent if not root.is_manager_root else path.parent.parent)
    found = survey(root, manifests.values(), without_lost=True)
    _mend_documents(root, found, backup, result, dry_run)
    sick = _Sick.of(manifests.values(), found)
    healer = _Healer(found, sick, list(manifests.values()))
    wanted = [
        (path, m)
        for path, m in manifests.items()
        if m.seq in sick.leaves and step in (None, m.step)
    ]
    curable: dict[Place, Manifest] = {}
    for path, manifest in wanted:
        healed, lost = [], []
        for leaf in sick.leaves[manifest.seq]:
            content = healer.heal(manifest, leaf)
            if isinstance(content, Lost):
                lost.append(content)
            else:
                healed.append(
                    Healed(manifest.step, tiles.leaf_of(leaf), tiles.about(leaf) + content.source)
                )
        if lost:
            result.lost += lost
            if lossy:
                result.removed.append(str(path))
                if not dry_run:
                    backup.set_aside(
                        path.parent if not root.is_manager_root else path.parent.parent
                    )
                manifests.pop(path)
        else:
            curable[path] = manifest
            result.healed += healed
            result.steps.append(manifest.step)
    in_the_way = (
        []
        if lossy
        else [path for path in unreadable if curable and _is_newer(path, next(iter(curable)))]
    )
    if in_the_way:
        result.lost += [
            Lost(
                m.step,
                None,
                (),
                f"it could be healed, but not before {in_the_way[0]}, which is newer and cannot be"
                " read, is set aside (--lossy)",
            )
            for m in curable.values()
        ]
        result.healed, result.steps = [], []
    elif curable and not dry_run:
        _write(root, manifests, curable, sick, healer, backup, result, io_timeout_seconds)
    return result


def _is_newer(path: Place, than: Place) -> bool:
    return [int(part) for part in path.parent.name.split("c") if part.isdigit()] >= [
        int(part) for part in than.parent.name.split("c") if part.isdigit()
    ]


# --- what is sick ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sick:
    """``leaves``: by sequence number, the leaves that a step has lost. ``sound``: of each lineage,
    how many of its links can be restored.
    """

    leaves: dict[int, list[str]]
    sound: dict[int, int]

    @classmethod
    def of(cls, manifests: Iterable[Manifest], found: Survey) -> _Sick:
        sick = cls(
            {m.seq: [] for m in manifests if any(ref in found.lost for ref in m.segments)}, {}
        )
        for broken in found.broken:
            sick.leaves.setdefault(broken.manifest.seq, []).append(broken.path)
        for batch in batches(found.lineages, verify.BATCH_BYTES):
            for lineage, links in _sound(batch):
                sick.sound[id(lineage)] = links
                for use in lineage.uses:
                    if use.links > links:
                        sick.leaves.setdefault(use.seq, []).append(lineage.path)
        return sick


def _sound(batch: list[Lineage]) -> Iterator[tuple[Lineage, int]]:
    """How many links of each lineage, from its keyframe on, give the bytes that were saved."""
    known = {lineage.path: len(tables(lineage).digests) for lineage in batch}
    links = dict.fromkeys(known, 0)
    try:
        chains = {
            lineage.path: lineage.chain(known[lineage.path])
            for lineage in batch
            if known[lineage.path]
        }
        for _, entries, _ in read.follow_links(chains):
            for path in entries:
                links[path] += 1
    except Damaged:
        if len(batch) > 1:
            for lineage in batch:
                yield from _sound([lineage])
            return
    yield from ((lineage, links[lineage.path]) for lineage in batch)


# --- healing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Content:
    """A leaf's bytes, proven, and where they came from."""

    data: U8
    digests: U64
    source: str


@dataclass(frozen=True, slots=True)
class _At:
    """A chunk of a lineage after some of its links."""

    lineage: Lineage
    links: int
    chunk: int


class _Healer:
    def __init__(self, found: Survey, sick: _Sick, manifests: list[Manifest]) -> None:
        self._found = found
        self._manifests = manifests
        self._sick = sick
        self._tables = {id(lineage): tables(lineage).digests for lineage in found.lineages}
        self._leaves: dict[
            str, tuple[Lineage, int]
        ] = {}  # by leaf digest, those that can be restored
        self._chunks: dict[tuple[int, int], list[_At]] = {}
        for lineage in found.lineages:
            for number, digests in enumerate(self._tables[id(lineage)]):
                segment, entry = lineage.links[number]
                if number < sick.sound[id(lineage)]:
                    self._leaves.setdefault(entry.digest, (lineage, number + 1))
                for chunk in stored_chunks(segment, entry, lineage.spec_chunks).tolist():
                    high, low = digests[chunk].tolist()
                    self._chunks.setdefault((high, low), []).append(_At(lineage, number + 1, chunk))

    def heal(self, manifest: Manifest, leaf: str) -> _Content | Lost:
        """The content of a leaf that a step has lost."""
        record = manifest.stored[leaf]
        known = self._leaves.get(record.digest)
        if known is not None:
            lineage, links = known
            data = _load(lineage, links)
            source = (
                f"{_named(lineage.path)} after segment {lineage.links[links - 1][0].id}, which is"
                " equal"
            )
            return _Content(data, self._tables[id(lineage)][links - 1], source)
        missing: list[int] = []
        own = self._of(manifest, leaf)
        if own is not None:
            content, missing = self._assembled(*own)
            if content is not None:
                return content
        other = self._cut_otherwise(manifest, leaf) or self._cast(manifest, leaf)
        if other is not None:
            return other
        problem = (
            "no other data has the digests of these chunks"
            if missing
            else "its tables cannot be read, and no other leaf of this root has its digest"
        )
        return Lost(manifest.step, tiles.leaf_of(leaf), tuple(missing), tiles.about(leaf) + problem)

    def needed(self, manifest: Manifest, healed: list[str]) -> set[str]:
        """The segments that a step's other leaves stand on."""
        found: set[str] = set()
        for lineage in self._found.lineages:
            if lineage.path not in healed:
                for use in lineage.uses:
                    if use.seq == manifest.seq:
                        found |= {segment.id for segment, _ in lineage.links[: use.links]}
        return found

    def _of(self, manifest: Manifest, leaf: str) -> tuple[Lineage, int] | None:
        for lineage in self._found.lineages:
            if lineage.path == leaf:
                for use in lineage.uses:
                    if use.seq == manifest.seq and use.links <= len(self._tables[id(lineage)]):
                        return lineage, use.links
        return None

    def _assembled(self, lineage: Lineage, links: int) -> tuple[_Content | None, list[int]]:
        """A leaf after some links, chunk by chunk from wherever each is; or the chunks that are
        nowhere.
        """
        spec, digests = lineage.record.spec(lineage.path), self._tables[id(lineage)][links - 1]
        data = np.empty(spec.raw_bytes, np.uint8)
        missing, sources = [], set()
        for chunk, (begin, end) in enumerate(byte_extents(spec, range(spec.chunk_count))):
            high, low = digests[chunk].tolist()
            candidates = [_At(lineage, links, chunk), *self._chunks.get((high, low), ())]
            for at in candidates:
                values = _chunk(at, digests[chunk], self._tables[id(at.lineage)][at.links - 1])
                if values is not None and values.size == end - begin:
                    data[begin:end] = values
                    if at.lineage is not lineage or at.links != links:
                        sources.add(
                            f"{_named(at.lineage.path)} after segment"
                            f" {at.lineage.links[at.links - 1][0].id}"
                        )
                    break
            else:
                missing.append(chunk)
        if missing and links > 1:
            # A delta that is whole, on what was healed before it.
            before, _ = (
                self._assembled(lineage, links - 1)
                if self._sick.sound[id(lineage)] < links - 1
                else (None, [])
            )
            if before is not None:
                segment, entry = lineage.links[links - 1]
                try:
                    content = _Content(
                        apply_entry(spec, segment, entry, before.data),
                        digests,
                        f"{before.source}, and the deltas after it",
                    )
                except Damaged:
                    return None, missing
                if digest_of(spec, content.data) == entry.digest:
                    return content, []
        if missing:
            return None, missing
        return (
            _Content(
                data, digests, ", ".join(sorted(sources)) or "its own chunks, each read alone"
            ),
            [],
        )

    def _cut_otherwise(self, manifest: Manifest, leaf: str) -> _Content | None:
        """A leaf or tile from a step that has the same elements in other tiles, as after a change
        of the number of ranks.
        """
        record, path = manifest.stored[leaf], tiles.leaf_of(leaf)
        spec, cuts = record.spec(leaf), _cuts(manifest, path)
        if cuts is None:
            return None
        box = tiles.box(cuts, tiles.numbered(cuts, leaf) if tiles.is_name(leaf) else 0)
        tried = set()
        for manifest_of in reversed(self._manifests):
            their = _cuts(manifest_of, path)
            if their is None or their == cuts or tiles.shape_of(their) != tiles.shape_of(cuts):
                continue
            cut = manifest_of.tiles.get(path)
            parts = [
                (one, manifest_of.leaves[path] if cut is None else cut.record(one.number))
                for one in tiles.overlaps(their, box)
            ]
            digests = tuple(part.digest for _, part in parts)
            if digests in tried or any(
                part.dtype != record.dtype or part.digest not in self._leaves for _, part in parts
            ):
                continue
            tried.add(digests)
            values = np.empty(record.shape, spec.element.numpy)
            for one, part in parts:
                values[one.in_box] = (
                    _load(*self._leaves[part.digest])
                    .view(values.dtype)
                    .reshape(part.shape)[one.in_tile]
                )
            data = values.reshape(-1).view(np.uint8)
            chunks = chunk_digests(data, spec.bounds(), spec.word_bytes, range(spec.chunk_count))
            if leaf_digest(chunks) == record.digest:
                return _Content(
                    data,
                    chunks,
                    f"leaf {path!r} of step {manifest_of.step}, which has it in other tiles",
                )
        return None

    def _cast(self, manifest: Manifest, leaf: str) -> _Content | None:
        """A leaf that is the cast of another of its step, as working copies are of their
        masters.
        """
        record = manifest.stored[leaf]
        spec = record.spec(leaf)
        if record.dtype not in ("bfloat16", "float16", "float32"):
            return None
        for path, other in manifest.stored.items():
            if (
                other.dtype in _FLOATS
                and other.dtype != record.dtype
                and other.shape == record.shape
            ):
                known = self._leaves.get(other.digest)
                if known is None:
                    continue
                values = _load(*known).view(other.spec(path).element.numpy)
                data = derive.cast(values, spec.element.numpy).view(np.uint8)
                digests = chunk_digests(
                    data, spec.bounds(), spec.word_bytes, range(spec.chunk_count)
                )
                if leaf_digest(digests) == record.digest:
                    return _Content(
                        data, digests, f"{_named(path)} of the same step, rounded to {record.dtype}"
                    )
        return None


def _cuts(manifest: Manifest, path: str) -> tiles.Cuts | None:
    """How a step has cut what it stores of a leaf; ``None`` of what it does not store, and of what
    has no elements or axes to cut.
    """
    if path in manifest.tiles:
        return manifest.tiles[path].cuts
    shape = manifest.leaves[path].shape if path in manifest.leaves else ()
    return tuple((0, size) for size in shape) if shape and 0 not in shape else None


def _named(stored: str) -> str:
    """A leaf, or which tile of it, for people."""
    which = f"{tiles.about(stored).removesuffix(': ')} of " if tiles.is_name(stored) else ""
    return f"{which}leaf {tiles.leaf_of(stored)!r}"


def _load(lineage: Lineage, links: int) -> U8:
    found: U8 = np.empty(0, np.uint8)
    for _, _, content in read.follow_links({lineage.path: lineage.chain(links)}):
        found = content[lineage.path]
    return found


def _chunk(at: _At, wanted: U64, digests: U64) -> U8 | None:
    """One chunk, if it can be read and has the wanted digest."""
    one: Chain = at.lineage.chain(at.links)
    one = Chain(one.spec, one.key, one.deltas, digests)
    try:
        data = read.read_chunks({one.spec.path: one}, {one.spec.path: [at.chunk]})[one.spec.path]
    except Damaged:
        return None
    return data if (digests[at.chunk] == wanted).all() else None


# --- writing --------------------------------------------------------------------------------------


class _Backup:
    """Where documents go before they are replaced or removed: beside the root, under their own
    names and a number.
    """

    def __init__(self, root: Path, result: Repaired) -> None:
        self._root = root
        self._done = result

    def keep(self, document: Place) -> None:
        """Copy a file."""
        path = Path(str(document))
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, self._place(path))

    def set_aside(self, what: Place) -> None:
        """Move a file or directory away."""
        path = Path(str(what))
        shutil.move(path, self._place(path))
        sync_directory(path.parent)

    def _place(self, path: Path) -> Path:
        folder = self._root.with_name(f"{self._root.name}.damaged")
        self._done.backup = str(folder)
        at = folder / path.relative_to(self._root)
        at.parent.mkdir(parents=True, exist_ok=True)
        number = 0
        while (free := at if number == 0 else at.with_name(f"{at.name}.{number}")).exists():
            number += 1
        return free


def _mend_documents(
    root: Root, found: Survey, backup: _Backup, result: Repaired, dry_run: bool
) -> None:
    """Write metadata again that only other readers need, as the tables imply it."""
    wrong: list[tuple[Place, bytes]] = []
    for folder in root.store.group_paths():
        if verify.group_problem(folder / "zarr.json") is not None:
            wrong.append((folder, layout.group_json({})))
    for segment in found.segments.values():
        wrong += list(verify.wrong_documents(segment))
    for folder, content in wrong:
        result.documents.append(str(folder / "zarr.json"))
        if not dry_run:
            backup.keep(folder / "zarr.json")
            folder.mkdir(parents=True, exist_ok=True)
            arrays.replace_file(folder, "zarr.json", content)
            sync_directory(folder)


def _write(
    root: Root,
    manifests: Mapping[Place, Manifest],
    curable: Mapping[Place, Manifest],
    sick: _Sick,
    healer: _Healer,
    backup: _Backup,
    result: Repaired,
    io_timeout_seconds: float,
) -> None:
    """Write what was healed, then give every step from the first healed one on a new manifest, so
    that
    their order stays.

    The newest goes first: at any moment the newest step is the one that it was.
    """
    first = min(manifest.seq for manifest in curable.values())
    later = [(path, manifest) for path, manifest in manifests.items() if manifest.seq >= first]
    base = root.next_seq()
    renewals: list[tuple[Place, Manifest, Manifest]] = []
    for number, (path, manifest) in enumerate(later):
        segments = manifest.segments
        if path in curable:
            leaves = sick.leaves[manifest.seq]
            needed = healer.needed(manifest, leaves)
            segments = tuple(old for old in manifest.segments if old.id in needed)
            if leaves:
                specs = [manifest.stored[leaf].spec(leaf) for leaf in leaves]
                whole = WholeLeaves(root.store.writer(base + number), specs, io_timeout_seconds)
                for leaf in leaves:
                    content = healer.heal(manifest, leaf)
                    assert isinstance(content, _Content)
                    whole.add(
                        manifest.stored[leaf].spec(leaf),
                        manifest.stored[leaf].digest,
                        content.digests,
                        content.data,
                    )
                ref = whole.finish()
                segments = (*segments, ref)
                result.stored_bytes += ref.stored_bytes
        renewals.append(
            (path, manifest, manifest_on(root, manifest, base + number, segments, "repairing"))
        )
    for path, before, after in reversed(renewals):
        backup.keep(path)
        if root.is_manager_root:
            arrays.replace_file(path.parent, "zarr.json", encode_manifest(after))
            sync_directory(path.parent)
        else:
            commit(root.path, after, root.store.durability, again=True)
            collect.delete_checkpoint(root, before.seq)
