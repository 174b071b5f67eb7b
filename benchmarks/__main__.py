"""`python -m benchmarks [NAME ...]`: run benchmarks, and check the promised figures."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.record import Result, Settings, format_cell
from deltacheck.evaluate import machine

# Name -> module, in the order in which they run; each is `run(settings) -> Result`.
BENCHMARKS = {
    "importing": "benchmarks.importing",
    "encode": "benchmarks.encode",
    "codes": "benchmarks.codes",
    "size": "benchmarks.size",
    "merging": "benchmarks.merging",
    "history": "benchmarks.history",
    "base_model": "benchmarks.base_model",
    "compression": "benchmarks.compression",
    "dedupe": "benchmarks.dedupe",
    "publish": "benchmarks.publish",
    "blocking": "benchmarks.blocking",
    "leaf_counts": "benchmarks.leaf_counts",
    "saving": "benchmarks.saving",
    "memory": "benchmarks.memory",
    "restoring": "benchmarks.restoring",
    "cold": "benchmarks.cold",
    "restart": "benchmarks.restart",
    "launched": "benchmarks.launched",
    "guard": "benchmarks.guard",
    "every_step": "benchmarks.every_step",
    "law": "benchmarks.law",
    "profiling": "benchmarks.profiling",
    "stability": "benchmarks.stability",
    "schedules": "benchmarks.schedules",
    "layouts": "benchmarks.layouts",
    "rank_sizes": "benchmarks.rank_sizes",
    "first_moment": "benchmarks.first_moment",
    "rate_floor": "benchmarks.rate_floor",
    "device": "benchmarks.device",
    "scale": "benchmarks.scale",
    "compare": "benchmarks.compare",
}


# Read when torch is first imported. Threads that wait by spinning take the cores from the saver's
# threads on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Benchmarks to run; all by default."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a promised figure is missed.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Tiny states: a check that it runs; figures without meaning."),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="A folder on the disk to measure (default: of temporary files)."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=8, help="For scale: largest number of ranks (default: 1024)."),
    ] = None,
    leaves: Annotated[
        int | None,
        typer.Option("--leaves", min=1, help="For scale: leaves per state (default: 1000)."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help=(
                "For schedules and layouts: runs whose names contain this; stability: parts; cold:"
                " small or medium."
            ),
        ),
    ] = None,
    kills: Annotated[
        int, typer.Option("--kills", min=1, help="For restart and launched: the number of kills.")
    ] = 100,
    saves: Annotated[
        int | None,
        typer.Option(
            "--saves", min=4, help="For schedules and layouts: the number of saves of each run."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", help="For schedules and restart: no save or kill begins later."),
    ] = None,
    optimizers: Annotated[
        bool, typer.Option("--optimizers", help="For size: states of other optimizers than Adam.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Only list the benchmarks.")] = False,
) -> None:
    """Measure the cost of saving and restoring."""
    console = Console()
    if listing:
        for name, module in BENCHMARKS.items():
            summary = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
            console.print(f"{name:<14}{summary}")
        raise typer.Exit
    unknown_names = [name for name in names or () if name not in BENCHMARKS]
    if unknown_names:
        console.print(
            f"There is no benchmark {', '.join(map(escape, unknown_names))}; there are"
            f" {', '.join(BENCHMARKS)}"
        )
        raise typer.Exit(2)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="deltacheck-benchmarks-", dir=folder) as name:
        description = machine.describe(Path(name))
        show_machine(description, console)
        for benchmark in names or BENCHMARKS:
            start = time.perf_counter()
            implementation = importlib.import_module(BENCHMARKS[benchmark])
            with tempfile.TemporaryDirectory(dir=name) as own_folder:
                results.append(
                    implementation.run(
                        Settings(
                            quick,
                            Path(own_folder),
                            ranks,
                            leaves,
                            only,
                            optimizers,
                            kills,
                            saves,
                            None if minutes is None else 60 * minutes,
                        )
                    )
                )
            results[-1].show(console)
            console.print(f"[dim]{time.perf_counter() - start:.0f} s[/]")
    if json_file is not None:
        record = {
            "quick": quick,
            "machine": description,
            "benchmarks": [result.as_json() for result in results],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    missed = [figure for result in results for figure in result.figures if not figure.holds]
    for figure in missed:
        value = format_cell(figure.value, figure.unit)
        console.print(f"[bold red]MISSED[/] {figure.name}: {value}")
    raise typer.Exit(1 if check and missed else 0)


def show_machine(description: dict[str, Any], console: Console) -> None:
    """Print the machine and the versions on one line."""
    versions = ", ".join(f"{name} {version}" for name, version in description["versions"].items())
    hardware = (
        f"{description['processor']}, {description['cores']} cores,"
        f" {description['memory_bytes'] / 2**30:.0f} GiB, {description['file_system']},"
        f" load {description['load_average']:.1f}"
    )
    software = f"codec {description['codec']}; {versions}; {description['date']}"
    console.print(f"{hardware}; {software}", highlight=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:  # it has options of its own
        from benchmarks import compare

        del sys.argv[1]
        typer.run(compare.main)
    else:
        typer.run(main)
