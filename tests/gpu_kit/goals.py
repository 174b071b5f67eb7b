"""The promised figures beside those of the last run on a device (docs/lab/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.record import format_cell


class LastRun(NamedTuple):
    """A figure of the last run. ``value``: ``None`` if it was never measured."""

    value: float | None
    about: str = ""


_NEVER = LastRun(None, "never measured")
_H200 = "H200, 2026-11-29"
# By the name of the figure, which states its goal. In the order of the page.
LAST_RUN = {
    "blocking of a save, torch, 2 GB": LastRun(0.0161, _H200),
    "blocking of a save, torch, 8 GB": LastRun(0.0190, _H200),
    "blocking of a save, torch, 16 GB": LastRun(0.0192, _H200),
    "blocking of a save, JAX, 2 GB": LastRun(0.0089, "H200, 2026-11-27: 1.6 GB in 2 arrays"),
    "blocking of a save, JAX, 8 GB": _NEVER,
    "blocking of a save, JAX, 16 GB": _NEVER,
    "a save at every step, of a step, by the law in memory": _NEVER,
    "loop loses, adamw, 2 GB, of torch DCP async_save": LastRun(0.28, "H100, 2026-11-26"),
    "encode at 2 % of bfloat16, of copy bandwidth": LastRun(0.59, _H200),
    "dense float32, of copy bandwidth": LastRun(0.79, _H200),
    "bytes to the host at 2 % of bfloat16, of raw": LastRun(0.020, _H200),
}
# A rehearsal has none of these.
NEEDS_DEVICE = {"a save at every step, of a step, by the law in memory"}
NOT_MEASURED = "not measured"


def table(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of goals, of the documents of all parts so far."""
    figures = {
        figure["name"]: figure
        for document in documents
        for record in document["steps"]
        for figure in record.get("result", {}).get("figures", ())
    }
    yield "| figure | this run | goal | the last run |"
    yield "|---|---|---|---|"
    for name, last in LAST_RUN.items():
        figure = figures.get(name)
        unit = "seconds" if name.startswith("blocking") else "ratio"
        before = last.about
        if last.value is not None:
            before = f"{format_cell(last.value, unit)} ({last.about})"  # type: ignore[arg-type]
        if figure is None:
            yield f"| {name} | {NOT_MEASURED} | | {before} |"
            continue
        value, limit = (format_cell(figure[key], unit) for key in ("value", "limit"))  # type: ignore[arg-type]
        verdict = ": holds" if figure["holds"] else ": **missed**"
        if any(document["rehearsal"] for document in documents):
            verdict = ""  # its figures have no meaning
        bound = "at least" if figure["at_least"] else "at most"
        yield f"| {name} | {value} | {bound} {limit}{verdict} | {before} |"
