"""Check committed steps. Findings name the step, the file and the leaf. Nothing is written.

Tables and metadata are read once, whatever number of steps shares them. A deep check follows each
chain once from its keyframe, and compares the leaf after every delta. It thereby proves the leaf in
every step on the chain, and applies no delta twice.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from deltacheck.codec import derivation
from deltacheck.codec.base import U8
from deltacheck.codec.derivation import Derived
from deltacheck.errors import Damaged, StorageFailed, UnsupportedFormat
from deltacheck.leaf import limits, tiles
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.maintain.scrub import ScrubProgress, lineage_key, sample
from deltacheck.maintain.survey import (
    Lineage,
    Survey,
    Use,
    batches,
    cost_bytes,
    proven_digests,
    survey,
    tables,
)
from deltacheck.restore import read
from deltacheck.restore.resolve import resolve_leaves
from deltacheck.restore.values import load_leaves
from deltacheck.store import documents
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root
from deltacheck.store.segment import Segment

# Size of the leaves that are read together. Larger: fewer and longer reads, but more memory.
BATCH_BYTES = 32 << 20

# A function that opens a progress display for a number of decoded bytes. The display is called with
# the number of bytes that were read since the last call.
Display: TypeAlias = Callable[[int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check found.

    Attributes:
        step: The training step that has the problem, ``None`` if its manifest cannot be read.
        leaf: Path of the leaf, ``None`` if the problem is not one of a single leaf.
        problem: Description, with the file.
        redundant: If true, a restore of the step gives the saved state all the same.
            ``deltacheck repair`` writes such files again.
    """

    step: int | None
    leaf: str | None
    problem: str
    redundant: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a check.

    Attributes:
        findings: The damage: a restore of the step, or of the leaf, is refused.
        manifests: Manifests of the checked steps, in ascending order of their sequence numbers.
        checked_bytes: Decoded bytes that were read and compared.
        all_bytes: Decoded bytes of all chains.
        remaining_bytes: Decoded bytes that later runs with the same progress file will read.
        seed: Seed of the sample, ``None`` without one.
        redundant: Damage to files that no restore needs.
    """

    findings: tuple[Finding, ...]
    manifests: tuple[Manifest, ...]
    checked_bytes: int = 0
    all_bytes: int = 0
    remaining_bytes: int = 0
    seed: int | None = None
    redundant: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], manifests: Iterable[Manifest], **read: Any) -> Self:
        """Return the result of a check, with each finding once and in its place."""
        unique = list(dict.fromkeys(findings))
        damage, redundant = (
            tuple(finding for finding in unique if finding.redundant is kind)
            for kind in (False, True)
        )
        return cls(damage, tuple(manifests), redundant=redundant, **read)


def verify(root: Root, step: int | str | None = None, *, deep: bool = False) -> list[Finding]:
    """Check the steps of a root (default: all) as ``check`` does, and return the findings."""
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
    """Check the steps of a root.

    Args:
        root: Root to read.
        step: The step to check. Default: all steps.
        deep: If false, only tables and metadata are read. If true, every byte is read, decoded and
            compared, which takes as long as a restore of all chains.
        subset: Read only this share (0 to 1) of the bytes, whole chains that are drawn at random.
            Smaller: a faster check that finds damage later.
        seed: Seed of the draw. Default: a different one for each run.
        resume: A file that records the chains that were checked. The next run with this file
            checks the others, and after all were checked it starts again: with ``subset=0.1``, ten
            runs check everything. Chains that have grown since, and damaged ones, are read in
            every run.
        display: A progress display. Default: none.

    Returns:
        The findings, and the number of bytes read.

    Raises:
        StepNotFound: If there is no such step, and no manifest is damaged.
        BudgetExceeded: If the steps name more than the limits of the call allow (``Limits``).
        ValueError: If ``subset`` is out of range, or ``resume`` is another kind of file.
    """
    if subset is not None and not 0 < subset <= 1:
        raise ValueError(f"subset must be more than 0 and at most 1, not {subset}")
    # Manifests that this process has read before would be answered from memory, and not be checked.
    root = root.afresh()
    manifests, findings = _manifests(root, step)
    chains = survey(root, manifests)
    findings += _check_tables(root, manifests, chains)
    if not deep and subset is None and resume is None:
        findings += _check_sizes(root, chains)
        return Verified.of(findings, manifests)
    if seed is None and subset is not None:
        # The operating system's numbers: a training may have seeded Python's generator, and every
        # run would draw the same chains.
        seed = random.SystemRandom().randrange(1 << 32)
    progress = ScrubProgress(None if resume is None else Path(resume))
    choice = _choose(chains, progress, subset, seed)
    findings += _check_data(root, manifests, chains, choice.lineages, progress, display)
    # These leaves have no chain of their own, so they are read once for each complete pass.
    if choice.remaining_bytes == 0:
        findings += _check_indirect(root, manifests)
        progress.restart()
    # The walk reports errors of the tables that the shallow check has already found.
    return Verified.of(
        findings,
        manifests,
        checked_bytes=sum(map(cost_bytes, choice.lineages)),
        all_bytes=choice.all_bytes,
        remaining_bytes=choice.remaining_bytes,
        seed=seed,
    )


def damage(root: Root, manifests: Sequence[Manifest], chains: Survey) -> tuple[Finding, ...]:
    """Read every byte of steps, and return the damage for which a restore is refused.

    Args:
        root: Root to read.
        manifests: The steps.
        chains: Their chains.
    """
    findings = [
        *_check_tables(root, manifests, chains),
        *_check_data(root, manifests, chains, _in_order_of_files(chains), ScrubProgress(None)),
        *_check_indirect(root, manifests),
    ]
    return Verified.of(findings, manifests).findings


class _Choice(NamedTuple):
    """The chains that a deep check reads.

    Attributes:
        lineages: The chains.
        all_bytes: Decoded bytes of all chains of the steps.
        remaining_bytes: Decoded bytes of those that later runs will read.
    """

    lineages: list[Lineage]
    all_bytes: int
    remaining_bytes: int


def _in_order_of_files(chains: Survey) -> list[Lineage]:
    """Return all chains in the order of their files on the disk, so that reads are sequential."""
    return sorted(chains.lineages, key=lambda lineage: (lineage.links[0][0].id, lineage.path))


def _choose(
    chains: Survey, progress: ScrubProgress, subset: float | None, seed: int | None
) -> _Choice:
    """Return the chains to read: those that no run has read, or a sample, and damaged ones."""
    lineages = _in_order_of_files(chains)
    total = sum(map(cost_bytes, lineages))
    damaged = [lineage for lineage in lineages if lineage_key(lineage) in progress.damaged]
    checked = progress.sound | progress.damaged
    remaining = [lineage for lineage in lineages if lineage_key(lineage) not in checked]
    remaining_bytes = sum(map(cost_bytes, remaining))
    if subset is not None:
        remaining = sample(remaining, subset * total, random.Random(seed))
    remaining_bytes -= sum(map(cost_bytes, remaining))
    # Damaged chains are read in every run, so that every run reports them.
    return _Choice(remaining + damaged, total, remaining_bytes)


def _check_data(
    root: Root,
    manifests: Iterable[Manifest],
    chains: Survey,
    lineages: Sequence[Lineage],
    progress: ScrubProgress,
    display: Display | None = None,
) -> list[Finding]:
    """Read some chains of steps, record each in the progress, and return the damage."""
    size = sum(map(cost_bytes, lineages))
    limits.check_bytes(
        root.store.path, (ref.id for ref in chains.segments), size, f"the data of {root.path}"
    )
    derived = _Derived.of(manifests)
    findings: list[Finding] = []
    try:
        with nullcontext(lambda advance: None) if display is None else display(size) as advance:
            for lineage, error in _read_all(lineages, derived):
                progress.record(lineage_key(lineage), error is None)
                if error is not None:
                    findings += _harm(lineage, error)
                advance(cost_bytes(lineage))
    finally:
        # This also happens after an interrupt, so that the next run continues from here.
        progress.save()
    return findings + derived.findings


def _manifests(root: Root, step: int | str | None) -> tuple[list[Manifest], list[Finding]]:
    """Return the manifests to check, and findings for those that cannot be read."""
    if step is not None:
        # If manifests cannot be read, the step may be one of those.
        with suppress(Damaged, UnsupportedFormat):
            return [root.manifest(step)], []
    manifests, damaged = root.manifests()
    unreadable = [Finding(None, None, str(error)) for _, error in sorted(damaged.items())]
    return [] if step is not None else list(manifests.values()), unreadable


# --- tables and metadata --------------------------------------------------------------------------


def _check_tables(root: Root, manifests: Iterable[Manifest], chains: Survey) -> list[Finding]:
    findings: list[Finding] = []
    group_problems = [
        problem
        for path in root.store.group_paths()
        if (problem := group_problem(path / "zarr.json")) is not None
    ]
    metadata = {ref: [*wrong_documents(segment)] for ref, segment in chains.segments.items()}
    for manifest in manifests:
        # If a table is lost, the metadata below it cannot be judged.
        lost = [str(chains.lost[ref]) for ref in manifest.segments if ref in chains.lost]
        problems = lost or [
            *group_problems,
            *(problem for ref in manifest.segments for *_, problem in metadata[ref]),
        ]
        # deltacheck reads no array by its own metadata, so only a lost table costs the step.
        findings += [
            Finding(manifest.step, None, problem, redundant=not lost) for problem in problems
        ]
        for path, contract in manifest.contracts.items():
            # ``not <=`` also catches NaN.
            if not contract.used(manifest.step) <= 1:
                problem = (
                    f"its contract allows {contract.allowed}, but {contract.measured:.4g} was"
                    " measured"
                )
                findings.append(Finding(manifest.step, path, problem))
    findings += [
        _finding(broken.manifest.step, broken.path, broken.error) for broken in chains.broken
    ]
    for lineage in chains.lineages:
        limits.check_time()
        digests, error = tables(lineage)
        if error is not None:
            harmed = (use for use in lineage.uses if use.links > len(digests))
            findings += _judged(lineage, harmed, error)
    return findings


def _check_sizes(root: Root, chains: Survey) -> Iterator[Finding]:
    """Yield the damage to files of segments that have other sizes than when they were committed.

    Only the sum of the sizes of a segment is recorded, and a repair may have changed redundant
    files. So the leaves of such a segment are read, each with its chain.
    """
    resized = {
        ref.id
        for ref in chains.segments
        if root.store.segment_bytes(ref.id) not in (None, ref.stored_bytes)
    }
    for lineage in chains.lineages:
        if resized.isdisjoint(segment.id for segment, _ in lineage.links):
            continue
        for _, error in _read([lineage], _Derived.of(())):
            if error is not None:
                yield from _harm(lineage, error)


def _judged(lineage: Lineage, uses: Iterable[Use], error: Damaged) -> list[Finding]:
    """Return the findings of the steps that need a damaged link.

    The content decides if the steps have lost the leaf. It is read only now that there is damage.
    """
    proven = proven_digests(lineage)
    return [_finding(use.step, lineage.path, error, redundant=use.links in proven) for use in uses]


def _finding(step: int, stored_path: str, error: Damaged, *, redundant: bool = False) -> Finding:
    """Return a finding of a leaf. If the leaf is in tiles, the text names the tile."""
    return Finding(step, tiles.leaf_of(stored_path), str(error), redundant)


def wrong_documents(segment: Segment) -> Iterator[tuple[Place, bytes, str]]:
    """Yield the directories of a segment whose ``zarr.json`` is wrong, its content, the problem.

    deltacheck reads the tables only, but plain zarr reads the metadata, as the tables imply it.
    """
    groups = segment.group_paths()
    for path, content in segment.documents().items():
        file = path / "zarr.json"
        problem = group_problem(file) if path in groups else _metadata_problem(file, content)
        if problem is not None:
            yield path, content, problem


def group_problem(path: Place) -> str | None:
    """Return the problem of a file that must be the metadata of a zarr group, if there is one."""
    return _problem(
        path,
        lambda group: (group["zarr_format"], group["node_type"]) == (3, "group"),
        "is not the metadata of a zarr group: plain zarr cannot open what is below it",
    )


def _metadata_problem(path: Place, expected: bytes) -> str | None:
    return _problem(
        path,
        lambda array: _normalize(array) == _normalize(json.loads(expected)),
        "is not the metadata that was written: plain zarr would read the array wrongly",
    )


def _problem(path: Place, is_right: Callable[[Any], bool], otherwise: str) -> str | None:
    try:
        if is_right(json.loads(arrays.read_file(path, documents.MAX_DOCUMENT_BYTES))):
            return None
    except StorageFailed:
        # A storage that does not answer says nothing of the file, so this is no finding.
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError, Damaged) as error:
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    return f"{path} {otherwise}"


def _normalize(value: object) -> object:
    """Remove differences of metadata that have no meaning: TensorStore does not write defaults."""
    if isinstance(value, dict):
        defaults = {"index_location": "end", "checksum": False}
        return {
            key: _normalize(item)
            for key, item in sorted(value.items())
            if not (key in defaults and item == defaults[key]) and item not in ({}, None)
        }
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    return value


# --- data -----------------------------------------------------------------------------------------


def _read_all(
    lineages: Iterable[Lineage], derived: _Derived
) -> Iterator[tuple[Lineage, Damaged | None]]:
    """Follow chains, as many at a time as memory permits, and yield each with its error."""
    for batch in batches(lineages, BATCH_BYTES):
        yield from _read(batch, derived)


def _harm(lineage: Lineage, error: Damaged) -> list[Finding]:
    """Return the findings of the steps that need the link whose file is damaged."""
    return _judged(lineage, lineage.harmed(_segment_of(error.file, lineage)), error)


def _read(batch: list[Lineage], derived: _Derived) -> Iterator[tuple[Lineage, Damaged | None]]:
    """Follow some chains, and yield each with its error if it is damaged.

    They are followed together, which is faster. If one of them is damaged, each is followed alone,
    to find out which.
    """
    try:
        _follow(batch, derived)
    except Damaged as error:
        if len(batch) == 1:
            yield batch[0], error
            return
        for lineage in batch:
            yield from _read([lineage], derived)
    else:
        yield from ((lineage, None) for lineage in batch)


def _follow(batch: list[Lineage], derived: _Derived) -> None:
    # Tables are checked before the walk: it would report damage of a table at a later link.
    for lineage in batch:
        error = tables(lineage).error
        if error is not None:
            raise error
    for _, entries, content in read.follow_links(
        {lineage.path: lineage.chain() for lineage in batch}
    ):
        for path, data in content.items():
            derived.compare(entries[path].spec(path), entries[path].digest, data)


def _segment_of(file: str, lineage: Lineage) -> str:
    """Return the segment of a lineage that holds a file, or the first one if none does."""
    return next(
        (segment.id for segment, _ in lineage.links if segment.id in Path(file).parts),
        lineage.links[0][0].id,
    )


@dataclass(slots=True)
class _Derived:
    """Leaves that a step derives from one stored leaf, and whose digest it has.

    They are compared when the walk passes the stored leaf, so that nothing is read twice.

    Attributes:
        by_source: Path and digest of the stored leaf -> path, derivation and step of each leaf.
        findings: The problems so far.
    """

    by_source: dict[tuple[str, str], list[tuple[str, Derived, int]]]
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> _Derived:
        """Return the derived leaves of some steps."""
        by_source: dict[tuple[str, str], list[tuple[str, Derived, int]]] = {}
        for manifest in manifests:
            for path, derived in manifest.derived.items():
                if _is_direct(manifest, path):
                    digest = manifest.stored[derived.of].digest
                    by_source.setdefault((derived.of, digest), []).append(
                        (path, derived, manifest.step)
                    )
        return cls(by_source)

    def compare(self, source: LeafSpec, digest: str, data: U8) -> None:
        """Compare the leaves that derive from a leaf with this content."""
        # Many steps may share a derived leaf: it is computed once for each recorded digest.
        groups: dict[tuple[str, str], list[tuple[Derived, int]]] = {}
        for path, derived, step in self.by_source.pop((source.path, digest), ()):
            groups.setdefault((path, derived.digest), []).append((derived, step))
        for (path, recorded_digest), uses in groups.items():
            derived = uses[0][0]
            spec = LeafSpec.of(path, derived.shape, derived.dtype)
            elements = data.view(source.element.numpy)
            values = derivation.compute(derived, None, elements, 0)
            computed_digest = digest_of(spec, values.view(np.uint8))
            if computed_digest != recorded_digest:
                problem = (
                    f"it is derived from leaf {source.path!r} by {derived.how}, which gives digest"
                    f" {computed_digest}, but {recorded_digest} was saved"
                )
                self.findings += [Finding(step, path, problem) for _, step in uses]


def _is_direct(manifest: Manifest, path: str) -> bool:
    """Return whether a leaf of a step is derived from one stored leaf alone."""
    derived = manifest.derived[path]
    return (
        bool(derived.digest)
        and derived.of in manifest.stored
        and derived.of not in manifest.derived
        and path not in manifest.stored
    )


def _check_indirect(root: Root, manifests: Iterable[Manifest]) -> list[Finding]:
    """Check leaves that derive from several stored leaves, from derived ones, or tile by tile.

    They are rare, so they are simply loaded as a restore does.
    """
    findings = []
    for manifest in manifests:
        paths = [
            path
            for path, derived in manifest.derived.items()
            if derived.digest and not _is_direct(manifest, path)
        ]
        # Tiles that are not stored have the digests of their content.
        paths += [path for path, cut in manifest.tiles.items() if not all(cut.codes)]
        for path in paths:
            try:
                load_leaves(resolve_leaves(root, manifest, [path]))
            except Damaged as error:
                findings.append(Finding(manifest.step, path, str(error)))
    return findings
