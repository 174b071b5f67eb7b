"""``prune`` and ``tag``: the commands that decide which steps and segments stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import TAG, Json, as_misuse, is_step, open_root, parse

if TYPE_CHECKING:
    from deltacheck.maintain.compaction import Compacted, Rewritten
    from deltacheck.policy import Keep, KeepBest
    from deltacheck.save.root_writer import Pruned
    from deltacheck.store.collect import Collected
    from deltacheck.store.lock.lease import Lease
    from deltacheck.store.roots.root import Root


@contextlib.contextmanager
def _open_for_writing(words: list[str] | None) -> Iterator[tuple[Root, Lease]]:
    """Open a root and hold its lease, so that no training writes to it meanwhile."""
    from deltacheck.store.files.storage import take_lease

    # All items of a manager root are opened: a segment that any of them needs must stay.
    root = open_root(words)
    lease = take_lease(root.store.path)
    try:
        yield root, lease
    finally:
        # The store is closed first: after the release another process may write to the root.
        root.store.close()
        lease.release()


_KeepLast: TypeAlias = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Keep the N newest steps.")
]
_KeepEvery: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Keep the steps whose number is a multiple of N."),
]
_KeepBest: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC[:MODE[:COUNT]]",
        help=(
            "Keep the COUNT steps (default: 1) with the best value of a metric. MODE is min"
            " (default) or max. May be repeated."
        ),
    ),
]
_FullLast: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help=(
            "Keep all leaves of the N newest steps and of tagged ones, and of all others only"
            " those of --keep-leaves."
        ),
    ),
]
_KeepLeaves: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Leaves that older steps keep (default: 'model/*'). May be repeated.",
    ),
]
_Whole: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--whole",
        help="Also write the newest step whole: it restores faster, and takes more bytes.",
    ),
]
_Compact: TypeAlias = Annotated[
    bool,
    typer.Option("--compact", help="Also rewrite segments of which only a few leaves are needed."),
]
_Grace: TypeAlias = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help=(
            "Remove a segment only this long after it was first found unneeded. Larger: slower"
            " restores can end; smaller: space is freed sooner."
        ),
    ),
]


def prune(  # noqa: PLR0913 - one argument per option
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROOT] [STEP]", help="The root, and the number of one step."),
    ] = None,
    keep_last: _KeepLast = None,
    keep_every: _KeepEvery = None,
    keep_best: _KeepBest = None,
    full_last: _FullLast = None,
    keep_leaves: _KeepLeaves = None,
    whole: _Whole = False,
    compact: _Compact = False,
    grace: _Grace = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; print what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a step, or the steps that no rule and no tag keeps, and segments that no step needs.

    Without a step and a rule, no step is deleted. Refused while a training writes to the root, if
    the step has a tag, and if no other step is left to restore.
    """
    from deltacheck.errors import Damaged
    from deltacheck.policy import Keep
    from deltacheck.store.collect import Collected

    if keep_leaves and full_last is None:
        raise typer.BadParameter("--keep-leaves goes with --full-last")
    keep = Keep(
        last=keep_last,
        every=keep_every,
        best=tuple(map(_parse_best, keep_best or ())),
        full_last=full_last,
        leaves=tuple(keep_leaves or Keep.LEAVES),
    )
    has_rules = not (keep.all_steps and keep.all_leaves)
    selection = parse(words, max_steps=1)
    if selection.steps and has_rules:
        raise typer.BadParameter("give either a step or rules")
    deletes = bool(selection.steps) or has_rules
    with _open_for_writing([selection.root]) as (root, lease):
        pruned = _delete(root, lease, selection.steps, keep, dry_run)
        try:
            freed = _free(root, lease, whole, compact, grace, dry_run)
        except Damaged as error:
            if whole or compact or not deletes:
                raise
            # Steps were deleted all the same, which is the result.
            output.warn(str(error))
            freed = _Freed(Collected((), (), 0))
    if as_json:
        result = asdict(pruned) | asdict(freed) | asdict(freed.collected)
        del result["collected"]
        output.print_json(
            {"root": str(root.path), "dry_run": dry_run, "grace_seconds": grace, **result}
        )
        return
    if deletes:
        _print_pruned(pruned, keep, dry_run)
    if whole:
        output.print_line(_wholeness(freed.compacted, dry_run))
    _print_collected(freed, grace, dry_run)


@dataclass(frozen=True, slots=True)
class _Freed:
    """The work on the segments of a root; see the functions of ``maintain.compaction``."""

    collected: Collected
    compacted: Compacted | None = None
    rewritten: tuple[Rewritten, ...] = ()


def _free(
    root: Root, lease: Lease, whole: bool, compact: bool, grace: float, dry_run: bool
) -> _Freed:
    """Remove the segments that no step needs, after those that are rewritten."""
    from deltacheck.maintain import compaction
    from deltacheck.store.collect import collect

    # Segments are written before the collection, which can then remove the old ones in the same
    # run.
    compacted = compaction.compact(root) if whole and not dry_run else None
    rewritten = compaction.reclaim(root, dry_run=dry_run) if compact else ()
    collected = collect(
        root,
        grace_seconds=grace,
        dry_run=dry_run,
        # The writer of a manager root may be another library. Segments that are newer than every
        # step may then belong to a save in progress.
        writer_is_dead=not root.is_manager_root,
        still_ours=lease.check,
    )
    return _Freed(collected, compacted, rewritten)


