"""The result of a benchmark: figures with their promised limits, and the tables behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

Unit = Literal["text", "count", "number", "ratio", "bytes", "seconds"]  # number: three digits
Cell = str | int | float | None  # None: does not apply


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a benchmark.

    Args:
        quick: Use tiny states; the figures have no meaning.
        folder: An empty folder on the disk to measure.
        ranks: The number of ranks, if the benchmark has any; ``None``: as documented.
        leaves: The number of leaves, likewise.
        only: A part of the names of the runs to measure; ``None``: all.
        optimizers: Measure the states of other optimizers than Adam, if the benchmark can.
        kills: The number of kills, if the benchmark has any.
        saves: The number of saves of each run, likewise; ``None``: as documented.
        most_seconds: No kill and no save of a run begins later; ``None``: as documented.
    """

    quick: bool
    folder: Path
    ranks: int | None = None
    leaves: int | None = None
    only: str | None = None
    optimizers: bool = False
    kills: int = 100
    saves: int | None = None
    most_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One promised number.

    It holds if ``value <= limit``, or with ``at_least`` if ``value >= limit``.
    """

    name: str
    value: float
    limit: float
    unit: Unit = "ratio"
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Table:
    """A table of measurements.

    ``columns``: units by heading. ``rows``: a cell for each column, in bytes, seconds or ratios,
    rounded only when printed.
    """

    title: str
    columns: Mapping[str, Unit]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Result:
    """All results of one benchmark. ``about``: a description of the measurement and its limits."""

    name: str
    about: str
    tables: Sequence[Table]
    figures: Sequence[Figure] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """Return the result with rows as objects, independent of the order of columns."""
        tables = [
            {
                "title": t.title,
                "units": dict(t.columns),
                "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows],
            }
            for t in self.tables
        ]
        figures = [asdict(figure) | {"holds": figure.holds} for figure in self.figures]
        return {"name": self.name, "about": self.about, "figures": figures, "tables": tables}

    def show(self, console: Console) -> None:
        """Print tables and figures."""
        console.print(f"\n[bold]{self.name}[/]: {self.about}")
        for table in self.tables:
            grid = RichTable(title=table.title, title_justify="left")
            for heading, unit in table.columns.items():
                grid.add_column(heading, justify="left" if unit == "text" else "right")
            for row in table.rows:
                cells = zip(row, table.columns.values(), strict=True)
                grid.add_row(*(format_cell(cell, unit) for cell, unit in cells))
            console.print(grid)
        for figure in self.figures:
            verdict = "[green]holds[/]" if figure.holds else "[bold red]MISSED[/]"
            value = format_cell(figure.value, figure.unit)
            limit = format_cell(figure.limit, figure.unit)
            bound = "least" if figure.at_least else "most"
            console.print(f"{verdict} {figure.name}: {value}, promised at {bound} {limit}")


def format_cell(cell: Cell, unit: Unit) -> str:
    """Format a cell for people."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    match unit:
        case "ratio":
            return f"{cell:.1%}" if abs(cell) >= 0.095 else f"{cell:.2%}"
        case "bytes":
            return f"{cell / 1e6:,.1f} MB" if abs(cell) >= 1e5 else f"{cell / 1e3:,.1f} kB"
        case "number":
            return f"{cell:.3g}"
        case "seconds":
            if cell >= 9.995:
                return f"{cell:.2f} s"
            return f"{cell * 1e3:,.0f} ms" if cell >= 0.0995 else f"{cell * 1e3:.1f} ms"
    return str(cell)
