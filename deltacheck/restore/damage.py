"""Complete the errors of a damaged restore, and fall back to an earlier step.

An error names the step, the leaf and the file at fault, and the steps that do not need them.
"""

from __future__ import annotations

import heapq
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from deltacheck.errors import (
    Damaged,
    DeltacheckError,
    StepNotFound,
    StorageFailed,
    UnsupportedFormat,
)
from deltacheck.leaf import tiles
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.store import layout
from deltacheck.store.manifest import LeafEntry, Manifest
from deltacheck.store.roots.root import Root, StepRef, whole_steps
from deltacheck.store.roots.wording import way_out
from deltacheck.store.segment import Segment

log = logging.getLogger("deltacheck")

_T = TypeVar("_T")

_MOST_SEQ = 10**10  # above every sequence number, which has at most ten digits


@contextmanager
def named(root: Root, manifest: Manifest) -> Iterator[None]:
    """Complete each ``Damaged`` that is raised in the block.

    The message then names step, leaf and file, and the steps that do not need the damaged file.
    """
    try:
        yield
    except Damaged as error:
        named_error = _named(root, manifest, error)
        # A read that failed refers to its error, and the error's frames to the read. This cycle
        # would keep the segments pinned, and the memory of the restore, until Python's garbage
        # collector runs.
        traceback.clear_frames(error.__traceback__)
        raise named_error from error
    except StorageFailed as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _named(root: Root, manifest: Manifest, error: Damaged) -> Damaged:
    """Return an error of the same class with the completed message."""
    if error.leaf and not error.file:
        error = _located(root, manifest, error)
    # Whoever raised the error may have named the leaf or the file already. Each is named once.
    text = str(error)
    if error.file and error.file not in text:
        text = f"{text} ({error.file})"
    leaf = tiles.leaf_of(error.leaf)
    harmed = [leaf] if leaf else harmed_leaves(root, manifest, error.file)
    if harmed and repr(harmed[0]) not in text and (not error.leaf or repr(error.leaf) not in text):
        text = (
            f"leaf {harmed[0]!r}{f' and {len(harmed) - 1} others' if len(harmed) > 1 else ''}:"
            f" {text}"
        )
    whole_refs = whole_steps(
        root,
        lambda candidate, segments: (
            candidate.seq == manifest.seq or _needs(candidate, segments, error.file)
        ),
    )
    # The class stays, so that a caller may still catch `ChainBroken` or `DamagedStream` alone.
    return type(error)(
        f"step {manifest.step} of {root.path}: {text}. {way_out(whole_refs)}",
        file=error.file,
        leaf=leaf,
    )


def _located(root: Root, manifest: Manifest, error: Damaged) -> Damaged:
    """Find the file of a damage of which only the leaf is known.

    The digests at the end of a chain prove that a leaf is damaged, but not in which link.
    """
    if error.leaf not in manifest.stored:
        return error
    try:
        for _ in read.follow_links(resolve_chains(root, manifest, [error.leaf])):
            pass
    except Damaged as located:
        return located
    # No link is damaged by itself, so only the leaf is known.
    return error


def harmed_leaves(root: Root, manifest: Manifest, file: str) -> list[str]:
    """Return the leaves of a step that need a file or an array, as far as tables can be read.

    A leaf in tiles is returned if one of its tiles needs the file.
    """
    segments: list[Segment] = []
    for ref in manifest.segments:
        try:
            segments.append(root.store.segment(ref))
        # The tables that can be read still name the leaves that need the file.
        except Damaged:
            continue
    return list(dict.fromkeys(map(tiles.leaf_of, _leaves_of(manifest, segments, file))))


def _needs(manifest: Manifest, segments: Sequence[Segment], file: str) -> bool:
    """Return True if a step needs a file or an array, or if that is unknown."""
    # Without a segment the damage may concern any step, so none is called whole.
    name = _segment_of(file)
    if name is None:
        return True
    if name not in {segment.id for segment in segments}:
        return False
    return bool(_leaves_of(manifest, segments, file))


def _leaves_of(manifest: Manifest, segments: Sequence[Segment], file: str) -> list[str]:
    """Return the stored paths that need a file, and that no later segment replaces."""
    holder = next((segment for segment in segments if segment.id == _segment_of(file)), None)
    if holder is None:
        return []
    later_segments = segments[segments.index(holder) + 1 :]
    return [
        path
        for path in holder.leaves_in(file)
        if path in manifest.stored
        and not any(
            path in successor.table.leaves and _replaces(successor.table.leaves[path], holder.id)
            for successor in later_segments
        )
    ]


