"""Commands that keep steps in another place: ``branch``, ``mirror`` and ``publish``."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, Leaves, RootStep, Strip, checked_root, parse


class Encoding(StrEnum):
    """The encoding of changes that ``publish`` writes."""

    SLIME = "slime"
    COMPACT = "compact"


class Checksum(StrEnum):
    """The sums of tensors that ``publish`` writes."""

    XXH3 = "xxh3-128"
    ADLER32 = "adler32"


def branch(
    words: RootStep = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIR",
            callback=checked_root,
            help="The new root: a directory that is new or empty, or s3://BUCKET/PREFIX.",
        ),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy",
            help=(
                "Copy files instead of linking them: takes more space, but damage to one root does"
                " not affect the other."
            ),
        ),
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Make a new root that begins with a step of this root, and shares its files."""
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.maintain.branch import branch as branch_step
    from deltacheck.store.roots.opening import open_root

    if to is None:
        raise typer.BadParameter("name the directory of the new root with --to")
    selection = parse(words, min_steps=1, max_steps=1)
    root = open_root(selection.root, item)
    try:
        result = branch_step(root, selection.steps[0], to, copy=copy)
    except NotACheckpointRoot as error:
        # The new root cannot lie there.
        raise typer.BadParameter(str(error)) from error
    shared = (
        f"{output.size(result.linked_bytes)} shared" if result.linked_bytes else "nothing shared"
    )
    copied = f", {output.size(result.copied_bytes)} copied" if result.copied_bytes else ""
    output.print_result(
        {"root": to, **asdict(result)},
        f"{to} begins with step {result.step}: {result.segments} segments, {shared}{copied}",
    )


def mirror(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            callback=checked_root,
            help="The root of an engine, or its memory root: a local directory.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            callback=checked_root,
            help="The copy, new or a mirror of the same run: a directory or s3://BUCKET/PREFIX.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Copy the present steps, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Copy each step of a root as it appears, to another machine's memory or to a bucket.

    Steps that are deleted there are deleted in the copy too. Takes no lock on the source.
    """
    from deltacheck.maintain.mirror import Mirror

    # A timeout of zero polls once.
    with Mirror(source, target) as copy:
        count = copy.run(timeout=0 if once else None)
    output.print_result(
        {"source": source, "target": target, "copied": count}, f"{target}: {count} steps copied"
    )


# The options of ``publish``.
_Run: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", callback=checked_root, help="The root of the run.")
]
_To: TypeAlias = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DIR",
        callback=checked_root,
        help=(
            "The folder of versions, a directory or s3://BUCKET/PREFIX: new, empty, or with"
            " versions of the same run."
        ),
    ),
]
_Once: TypeAlias = Annotated[
    bool, typer.Option("--once", help="Publish the present steps, and end.")
]
_NewestOnly: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--newest-only",
        help="Skip steps that were saved since the last version: fewer bytes, not every step.",
    ),
]
_Full: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--full", help="Begin with a full version. It is the remedy for a damaged version."
    ),
]
_FullEvery: TypeAlias = Annotated[
    int,
    typer.Option(
        "--full-every",
        min=1,
        max=64,
        metavar="N",
        help=(
            "The most versions from one full version to the next. Larger: fewer bytes;"
            " smaller: late receivers read less."
        ),
    ),
]
_Encoding: TypeAlias = Annotated[
    Encoding,
    typer.Option(
        "--encoding",
        help=(
            "slime: engines of slime and miles read the versions. compact: fewer bytes,"
            " for deltacheck.Receiver only."
        ),
    ),
]
_Checksum: TypeAlias = Annotated[
    Checksum,
    typer.Option(
        "--checksum",
        help=(
            "The sums of tensors: xxh3-128 for slime and miles, adler32 for ModelExpress and"
            " cwtrain."
        ),
    ),
]
_Files: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--files",
        metavar="FOLDER",
        help=(
            "Copy configuration and tokenizer of FOLDER to full versions. Default: those that"
            " the step keeps."
        ),
    ),
]


def publish(  # noqa: PLR0913 - one argument per option
    run: _Run,
    to: _To,
    once: _Once = False,
    newest_only: _NewestOnly = False,
    full: _Full = False,
    full_every: _FullEvery = 20,
    encoding: _Encoding = Encoding.SLIME,
    checksum: _Checksum = Checksum.XXH3,
    leaves: Leaves = None,
    strip: Strip = "",
    files: _Files = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write the weights of each step as a version that inference engines pull.

    A version holds what has changed since the one before. Takes no lock on the run.
    """
    from deltacheck.backends.hugging_face.publish.publisher import Publisher
    from deltacheck.backends.hugging_face.publish.version_folder import Version

    def report(version: Version) -> None:
        kind = "full" if version.base is None else f"changes since version {version.base}"
        if not as_json:
            output.print_line(
                f"version {version.number}: step {version.step}, {kind}"
                f" ({output.size(version.file_bytes)})"
            )

    options = {
        "encoding": str(encoding),
        "checksum": str(checksum),
        "leaves": leaves or (),
        "strip": strip,
        "files": files,
        "item": item,
    }
    with Publisher(run, to, full_every=full_every, **options) as publisher:  # type: ignore[arg-type]
        versions = []
        if full and (version := publisher.poll(full=True)) is not None:
            versions.append(version)
            report(version)
        versions += publisher.run(
            timeout=0 if once else None,
            newest_only=newest_only,
            on_version=report,
        )
    output.print_result(
        {"run": run, "to": to, "versions": [asdict(v) for v in versions]},
        *([] if versions else [f"{to}: nothing new to publish"]),
    )
