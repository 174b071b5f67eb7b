"""`blame`: since which step each part of a leaf has its content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, Leaves, RootStep
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.maintain.blame import Blame


def blame(
    words: RootStep = None, leaves: Leaves = None, item: Item = None, as_json: Json = False
) -> None:
    """Show since which step the parts of each leaf have their content."""
    from deltacheck.cli import arguments as where
    from deltacheck.errors import StepNotFound
    from deltacheck.maintain import blame as work
    from deltacheck.restore.export import matches

    root, (manifest,) = where.manifests(where.parse(words, least=1, most=1), item)
    stored = sorted([*manifest.leaves, *manifest.tiles])
    paths = [
        path for path in stored if not leaves or any(matches(path, pattern) for pattern in leaves)
    ]
    if not paths:
        raise StepNotFound(
            f"step {manifest.step} stores no leaf that matches"
            f" {' or '.join(map(repr, leaves or ()))}"
        )
    rows = [
        row
        for path, found in work.blame(root, manifest, paths).items()
        for row in _rows(path, found)
    ]
    if as_json:
        output.print_json(
            {"root": str(root.path), "step": manifest.step, "seq": manifest.seq, "parts": rows}
        )
        return
    output.print_table(
        (
            Column("LEAF", "path", left=True),
            Column("SINCE STEP", "since", _since),
            Column("CHUNKS", "chunks"),
            Column("OF", "of"),
            Column("SHARE", "share", output.share),
        ),
        rows,
    )


def _rows(path: str, found: Blame) -> list[Row]:
    """One row for each step since which some chunks of a leaf are as they are, newest first."""
    import numpy as np

    rows: list[Row] = []
    pairs = np.stack([found.steps, found.is_known.astype(np.int64)], axis=1)
    for step, known in sorted(map(tuple, np.unique(pairs, axis=0).tolist()), reverse=True):
        chunks = np.flatnonzero((pairs == (step, known)).all(axis=1))
        about: Row = {
            "path": path,
            "since": {"step": step, "or_earlier": not known},
            "chunks": chunks.size,
        }
        rows.append(
            about
            | {
                "of": pairs.shape[0],
                "share": chunks.size / pairs.shape[0],
                "numbers": chunks.tolist(),
            }
        )
    return rows


def _since(since: Row) -> str:
    return f"{since['step']}{' or earlier' if since['or_earlier'] else ''}"
