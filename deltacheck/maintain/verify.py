"""Check committed steps and say what is wrong, in words that name step, file and leaf. Reads only.

Tables and metadata are read once, whatever number of steps share them. A deep check goes through
each chain once, from its keyframe on, and compares the leaf after every delta: so it proves the
leaf in every step on the chain, and applies no delta twice.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from deltacheck.codec.base import U8
from deltacheck.errors import Damaged, StorageFailed, UnsupportedFormat
from deltacheck.leaf import tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.maintain import survey as surveying
from deltacheck.maintain.survey import Lineage, Survey
from deltacheck.restore import derive, read
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store import documents, layout
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Derived, Manifest
from deltacheck.store.root import Root
from deltacheck.store.segment import Segment

BATCH_BYTES = 32 << 20  # of leaves that are read together; larger: fewer, longer reads, more memory
_NOTE_SECONDS = 5.0  # between two notes of how far a scrub is

# Opens a display of progress for so many decoded bytes; what it gives is told how many more are
# done.
Display: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``step``: the step that it harms, ``None`` where its manifest cannot
    be read. ``leaf``: where one is known.
    """

    step: int | None
    leaf: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check has shown. ``manifests``: of the steps, ascending by sequence number.
    ``checked_bytes`` of ``all_bytes``: decoded bytes that were read and compared now; of a scrub
    that is kept, ``remaining_bytes`` are left for later runs. ``seed``: of a sample.
    """

    findings: tuple[Finding, ...]
    manifests: tuple[Manifest, ...]
    checked_bytes: int = 0
    all_bytes: int = 0
    remaining_bytes: int = 0
    seed: int | None = None


def verify(root: Root, step: int | str | None = None, *, deep: bool = False) -> list[Finding]:
    """Check the steps of a root (by default all of them); what is wrong, as ``check`` finds it."""
    return list(check(root, step, deep=deep).findings)


def check(
    root: Root,
    step: int | str | None = None,
    *,
    deep: bool = False,
    subset: float | None = None,
    seed: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    display: Display | None = None,
) -> Verified:
    """Check the steps of a root (by default all of them). ``deep`` reads, decodes and compares
    every
    byte.

    ``subset``: only this share (0 to 1) of the bytes, whole chains of leaves drawn at random by
    ``seed`` (default: another one each time). Smaller: a check that costs little beside training;
    damage elsewhere is found on another day. ``resume``: a file in which the check keeps what it
    has gone through, so that the next one with the same file goes on from there, and begins anew
    once all is done: with ``subset``, runs of 10 % go through everything in ten. Chains that have
    grown since are read again, and what was damaged in every run.

    Of a step that is kept as gradients, what is stored is checked; the state itself is proven by
    its replay, at restore.

    Raises ``StepNotFound`` where the asked step is not there and no manifest is damaged,
    ``ValueError`` for a subset out of range.
    """
    if subset is not None and not 0 < subset <= 1:
        raise ValueError(f"subset must be more than 0 and at most 1, not {subset}")
    root = root.afresh()
    manifests, findings = _manifests(root, step)
    found = surveying.survey(root, manifests)
    findings += _shallow(root, manifests, found)
    if not deep and subset is None and resume is None:
        return Verified(tuple(findings), tuple(manifests))
    seed = random.SystemRandom().randrange(1 << 32) if seed is None and subset is not None else seed
    units = sorted(found.lineages, key=lambda unit: (unit.links[0][0].id, unit.path))
    total = sum(map(surveying.cost_bytes, units))
    progress = _Progress(None if resume is None else Path(resume))
    known = [unit for unit in units if _key(unit) in progress.damaged]
    units = [unit for unit in units if _key(unit) not in progress.done | progress.damaged]
    left = sum(map(surveying.cost_bytes, units))
    chosen = units if subset is None else _sample(units, subset * total, random.Random(seed))
    left -= sum(map(surveying.cost_bytes, chosen))
    chosen += known  # until they are healed, every run tells of them
    size = sum(map(surveying.cost_bytes, chosen))
    derived = _Derived.of(manifests)
    try:
        with nullcontext(lambda more: None) if display is None else display(size) as advance:
            for batch in surveying.batches(chosen, BATCH_BYTES):
                for unit, error in _read(batch, derived):
                    progress.note(_key(unit), error is None)
                    if error is not None:
                        segment = _segment_of(error.file, unit)
                        findings += [
                            _finding(use.step, unit.path, error) for use in unit.harmed(segment)
                        ]
                    advance(surveying.cost_bytes(unit))
    finally:
        progress.save()
    findings += derived.findings
    if left == 0:
        findings += _uncommon(root, manifests)
        progress.begin_anew()
    findings = list(dict.fromkeys(findings))  # the tables' own were told of before
    return Verified(tuple(findings), tuple(manifests), size, total, left, seed)


def _manifests(root: Root, step: int | str | None) -> tuple[list[Manifest], list[Finding]]:
    checkpoints, damaged = root.read_all()
    unreadable = [Finding(None, None, str(error)) for _, error in sorted(damaged.items())]
    if step is not None:
        try:
            return [root.manifest(step)], []
        except (Damaged, UnsupportedFormat):  # the step may be one of these
            return [], unreadable
    manifests = []
    for ref in checkpoints:
        try:
            manifests.append(root.read(ref.manifest_path))
        except FileNotFoundError:
            continue  # deleted by a running training since it was listed
    return manifests, unreadable


# --- tables and metadata --------------------------------------------------------------------------


def _shallow(root: Root, manifests: Iterable[Manifest], found: Survey) -> list[Finding]:
    findings: list[Finding] = []
    groups = [
        problem
        for path in root.store.group_paths()
        if (problem := group_problem(path / "zarr.json")) is not None
    ]
    metadata = {ref: _metadata_problems(segment) for ref, segment in found.segments.items()}
    for manifest in manifests:
        lost = [str(found.lost[ref]) for ref in manifest.segments if ref in found.lost]
        problems = lost or [
            *groups,
            *(problem for ref in manifest.segments for problem in metadata[ref]),
        ]
        findings += [Finding(manifest.step, None, problem) for problem in problems]
        for path, promise in manifest.contracts.items():
            if not promise.used(manifest.step) <= 1:
                problem = (
                    f"its contract allows {promise.allowed}, measured was {promise.measured:.4g}"
                )
                findings.append(Finding(manifest.step, path, problem))
    findings += [
        _finding(broken.manifest.step, broken.path, broken.error) for broken in found.broken
    ]
    for unit in found.lineages:
        tables = surveying.tables(unit)
        if tables.error is not None:
            harmed = [use for use in unit.uses if use.links > len(tables.digests)]
            findings += [_finding(use.step, unit.path, tables.error) for use in harmed]
    return findings


def _finding(step: int, stored: str, error: Damaged) -> Finding:
    """What is wrong with something stored, as one of the leaf that people know; the tile is named
    in the text.
    """
    return Finding(step, tiles.leaf_of(stored), str(error))


def _metadata_problems(segment: Segment) -> list[str]:
    """Array metadata that differs from what the tables imply. Our reader ignores it; plain zarr
    does not.
    """
    problems = [group_problem(path / "zarr.json") for path in segment.group_paths()]
    problems += [
        _metadata_problem(path / "zarr.json", spec.metadata())
        for path, spec in segment.array_specs().items()
    ]
    return [problem for problem in problems if problem is not None]


def wrong_documents(segment: Segment) -> Iterator[tuple[Place, bytes]]:
    """The directories below a segment whose ``zarr.json`` is wrong, each with the content that it
    must have.
    """
    for path in segment.group_paths():
        if group_problem(path / "zarr.json") is not None:
            yield path, layout.group_json({})
    for path, spec in segment.array_specs().items():
        if _metadata_problem(path / "zarr.json", spec.metadata()) is not None:
            yield path, json.dumps(spec.metadata(), separators=(",", ":")).encode()


def group_problem(path: Place) -> str | None:
    """What is wrong with a file that must be the metadata of a zarr group."""
    try:
        found = _json_of(path)
        is_group = (found["zarr_format"], found["node_type"]) == (3, "group")
    except StorageFailed:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Damaged) as error:
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    return (
        None
        if is_group
        else f"{path} is not the metadata of a zarr group: plain zarr cannot open what is below it"
    )


def _metadata_problem(path: Place, expected: dict[str, object]) -> str | None:
    try:
        found = _json_of(path)
        same = _normal(found) == _normal(expected)
    except StorageFailed:
        raise
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, Damaged) as error:
        return f"{path} cannot be read: {error}"
    return (
        None
        if same
        else f"{path} is not the metadata that was written: plain zarr would read the array wrongly"
    )


def _json_of(path: Place) -> Any:
    return json.loads(arrays.read_file(path, documents.MAX_DOCUMENT_BYTES))


def _normal(value: object) -> object:
    """Metadata without the differences that do not matter: TensorStore leaves defaults out when it
    writes.
    """
    if isinstance(value, dict):
        defaults = {"index_location": "end", "checksum": False}
        return {
            k: _normal(v)
            for k, v in sorted(value.items())
            if not (k in defaults and v == defaults[k]) and v not in ({}, None)
        }
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return value


# --- data -----------------------------------------------------------------------------------------


def _read(batch: list[Lineage], derived: _Derived) -> Iterator[tuple[Lineage, Damaged | None]]:
    """Go through some chains together; where one of them is damaged, through each alone, so that it
    can be told which.
    """
    try:
        _follow(batch, derived)
    except Damaged as error:
        if len(batch) == 1:
            yield batch[0], error
            return
        for unit in batch:
            yield from _read([unit], derived)
    else:
        yield from ((unit, None) for unit in batch)


def _follow(batch: list[Lineage], derived: _Derived) -> None:
    # The tables first: where one link's are damaged, the walk would tell of a later one.
    for unit in batch:
        error = surveying.tables(unit).error
        if error is not None:
            raise error
    for _, entries, content in read.follow_links({unit.path: unit.chain() for unit in batch}):
        for path, data in content.items():
            derived.compare(entries[path].spec(path), entries[path].digest, data)


def _segment_of(file: str, unit: Lineage) -> str:
    """The segment of a lineage in which a file lies; the first, where none is known."""
    return next(
        (segment.id for segment, _ in unit.links if segment.id in Path(file).parts),
        unit.links[0][0].id,
    )


@dataclass(slots=True)
class _Derived:
    """Leaves that a step computes from one stored leaf and has a digest of, by that leaf and its
    digest: compared as a walk passes it.
    """

    wanted: dict[tuple[str, str], list[tuple[str, Derived, int]]]
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> _Derived:
        found: dict[tuple[str, str], list[tuple[str, Derived, int]]] = {}
        for manifest in manifests:
            for path, derived in manifest.derived.items():
                if _is_plain(manifest, path):
                    digest = manifest.stored[derived.of].digest
                    found.setdefault((derived.of, digest), []).append(
                        (path, derived, manifest.step)
                    )
        return cls(found)

    def compare(self, source: LeafSpec, digest: str, data: U8) -> None:
        """Compare what follows from a leaf's content."""
        alike: dict[tuple[str, str], list[tuple[Derived, int]]] = {}
        for path, derived, step in self.wanted.pop((source.path, digest), ()):
            alike.setdefault((path, derived.digest), []).append((derived, step))
        for (path, recorded), of in alike.items():
            derived = of[0][0]
            spec = LeafSpec.of(path, derived.shape, derived.dtype)
            elements = data.view(source.element.numpy)
            values = derive.compute(derived, None, {source.path: elements}, 0, elements.size).view(
                np.uint8
            )
            found = digest_of(spec, values)
            if found != recorded:
                problem = (
                    f"it follows from leaf {source.path!r} by {derived.how}, but that gives digest"
                    f" {found} where {recorded} was saved"
                )
                self.findings += [Finding(step, path, problem) for _, step in of]


