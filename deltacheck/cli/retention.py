"""`prune`, `delete`, `tag` and `untag`: which steps stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Json, JustRoot, RootStep

if TYPE_CHECKING:
    from deltacheck.policy import KeepBest
    from deltacheck.store.root import Root

_NEXT = "run gc to remove what no step needs any more"


@contextlib.contextmanager
def _writing(root: Root) -> Iterator[None]:
    from deltacheck.store.lock.lease import Lease

    lease = Lease(root.store.path)
    try:
        yield
    finally:
        lease.release()


def prune(
    words: JustRoot = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep the N newest steps.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Keep steps that N divides.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:MODE[:COUNT]]",
            help="Keep the COUNT (1) best by a metric; MODE is min or max. May be repeated.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; say what would go.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the steps that no rule and no tag keeps. Refused while a training writes to the
    root.
    """
    from deltacheck.cli import arguments as where
    from deltacheck.policy.retention import Retention
    from deltacheck.save import root_writer
    from deltacheck.store.root import open_root

    retention = Retention(keep_last, keep_every, tuple(map(_best, keep_best or ())))
    if retention.keeps_all:
        raise typer.BadParameter(
            "say what to keep: --keep-last, --keep-every or --keep-best; what none of them keeps is"
            " deleted"
        )
    root = open_root(where.parse(words).root)
    with _writing(root):
        done = root_writer.prune(root, retention, dry_run=dry_run)
    if as_json:
        output.print_json({"root": str(root.path), "dry_run": dry_run, **asdict(done)})
        return
    deleted = "would be deleted" if dry_run else "deleted"
    for one in done.deleted:
        output.print_line(f"step {one.step} (seq {one.seq}) {deleted}")
    output.print_line(
        f"{len(done.deleted)} of {len(done.deleted) + len(done.kept)} checkpoints {deleted}"
        + ("" if dry_run else f"; {_NEXT}")
    )


def _best(words: str) -> KeepBest:
    from deltacheck.policy import KeepBest

    metric, _, rest = words.partition(":")
    mode, _, count = rest.partition(":")
    try:
        return KeepBest(metric, int(count or 1), mode or "min")
    except ValueError:
        raise typer.BadParameter(
            f"{words!r} is not METRIC[:MODE[:COUNT]], such as loss:min:3"
        ) from None


def delete(words: RootStep = None, as_json: Json = False) -> None:
    """Delete a step; others stay whole. Refused where it has a tag, and while a training writes to
    the root.
    """
    from deltacheck.cli import arguments as where
    from deltacheck.save import root_writer
    from deltacheck.store.root import open_root

    wanted = where.parse(words, least=1, most=1)
    (step,) = wanted.steps
    if not isinstance(step, int):
        raise typer.BadParameter("name the step to delete by its number")
    root = open_root(wanted.root)
    with _writing(root):
        done = root_writer.delete(root, step)
    if as_json:
        output.print_json({"root": str(root.path), "deleted": [asdict(one) for one in done]})
    else:
        output.print_line(f"step {step} deleted; {_NEXT}")


def tag(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROOT] STEP NAME", help="The last word is the tag."),
    ] = None,
    move: Annotated[
        bool, typer.Option("--move", help="Also where another step has the tag.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Give a step a name, under which it can be restored; it stays until the name is taken away.
    May run beside a training.
    """
    from deltacheck.cli import arguments as where
    from deltacheck.store import tags
    from deltacheck.store.root import open_root

    if not words:
        raise typer.BadParameter("this command takes a step and a name")
    wanted = where.parse(words[:-1], least=1, most=1)
    root = open_root(wanted.root)
    try:
        made = tags.put(root, wanted.steps[0], words[-1], move=move)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        output.print_json(
            {"root": str(root.path), "tag": made.name, "step": made.step, "seq": made.seq}
        )
    else:
        output.print_line(f"step {made.step} (seq {made.seq}) is @{made.name}")


def untag(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[ROOT] NAME", help="The last word is the tag.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take a tag away; its step stays until it is deleted."""
    from deltacheck.cli import arguments as where
    from deltacheck.store import tags
    from deltacheck.store.root import open_root

    if not words:
        raise typer.BadParameter("this command takes the name of a tag")
    root = open_root(where.parse(words[:-1]).root)
    name = words[-1].removeprefix(where.TAG)
    tags.remove(root, name)
    if as_json:
        output.print_json({"root": str(root.path), "removed": name})
    else:
        output.print_line(f"@{name} is no tag any more")
