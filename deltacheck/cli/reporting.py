"""The ``report`` command: one page of figures and tables about a root."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, RootOnly, needing, parse, require_new

if TYPE_CHECKING:
    from deltacheck.report.data import Record


def report(
    words: RootOnly = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write each figure as a PNG image.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Profile of the run. Default: profile.json of the root, if it exists.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write a page about bytes, changes, drift, contracts and the cost of a restore."""
    from deltacheck.report.data import collect

    require_new(out)
    with needing("matplotlib", "a report"):
        from deltacheck.report import conclusion, figures, page
    record = collect(parse(words).root, item, profile)
    drawings = figures.draw(record)
    for problem in record.problems:
        output.warn(problem)
    sentences = conclusion.conclusion(record)
    text = page.page(
        f"Checkpoints in {record.root}",
        _facts(record),
        record.problems,
        drawings,
        conclusion=sentences,
    )
    page.write_page(out, text)
    images = page.write_images(drawings, png) if png is not None else []
    output.print_result(
        {
            "root": record.root,
            "file": str(out),
            "file_bytes": out.stat().st_size,
            "images": [str(image) for image in images],
            "figures": [drawing.name for drawing in drawings],
            "steps": [step.step for step in record.steps],
            "conclusion": sentences,
        },
        f"{out}: {output.count(len(drawings), 'figure')} of"
        f" {output.count(len(record.steps), 'step')}, {output.size(out.stat().st_size)}",
        *map(str, images),
        *sentences,
    )
    if record.problems:
        raise typer.Exit(output.DAMAGED)


def _facts(record: Record) -> dict[str, str]:
    """Return the facts at the head of the page, name -> value."""
    from deltacheck import __version__

    facts = {"root": record.root, "checkpoints": str(len(record.steps))}
    if record.steps:
        first, last = record.steps[0], record.steps[-1]
        written_bytes = sum(step.written_bytes for step in record.steps)
        raw_bytes = sum(step.raw_bytes for step in record.steps)
        facts |= {
            "training steps": f"{first.step} to {last.step}",
            "saved": " to ".join(
                output.local_time(moment)
                for step in (first, last)
                if (moment := output.utc(step.time)) is not None
            ),
            "state": f"{output.size(last.raw_bytes)} in {last.leaves} leaves",
            "written by these saves": (
                f"{output.size(written_bytes)},"
                f" {output.share(written_bytes / raw_bytes) if raw_bytes else '-'} of"
                " whole checkpoints"
            ),
            "stored for these steps": output.size(record.total_bytes),
        }
    now = output.utc(time.time())
    return facts | {
        "stage": _stage(record) if record.steps else "-",
        "profile": _profile(record),
        "written by": ", ".join(record.writers) or "-",
        "this page": f"deltacheck {__version__}, {output.local_time(now) if now else '-'}",
    }


def _stage(record: Record) -> str:
    """Describe the stage of the newest step, and the stable start of a lossy policy."""
    stage, start = record.steps[-1].stage, record.stable_start
    if not stage:
        return "none (exact policy)"
    return f"{stage}, no stable start" if start is None else f"{stage}, stable start: step {start}"


def _profile(record: Record) -> str:
    """Describe the profile: its source, and its stable start."""
    if record.profile is None:
        return "none"
    start = record.profile.stable_start
    words = "no stable start" if start is None else f"stable start: step {start}"
    # A profile that a program has made of a live run has no source.
    return f"{record.profile.source}: {words}" if record.profile.source else words
