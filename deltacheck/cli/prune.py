"""``prune`` and ``tag``: the commands that decide which steps and segments stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import TAG, Json, is_step, open_root, parse

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


def prune(  # noqa: PLR0913 - one argument per option
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROOT] [STEP]", help="The root, and the number of one step."),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N newest steps.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep the steps whose number is a multiple of N."),
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:MODE[:COUNT]]",
            help=(
                "Keep the COUNT steps (default: 1) with the best value of a metric. MODE is min"
                " (default) or max. May be repeated."
            ),
        ),
    ] = None,
    full_last: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=(
                "Keep all leaves of the N newest steps and of tagged ones, and of all others only"
                " those of --keep-leaves."
            ),
        ),
    ] = None,
    keep_leaves: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leaves that older steps keep (default: 'model/*'). May be repeated.",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Also write the newest step whole: it restores faster, and takes more bytes.",
        ),
    ] = False,
    compact: Annotated[
        bool,
        typer.Option(
            "--compact", help="Also rewrite segments of which only a few leaves are needed."
        ),
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help=(
                "Remove a segment only this long after it was first found unneeded. Larger:"
                " slower restores can end; smaller: space is freed sooner."
            ),
        ),
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; print what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a step, or the steps that no rule and no tag keeps, and segments that no step needs.

    Without a step and a rule, no step is deleted. Refused while a training writes to the
    root, if the step has a tag, and if no other step is left to restore.
    """
    from deltacheck.errors import Damaged
    from deltacheck.maintain import compaction
    from deltacheck.policy import Keep
    from deltacheck.save import root_writer
    from deltacheck.store.collect import Collected, collect

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
    compacted: Compacted | None = None
    rewritten: tuple[Rewritten, ...] = ()
    with _open_for_writing([selection.root]) as (root, lease):
        if selection.steps:
            step = _only_number(root, selection.steps[0])
            pruned = root_writer.delete(root, step, dry_run=dry_run, still_ours=lease.check)
        else:
            pruned = root_writer.prune(root, keep, dry_run=dry_run, still_ours=lease.check)
        try:
            # Segments are written before the collection, which can then remove the old ones in the
            # same run.
            if whole and not dry_run:
                compacted = compaction.compact(root)
            if compact:
                rewritten = compaction.reclaim(root, dry_run=dry_run)
            # The writer of a manager root may be another library. Segments that are newer than
            # every step may then belong to a save in progress.
            collected = collect(
                root,
                grace_seconds=grace,
                dry_run=dry_run,
                writer_is_dead=not root.is_manager_root,
                still_ours=lease.check,
            )
        except Damaged as error:
            if whole or compact or not (selection.steps or has_rules):
                raise
            # Steps were deleted all the same, which is the result.
            output.warn(str(error))
            collected = Collected((), (), 0)
    if as_json:
        output.print_json(
            {
                "root": str(root.path),
                "dry_run": dry_run,
                **asdict(pruned),
                "compacted": None if compacted is None else asdict(compacted),
                "grace_seconds": grace,
                **asdict(collected),
                "rewritten": [asdict(segment) for segment in rewritten],
            }
        )
        return
    if selection.steps or has_rules:
        _print_pruned(pruned, keep, dry_run)
    if whole:
        output.print_line(_wholeness(compacted, dry_run))
    _print_collected(collected, rewritten, grace, dry_run)


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


def _only_number(root: Root, step: int | str | None) -> int:
    """Return the number of the step to delete."""
    # ``latest`` and a tag may mean another step by the time that the lease is held.
    if not isinstance(step, int):
        raise typer.BadParameter("name the step to delete by its number")
    if root.steps() == [step]:
        raise typer.BadParameter(
            f"step {step} is the only one of {root.path}, and nothing could be restored without"
            " it; remove the root itself if you need none of it"
        )
    return step


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


def _print_collected(
    result: Collected, rewritten: Sequence[Rewritten], grace: float, dry_run: bool
) -> None:
    for segment in rewritten:
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
        if as_json:
            output.print_json({"root": str(root.path), "removed": name})
        else:
            output.print_line(f"tag @{name} removed")
        return
    if not words:
        raise typer.BadParameter("this command takes a step and a name")
    if is_step(words[-1]) and not any(map(is_step, words[:-1])):
        raise typer.BadParameter(f"the name of the tag is missing after {words[-1]!r}")
    # The name is the last word, because it may look like a root.
    selection = parse(words[:-1], min_steps=1, max_steps=1)
    # No lease: tags have a lock of their own, so a step can be tagged beside a training.
    root = opening.open_root(selection.root)
    try:
        new_tag = tagging.put(root, selection.steps[0], words[-1], move=move)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        output.print_json(
            {"root": str(root.path), "tag": new_tag.name, "step": new_tag.step, "seq": new_tag.seq}
        )
    else:
        output.print_line(f"step {new_tag.step} (seq {new_tag.seq}) is @{new_tag.name}")