def _is_plain(manifest: Manifest, path: str) -> bool:
    """Whether a leaf of a step follows from one stored leaf alone."""
    derived = manifest.derived[path]
    return (
        derived.how in ("cast", "same")
        and bool(derived.digest)
        and _is_stored(manifest, derived)
        and path not in manifest.stored
    )


def _is_stored(manifest: Manifest, derived: Derived) -> bool:
    return (
        derived.sources == (derived.of,)
        and derived.of in manifest.stored
        and derived.of not in manifest.derived
    )


def _uncommon(root: Root, manifests: Iterable[Manifest]) -> list[Finding]:
    """Leaves with a digest that follow from more than one stored leaf, or from leaves that are
    derived themselves.
    """
    findings = []
    for manifest in manifests:
        paths = [
            path
            for path, derived in manifest.derived.items()
            if derived.digest and not _is_plain(manifest, path)
        ]
        for path in paths:
            try:
                load_leaves(resolve_leaves(root, manifest, [path]))
            except Damaged as error:
                findings.append(Finding(manifest.step, path, str(error)))
    return findings


# --- a scrub that goes on where it was ------------------------------------------------------------


def _sample(units: list[Lineage], wanted_bytes: float, rng: random.Random) -> list[Lineage]:
    """Units drawn at random until they have ``wanted_bytes``, in the order in which they lie."""
    chosen: set[int] = set()
    size = 0
    for number in rng.sample(range(len(units)), len(units)):
        if size >= wanted_bytes:
            break
        chosen.add(number)
        size += surveying.cost_bytes(units[number])
    return [units[number] for number in sorted(chosen)]


