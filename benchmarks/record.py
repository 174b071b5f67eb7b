"""What a benchmark gives: figures with the limit that was promised for them, and the tables that
they come from.
"""

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
    """How a benchmark runs. ``quick``: tiny states, figures without meaning. ``folder``: on the
    disk
    to measure, empty. ``ranks``, ``leaves``: of those that have such; ``None``: as many as it is
    documented with.
    """

    quick: bool
    folder: Path
    ranks: int | None = None
    leaves: int | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One promised number: it holds where ``value <= limit``, or with ``at_least`` where ``value >=
    limit``.
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
    """``columns``: heading -> unit. ``rows``: one cell for each column, in bytes, seconds or
    ratios, rounded only when printed.
    """

    title: str
    columns: Mapping[str, Unit]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Result:
    """Everything one benchmark found. ``about``: what was measured and what was left out."""

    name: str
    about: str
    tables: Sequence[Table]
    figures: Sequence[Figure] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """Rows as objects, so that a reader needs no knowledge of the order of columns."""
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
        console.print(f"\n[bold]{self.name}[/]: {self.about}")
        for table in self.tables:
            drawn = RichTable(title=table.title, title_justify="left")
            for heading, unit in table.columns.items():
                drawn.add_column(heading, justify="left" if unit == "text" else "right")
            for row in table.rows:
                drawn.add_row(
                    *(
                        written(cell, unit)
                        for cell, unit in zip(row, table.columns.values(), strict=True)
                    )
                )
            console.print(drawn)
        for figure in self.figures:
            verdict = "[green]holds[/]" if figure.holds else "[bold red]MISSED[/]"
            value, limit = written(figure.value, figure.unit), written(figure.limit, figure.unit)
            console.print(
                f"{verdict} {figure.name}: {value}, promised at"
                f" {'least' if figure.at_least else 'most'} {limit}"
            )


def written(cell: Cell, unit: Unit) -> str:
    """A cell for people."""
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
            return (
                f"{cell:.2f} s"
                if cell >= 9.995
                else f"{cell * 1e3:,.0f} ms"
                if cell >= 0.0995
                else f"{cell * 1e3:.1f} ms"
            )
    return str(cell)
