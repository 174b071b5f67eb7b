"""`python -m benchmarks [NAME ...]`: run benchmarks, print their tables, write them as JSON, check
what was promised.
"""

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

from benchmarks.record import Result, Settings, written
from deltacheck.evaluate import machine

# Name -> module, in the order in which they run; each is `run(settings) -> Result`.
BENCHMARKS = {
    "importing": "benchmarks.importing",
    "encode": "benchmarks.encode",
    "size": "benchmarks.size",
    "compression": "benchmarks.compression",
    "blocking": "benchmarks.blocking",
    "memory": "benchmarks.memory",
    "restoring": "benchmarks.restoring",
    "every_step": "benchmarks.every_step",
    "gradient_log": "benchmarks.gradient_log",
    "detection": "benchmarks.detection",
    "profiling": "benchmarks.profiling",
    "stability": "benchmarks.stability",
    "device": "benchmarks.device",
    "scale": "benchmarks.scale",
    "compare": "benchmarks.compare",
}


# Read when torch is first imported: threads that wait spinning take the cores from the saver's when
# the machine is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which; all where none is named."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 where a promised figure is missed.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny states: whether it runs; figures without meaning.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="On the disk to measure (default: where temporary files go)."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=8, help="Of scale: most ranks (default: 1024).")
    ] = None,
    leaves: Annotated[
        int | None, typer.Option("--leaves", min=1, help="Of scale (default: 1000).")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only list the benchmarks.")] = False,
) -> None:
    """Measure what saving and restoring costs."""
    console = Console()
    if listing:
        for name, module in BENCHMARKS.items():
            console.print(
                f"{name:<12}{(importlib.import_module(module).__doc__ or '').partition(chr(10))[0]}"
            )
        raise typer.Exit
    unknown = [name for name in names or () if name not in BENCHMARKS]
    if unknown:
        console.print(
            f"There is no benchmark {', '.join(map(escape, unknown))}; there are"
            f" {', '.join(BENCHMARKS)}"
        )
        raise typer.Exit(2)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="deltacheck-benchmarks-", dir=folder) as name:
        place = machine.describe(Path(name))
        show_machine(place, console)
        for chosen in names or BENCHMARKS:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=name) as own:
                results.append(
                    importlib.import_module(BENCHMARKS[chosen]).run(
                        Settings(quick, Path(own), ranks, leaves)
                    )
                )
            results[-1].show(console)
            console.print(f"[dim]{time.perf_counter() - began:.0f} s[/]")
    if json_file is not None:
        record = {
            "quick": quick,
            "machine": place,
            "benchmarks": [result.as_json() for result in results],
        }
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    missed = [figure for result in results for figure in result.figures if not figure.holds]
    for figure in missed:
        console.print(f"[bold red]MISSED[/] {figure.name}: {written(figure.value, figure.unit)}")
    raise typer.Exit(1 if check and missed else 0)


def show_machine(place: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
    memory = place["memory_bytes"] / 2**30
    console.print(
        f"{place['processor']}, {place['cores']} cores, {memory:.0f} GiB, {place['file_system']},"
        f" load {place['load_average']:.1f}; codec {place['codec']}; {versions}; {place['date']}",
        highlight=False,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:  # it has options of its own
        from benchmarks import compare

        del sys.argv[1]
        typer.run(compare.main)
    else:
        typer.run(main)