def _replaces(entry: LeafEntry, segment_id: str) -> bool:
    """Return True if an entry stands in place of the leaf's entry in an earlier segment."""
    return entry.is_whole or 0 <= entry.since <= layout.seq_of(segment_id)


def _segment_of(file: str) -> str | None:
    """Return the identifier of the segment that a file belongs to, if any."""
    return next((part for part in Path(file).parts if layout.is_segment_id(part)), None)


def newest_whole(
    roots: Sequence[Root], step: int | str | None, restore: Callable[[Root, Manifest], _T]
) -> tuple[Manifest, _T]:
    """Restore a step, or the newest whole step before it.

    Each skipped step and the step that is restored instead are logged as warnings.

    Args:
        roots: The roots of the run. If several have a step, the first is tried first.
        step: A step number or a tag; ``None``: the newest step.
        restore: Restores a step.

    Returns:
        The manifest of the restored step and the result of ``restore``.

    Raises:
        DeltacheckError: The error of the requested step, if no earlier step restores either.
    """
    first: DeltacheckError | None = None
    for root, manifest in _merged(roots, step):
        if isinstance(manifest, Damaged | UnsupportedFormat):
            # The first error is the one of the requested step. It is raised if no other step
            # restores.
            first = first or manifest
            log.warning("%s", manifest)
            continue
        try:
            value = restore(root, manifest)
        # Other errors, such as an exceeded budget, are no reason for an earlier step.
        except Damaged as error:
            first = first or error
            log.warning("%s", str(error))
            continue
        if first is not None:
            requested = "the newest step" if step is None else f"step {step}"
            log.warning(
                "%s is damaged: step %d of %s is restored in its place",
                requested,
                manifest.step,
                root.path,
            )
        return manifest, value
    assert first is not None  # _from yields at least one item, or raises
    raise first


_Numbered = tuple[int, Root, Manifest | Damaged | UnsupportedFormat]


def _merged(
    roots: Sequence[Root], step: int | str | None
) -> Iterator[tuple[Root, Manifest | Damaged | UnsupportedFormat]]:
    """Yield the results of ``_from`` for all roots, newest first.

    Raises:
        StepNotFound: No root has the requested step.
    """
    missing: list[StepNotFound] = []

    def numbered(root: Root) -> Iterator[_Numbered]:
        # A manifest that cannot be read keeps the position of the one before it.
        seq = _MOST_SEQ
        try:
            for manifest in _from(root, step):
                seq = manifest.seq if isinstance(manifest, Manifest) else seq
                yield seq, root, manifest
        except StepNotFound as error:
            missing.append(error)

    # The merge is lazy: earlier steps are looked up only if a later one does not restore. It is
    # stable, so of several roots with a step the first one is tried first.
    for _, root, manifest in heapq.merge(*map(numbered, roots), key=lambda item: -item[0]):
        yield root, manifest
    if len(missing) == len(roots):
        raise missing[0]


def _from(root: Root, step: int | str | None) -> Iterator[Manifest | Damaged | UnsupportedFormat]:
    """Yield a step and the steps that were saved before it, newest first.

    A manifest that cannot be read is yielded as its error.
    """
    item: str | None = None
    before: Callable[[StepRef], bool]
    try:
        requested = root.manifest(step)
    except (Damaged, UnsupportedFormat) as error:
        yield error
        # The sequence number of an unreadable manifest is unknown, so its step must do.
        before = (lambda ref: ref.step < step) if isinstance(step, int) else (lambda ref: True)
    else:
        yield requested
        item = next(
            (
                ref.manifest_path.parent.name
                for ref in root.checkpoints()
                if ref.seq == requested.seq
            ),
            None,
        )
        before = lambda ref: ref.seq < requested.seq  # noqa: E731 - one of three
    for ref in reversed(root.checkpoints()):
        # A manager root may have several items. A step of another item is no substitute.
        if before(ref) and (
            not root.is_manager_root or item in (None, ref.manifest_path.parent.name)
        ):
            try:
                yield root.read(ref.manifest_path)
            except (FileNotFoundError, Damaged, UnsupportedFormat):
                continue  # deleted since it was listed, or no manifest but for its checksum
