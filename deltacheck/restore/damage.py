"""What a damaged restore says: which step, leaf and file are at fault, and which steps still
restore. And the way to those, if asked for.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from deltacheck.errors import Damaged, DeltacheckError, StepNotFound, UnsupportedFormat
from deltacheck.leaf import tiles
from deltacheck.restore import read
from deltacheck.restore.chain import resolve_chains
from deltacheck.store import layout
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, StepRef, way_out, whole_steps
from deltacheck.store.segment import Segment

log = logging.getLogger("deltacheck")

_T = TypeVar("_T")

_MOST_SEQ = 10**10  # above every sequence number


@contextmanager
def named(root: Root, manifest: Manifest) -> Iterator[None]:
    """Inside of it a ``Damaged`` names step, leaf and file, and ends with the steps that do not
    need what is damaged.
    """
    try:
        yield
    except Damaged as error:
        raise _named(root, manifest, error) from error


def _named(root: Root, manifest: Manifest, error: Damaged) -> Damaged:
    if error.leaf and not error.file:
        error = _located(root, manifest, error)
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
    found = whole_steps(
        root,
        lambda other, segments: other.seq == manifest.seq or _needs(other, segments, error.file),
    )
    return type(error)(
        f"step {manifest.step} of {root.path}: {text}. {way_out(found)}", file=error.file, leaf=leaf
    )


def _located(root: Root, manifest: Manifest, error: Damaged) -> Damaged:
    """The same damage, found in the file where it is: a digest at the end of a chain tells the leaf
    only.
    """
    if error.leaf not in manifest.stored:
        return error
    try:
        for _ in read.follow_links(resolve_chains(root, manifest, [error.leaf])):
            pass
    except Damaged as found:
        return found
    return error


def harmed_leaves(root: Root, manifest: Manifest, file: str) -> list[str]:
    """The leaves of a step that need an array or a file, as far as their tables can be read. Of one
    in tiles that some tile does.
    """
    segments: list[Segment] = []
    for ref in manifest.segments:
        try:
            segments.append(root.store.segment(ref))
        except Damaged:
            continue
    return list(dict.fromkeys(map(tiles.leaf_of, _leaves_of(manifest, segments, file))))


def _needs(manifest: Manifest, segments: Sequence[Segment], file: str) -> bool:
    """Whether a step needs an array or a file; ``True`` where that cannot be told."""
    name = _segment_of(file)
    if name is None:
        return True
    if name not in {segment.id for segment in segments}:
        return False
    return bool(_leaves_of(manifest, segments, file))


def _leaves_of(manifest: Manifest, segments: Sequence[Segment], file: str) -> list[str]:
    holder = next((segment for segment in segments if segment.id == _segment_of(file)), None)
    if holder is None:
        return []
    later = segments[segments.index(holder) + 1 :]
    return [
        path
        for path in holder.leaves_in(file)
        if path in manifest.stored
        and not any(
            path in other.table.leaves and other.table.leaves[path].is_whole for other in later
        )
    ]


def _segment_of(file: str) -> str | None:
    return next((part for part in Path(file).parts if layout.is_segment_id(part)), None)


def newest_whole(
    root: Root, step: int | str | None, restore: Callable[[Manifest], _T]
) -> tuple[Manifest, _T]:
    """``restore(manifest)`` of the asked step (by default the newest), or of the newest before it
    that
    is whole.

    Every step that is passed over is a warning in the log, and so is the step that is given in its
    place. Raises what the asked step raised where no earlier one restores either.
    """
    return newest_whole_of([root], step, lambda _, manifest: restore(manifest))


def newest_whole_of(
    roots: Sequence[Root], step: int | str | None, restore: Callable[[Root, Manifest], _T]
) -> tuple[Manifest, _T]:
    """``newest_whole`` of a run whose steps lie in several roots; of a step that more than one has,
    the first one's is tried first.
    """
    first: DeltacheckError | None = None
    for root, manifest in _merged(roots, step):
        if isinstance(manifest, Damaged | UnsupportedFormat):
            first = first or manifest
            log.warning("%s", manifest)
            continue
        try:
            value = restore(root, manifest)
        except Damaged as error:
            first = first or error
            log.warning("%s", error)
            continue
        if first is not None:
            asked = "the newest step" if step is None else f"step {step}"
            log.warning(
                "%s is damaged: step %d of %s is restored in its place",
                asked,
                manifest.step,
                root.path,
            )
        return manifest, value
    assert first is not None  # _from gives at least one
    raise first


_Found = tuple[int, Root, Manifest | Damaged | UnsupportedFormat]


def _merged(
    roots: Sequence[Root], step: int | str | None
) -> Iterator[tuple[Root, Manifest | Damaged | UnsupportedFormat]]:
    """What ``_from`` gives for each root, newest first. Raises ``StepNotFound`` where no root has
    the asked step.
    """
    missing: list[StepNotFound] = []

    def numbered(root: Root) -> Iterator[_Found]:
        seq = _MOST_SEQ  # what cannot be read keeps its place
        try:
            for manifest in _from(root, step):
                seq = manifest.seq if isinstance(manifest, Manifest) else seq
                yield seq, root, manifest
        except StepNotFound as error:
            missing.append(error)

    for _, root, manifest in heapq.merge(*map(numbered, roots), key=lambda one: -one[0]):
        yield root, manifest
    if len(missing) == len(roots):
        raise missing[0]


def _from(root: Root, step: int | str | None) -> Iterator[Manifest | Damaged | UnsupportedFormat]:
    """The asked step, then all that were saved before it, newest first; a manifest that cannot be
    read as its error.
    """
    item: str | None = None
    before: Callable[[StepRef], bool]
    try:
        asked = root.manifest(step)
    except (Damaged, UnsupportedFormat) as error:
        yield error
        before = (lambda ref: ref.step < step) if isinstance(step, int) else (lambda ref: True)
    else:
        yield asked
        item = next(
            (ref.manifest_path.parent.name for ref in root.checkpoints() if ref.seq == asked.seq),
            None,
        )
        before = lambda ref: ref.seq < asked.seq  # noqa: E731 - one of three
    for ref in reversed(root.checkpoints()):
        if before(ref) and (
            not root.is_manager_root or item in (None, ref.manifest_path.parent.name)
        ):
            try:
                yield root.read(ref.manifest_path)
            except FileNotFoundError:
                continue  # deleted since it was listed