def _key(unit: Lineage) -> str:
    """What names a chain in a file of progress: no other has it, in this root or another, and it
    changes when the chain grows.
    """
    text = "\0".join([unit.path, *(segment.id for segment, _ in unit.links)])
    return str(xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass")))


class _Progress:
    """Which chains a scrub has gone through, in a file of the caller's, or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.done: set[str] = set()
        self.damaged: set[str] = set()
        self._saved = time.monotonic()
        if path is not None and path.exists():
            try:
                about = json.loads(path.read_bytes())["deltacheck_scrub"]
                self.done, self.damaged = (
                    set(map(str, about[name])) for name in ("done", "damaged")
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} is not the progress of a scrub: {type(error).__name__}: {error}. Name"
                    " another file"
                ) from None

    def note(self, key: str, is_whole: bool) -> None:
        (self.damaged if is_whole else self.done).discard(key)
        (self.done if is_whole else self.damaged).add(key)
        if time.monotonic() - self._saved > _NOTE_SECONDS:
            self.save()

    def begin_anew(self) -> None:
        """All has been gone through."""
        self.done.clear()
        self.save()

    def save(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.write_text(
            json.dumps(
                {"deltacheck_scrub": {"done": sorted(self.done), "damaged": sorted(self.damaged)}}
            )
        )
        beside.replace(self._path)
        self._saved = time.monotonic()