def _wholeness(result: Compacted | None, dry_run: bool) -> str:
    """Return the effect of ``--whole`` in words."""
    if dry_run:
        return "leaves with deltas of the newest step would be written whole"
    if result is None:
        return "the newest step has no deltas"
    return (
        f"step {result.step}: {result.leaves} leaves written whole"
        f" ({output.size(result.stored_bytes)}); a restore applies no deltas instead of"
        f" {result.deltas}"
    )


def _delete(
    root: Root, lease: Lease, steps: Sequence[int | str | None], keep: Keep, dry_run: bool
) -> Pruned:
    """Delete the step that is given, if one is, else the steps that no rule keeps."""
    from deltacheck.save import root_writer

    if not steps:
        return root_writer.prune(root, keep, dry_run=dry_run, still_ours=lease.check)
    (step,) = steps
    # ``latest`` and a tag may mean another step by the time that the lease is held.
    if not isinstance(step, int):
        raise typer.BadParameter("name the step to delete by its number")
    if root.steps() == [step]:
        raise typer.BadParameter(
            f"step {step} is the only one of {root.path}, and nothing could be restored without"
            " it; remove the root itself if you need none of it"
        )
    return root_writer.delete(root, step, dry_run=dry_run, still_ours=lease.check)


def _print_pruned(result: Pruned, keep: Keep, dry_run: bool) -> None:
    deleted = "would be deleted" if dry_run else "deleted"
    for checkpoint in result.deleted:
        output.print_line(f"step {checkpoint.step} (seq {checkpoint.seq}) {deleted}")
    total = len(result.deleted) + len(result.kept)
    output.print_line(f"{len(result.deleted)} of {total} checkpoints {deleted}")
    if not keep.all_leaves:
        verb = "would keep" if dry_run else "keep"
        output.print_line(
            f"{output.count(len(result.partial), 'checkpoint')} {verb}"
            f" only {', '.join(keep.patterns)}"
        )


def _print_collected(freed: _Freed, grace: float, dry_run: bool) -> None:
    result = freed.collected
    for segment in freed.rewritten:
        output.print_line(
            f"{segment.old} ({output.size(segment.old_bytes)}) {'would be' if dry_run else 'was'}"
            f" rewritten: {segment.leaves} of its leaves are needed"
            f" ({output.size(segment.new_bytes)})"
        )
    removed = "would be removed" if dry_run else "removed"
    for name in result.removed:
        output.print_line(f"{name} {removed}")
    for name in result.waiting:
        output.print_line(f"{name} waits: it was found unneeded less than {grace:g} s ago")
    for name in result.in_use:
        output.print_line(f"{name} waits: a reader has it open")
    output.print_line(
        f"{len(result.removed)} segments {removed}, {output.size(result.freed_bytes)} freed;"
        f" {len(result.waiting) + len(result.in_use)} unneeded segments wait"
        + (f", run prune again in {grace:g} s" if result.waiting else "")
    )


def _parse_best(text: str) -> KeepBest:
    from deltacheck.policy import KeepBest

    metric, _, rest = text.partition(":")
    mode, _, count = rest.partition(":")
    try:
        return KeepBest(metric, int(count or 1), mode or "min")
    except ValueError:
        # ``KeepBest`` checks mode and count by itself, so all mistakes end here.
        raise typer.BadParameter(
            f"{text!r} is not METRIC[:MODE[:COUNT]], such as loss:min:3"
        ) from None


def tag(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROOT] STEP NAME", help="The last word is the tag."),
    ] = None,
    move: Annotated[
        bool, typer.Option("--move", help="Move the tag if another step already has it.")
    ] = False,
    delete: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Remove this tag; its step stays until it is deleted itself."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give a step a name, or take one away.

    Restore the step by this name. The step is kept until the tag is removed. May run beside a
    training.
    """
    from deltacheck.store.roots import opening, tagging

    if delete is not None:
        if move:
            raise typer.BadParameter("--move does not go with --delete")
        root, name = open_root(words), delete.removeprefix(TAG)
        tagging.remove(root, name)
        output.print_result({"root": str(root.path), "removed": name}, f"tag @{name} removed")
        return
    if not words:
        raise typer.BadParameter("this command takes a step and a name")
    if is_step(words[-1]) and not any(map(is_step, words[:-1])):
        raise typer.BadParameter(f"the name of the tag is missing after {words[-1]!r}")
    # The name is the last word, because it may look like a root.
    selection = parse(words[:-1], min_steps=1, max_steps=1)
    # No lease: tags have a lock of their own, so a step can be tagged beside a training.
    root = opening.open_root(selection.root)
    with as_misuse():
        new_tag = tagging.put(root, selection.steps[0], words[-1], move=move)
    output.print_result(
        {"root": str(root.path), "tag": new_tag.name, "step": new_tag.step, "seq": new_tag.seq},
        f"step {new_tag.step} (seq {new_tag.seq}) is @{new_tag.name}",
    )
