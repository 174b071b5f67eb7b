"""deltacheck beside other ways of saving: same state, same disk, everything synced.

It has options of its own: `python -m benchmarks compare --help`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.prepared import SIZES, STATES, Size, size_of
from benchmarks.process import in_own_process
from benchmarks.race import Job
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit, format_cell
from benchmarks.rivals import AUTO, BOUNDED, EXACT, RIVALS
from deltacheck.evaluate import machine

OURS = (EXACT, AUTO, BOUNDED)
ASYNC = {"torch": "torch DCP async_save", "jax": "Orbax CheckpointManager async"}
TORCH_CHECKPOINTING = "torch_checkpointing"  # blocks the least of all rivals in torch
MOONCLIP = "moonclip"  # also writes differences
# Of the asynchronous rival's
BLOCKING_AT_MOST = {
    ("torch", EXACT): 0.5,
    ("torch", AUTO): 0.5,
    ("torch", BOUNDED): 0.1,
    ("jax", EXACT): 0.25,
    ("jax", AUTO): 0.25,
    ("jax", BOUNDED): 0.25,
}
LEAST_BLOCKING_AT_MOST = 2.0  # of that of torch_checkpointing
LOOP_LOSES_AT_MOST = {("torch", EXACT): 1.0}
PROCESSOR_AT_MOST = {("torch", EXACT): 1.0, ("torch", AUTO): 0.4}
MOONCLIP_PROCESSOR_AT_MOST = 1.0
MEMORY_AT_MOST = {"torch": 1.1, "jax": 0.6}
BYTES_AT_MOST = {EXACT: 0.65, AUTO: 0.01, BOUNDED: 0.01}  # of torch.save
# Of torch.load and load_state_dict
FORWARD_AT_MOST = 0.3
STEP_AT_MOST = {EXACT: 1.0, AUTO: 0.8, BOUNDED: 0.8}
# Of the load of the asynchronous rival, which fills arrays in place as ours does
RESTORE_AT_MOST = {"torch": 1.5, "jax": 1.0}
SMALL_BYTES, SMALL_RESTORE_AT_MOST = 100e6, 1.0  # states below this size
PAGE = Path(__file__).parents[1] / "docs" / "lab" / "benchmarks.md"

# The measurements of each repeat: headings by the name in the record
SAMPLES = {
    "blocking": "blocking",
    "loop loses": "loop loses",
    "durable": "until durable",
    "cpu": "processor time",
    "bytes": "bytes",
    "forward": "until first forward",
    "step": "until first step",
    "complete": "complete restore",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """The measurements of one rival on one state.

    ``samples``: seconds or bytes of each repeat, by the names of ``SAMPLES``. ``skipped``: why
    there are none. ``peak``: largest memory of all saves beyond the training's own, bytes.
    ``told_blocking``: seconds that the library itself reports. ``torch_save_bytes``: of the same
    state. ``saves_before``: until the steady state. ``steady``: it was reached.
    """

    framework: str
    state: str
    rival: str
    syncs: str = ""
    skipped: str = ""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    told_blocking: Sequence[float] = ()
    peak: int = 0
    first_bytes: int = 0
    saves_before: int = 0
    steady: bool = True
    step_seconds: float = 0.0
    raw_bytes: int = 0
    torch_save_bytes: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """Framework, state and rival."""
        return self.framework, self.state, self.rival

    def middle(self, name: str) -> float:
        """Return the median; for bytes the mean, since saves with keyframes are larger."""
        return (mean if name == "bytes" else median)(self.samples[name])


@dataclass(frozen=True, slots=True)
class Invocation:
    """A run of this benchmark: its command line and its machine."""

    command: str
    machine: Mapping[str, Any]


def main(
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all figures and every repeat to this file, each as soon as it is measured.",
        ),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--also",
            help=(
                "Files that earlier runs wrote with --json: reused, not measured again. Ratios"
                " between runs are less reliable."
            ),
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 1 if a promised figure is missed, and name it."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the medians to this PNG file.")
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            "--size", help="small: 3.3 M parameters; medium: 101 M; full: as many as memory allows."
        ),
    ] = "small",
    states: Annotated[
        str | None,
        typer.Option(
            "--states", help="Of adamw, lora, rl_like, with commas (default: all; small: rl_like)."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Measured saves of each rival on each state.")
    ] = 5,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Training steps between two saves.")
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option("--rivals", help="Only rivals whose names contain one of these, with commas."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="A folder on the disk to measure (default: of temporary files)."
        ),
    ] = None,
    write_docs: Annotated[
        bool,
        typer.Option(
            "--write-docs", help="Rewrite tables and plot of this size in the documentation."
        ),
    ] = False,
) -> None:
    """Compare ways of saving during a real post-training."""
    console = Console(width=None if Console().is_terminal else 250)
    state_names = (
        list(STATES) if states is None and size != "small" else (states or "rl_like").split(",")
    )
    if size not in (*SIZES, "full") or not set(state_names) <= STATES.keys():
        console.print(
            f"--size is one of {', '.join(SIZES)}, full; --states are of {', '.join(STATES)}"
        )
        raise typer.Exit(2)
    options = {
        "size": size,
        "states": ",".join(state_names),
        "repeats": repeats,
        "every": every,
        "rivals": rivals and f'"{rivals}"',
    }
    command = "python -m benchmarks compare " + " ".join(
        f"--{k} {v}" for k, v in options.items() if v is not None
    )
    records = [json.loads(file.read_text()) for file in also or []]
    earlier = [Entry(**fields) for record in records for fields in record["entries"]]
    reused = {entry.key: entry for entry in earlier}
    runs = [Invocation(record["command"], record["machine"]) for record in records]
    entries: list[Entry] = []
    result = summarize(entries, size, repeats)
    with tempfile.TemporaryDirectory(prefix="deltacheck-compare-", dir=folder) as name:
        runs.insert(0, Invocation(command, machine.describe(Path(name))))
        for entry in compare(
            size,
            state_names,
            repeats,
            every,
            (rivals or "").split(","),
            Path(name),
            console.print,
            reused,
        ):
            entries.append(entry)
            result = summarize(entries, size, repeats)
            if json_file is not None:
                record = asdict(runs[0]) | {
                    "entries": [asdict(e) for e in entries],
                    "result": result.as_json(),
                }
                json_file.write_text(
                    json.dumps(record | {"also": [asdict(run) for run in runs[1:]]}, indent=1)
                    + "\n"
                )
    result.show(console)
    if plot is not None:
        draw(entries, plot)
    if write_docs:
        draw(entries, plot_of(size))
        PAGE.write_text(update_page(PAGE.read_text(), size, section(entries, result, runs, size)))
    raise typer.Exit(1 if check and any(not figure.holds for figure in result.figures) else 0)


def run(settings: Settings) -> Result:
    """Run as one of all benchmarks, in the small or the tiny size."""
    size, repeats = ("tiny", 2) if settings.quick else ("small", 5)
    return summarize(
        list(compare(size, ["rl_like"], repeats, None, [""], settings.folder, lambda line: None)),
        size,
        repeats,
    )


def compare(
    size_name: str,
    states: Iterable[str],
    repeats: int,
    every: int | None,
    rivals: Sequence[str],
    folder: Path,
    report: Callable[[str], object],
    reused: Mapping[tuple[str, str, str], Entry] = MappingProxyType({}),
) -> Iterable[Entry]:
    """Measure rivals on states, one process after the other.

    Args:
        size_name: The size of the model.
        states: Names of ``STATES``.
        repeats: Measured saves of each rival on each state.
        every: Training steps between two saves; ``None``: as the size says.
        rivals: Parts of names; a rival whose name contains one of them is measured.
        folder: On the disk to measure.
        report: Called with lines of progress.
        reused: Entries of earlier runs, which are not measured again.
    """
    size = size_of(size_name)
    size = size if every is None else Size(**(asdict(size) | {"every": every}))
    for state in states:
        for framework, kinds in RIVALS.items():
            selected = [kind for kind in kinds if any(part in kind.name for part in rivals)]
            prepared = folder / f"{framework}-{state}"
            for kind in selected:
                if (framework, state, kind.name) in reused:
                    yield reused[framework, state, kind.name]
                    continue
                if kind.needs and find_spec(kind.needs) is None:
                    report(
                        f"{framework}, {state}, {kind.name}: skipped, {kind.needs} is not installed"
                    )
                    yield Entry(
                        framework, state, kind.name, skipped=f"{kind.needs} is not installed"
                    )
                    continue
                if not prepared.exists():
                    prepared.mkdir()
                    report(f"{framework}, {state}: preparing")
                    in_own_process(
                        "benchmarks.race", Job(framework, state, size, str(prepared)).as_argument()
                    )
                own_folder = folder / "rival"
                own_folder.mkdir()
                job = Job(
                    framework,
                    state,
                    size,
                    str(prepared),
                    str(own_folder / "root"),
                    kind.name,
                    repeats,
                )
                entry = Entry(
                    framework,
                    state,
                    kind.name,
                    kind.syncs,
                    **in_own_process("benchmarks.race", job.as_argument()),
                )
                shutil.rmtree(own_folder)
                report(
                    f"{framework}, {state}, {kind.name}: blocking"
                    f" {format_cell(entry.middle('blocking'), 'seconds')},"
                    f" {format_cell(entry.middle('bytes'), 'bytes')}, complete restore"
                    f" {format_cell(entry.middle('complete'), 'seconds')}"
                )
                yield entry
            shutil.rmtree(prepared, ignore_errors=True)


def figures(entries: Sequence[Entry]) -> list[Figure]:
    """Return the promised figures, each for a pair of entries that were both measured."""
    by_key = {entry.key: entry for entry in entries if not entry.skipped}
    promised: list[Figure] = []
    for (framework, state, name), ours in by_key.items():
        if name not in OURS:
            continue
        case = f"{framework}, {state}, {name.removeprefix('deltacheck, ')}"
        rival = by_key.get((framework, state, ASYNC[framework]))
        if rival is not None:
            promised += _figures_beside(case, ours, rival)
        quickest = by_key.get((framework, state, TORCH_CHECKPOINTING))
        if quickest is not None:
            promised.append(_of("blocking", case, ours, quickest, LEAST_BLOCKING_AT_MOST))
        moonclip = by_key.get((framework, state, MOONCLIP))
        if moonclip is not None and name == EXACT and moonclip.middle("cpu") > 0:
            promised.append(_of("cpu", case, ours, moonclip, MOONCLIP_PROCESSOR_AT_MOST))
        share = ours.middle("bytes") / ours.torch_save_bytes if ours.steady else float("inf")
        promised.append(Figure(f"bytes, {case}, of torch.save", share, BYTES_AT_MOST[name]))
        torch_load = by_key.get(("torch", state, "torch.save"))
        # JAX restores do not overlap with training.
        if torch_load is not None and framework == "torch":
            promised += _early_figures(case, ours, torch_load)
    return promised


def _figures_beside(case: str, ours: Entry, rival: Entry) -> list[Figure]:
    """Return the figures of saves and restores, of those of the asynchronous rival."""
    key = (ours.framework, ours.rival)
    is_small = ours.framework == "torch" and ours.raw_bytes < SMALL_BYTES
    restore = SMALL_RESTORE_AT_MOST if is_small else RESTORE_AT_MOST[ours.framework]
    limits = {"blocking": BLOCKING_AT_MOST[key], "complete": restore}
    # Noise may make the loss of a rival negative, and a ratio to it says nothing.
    if key in LOOP_LOSES_AT_MOST and rival.middle("loop loses") > 0:
        limits["loop loses"] = LOOP_LOSES_AT_MOST[key]
    if key in PROCESSOR_AT_MOST and rival.middle("cpu") > 0:
        limits["cpu"] = PROCESSOR_AT_MOST[key]
    return [
        *(_of(name, case, ours, rival, limit) for name, limit in limits.items()),
        Figure(
            f"peak memory, {case}, of {rival.rival}",
            ours.peak / rival.peak,
            MEMORY_AT_MOST[ours.framework],
        ),
    ]


def _of(name: str, case: str, ours: Entry, rival: Entry, limit: float) -> Figure:
    """Return the ratio of two medians of samples."""
    ratio = ours.middle(name) / rival.middle(name)
    return Figure(f"{SAMPLES[name]}, {case}, of {rival.rival}", ratio, limit)


def _early_figures(case: str, ours: Entry, torch_load: Entry) -> list[Figure]:
    """Return the figures of a program that begins to train as soon as it can, of torch.load's."""
    seconds = torch_load.middle("complete")
    limits = {"forward": FORWARD_AT_MOST, "step": STEP_AT_MOST[ours.rival]}
    return [
        Figure(f"{SAMPLES[name]}, {case}, of torch.load", ours.middle(name) / seconds, limit)
        for name, limit in limits.items()
    ]


def summarize(entries: Sequence[Entry], size: str, repeats: int) -> Result:
    """Return the tables and figures of some entries."""
    columns: dict[str, Unit] = {
        "state": "text",
        "framework": "text",
        "way": "text",
        "step": "seconds",
    }
    columns |= {heading: "text" for heading in SAMPLES.values()}
    columns |= {
        "of torch.save": "ratio",
        "first save": "ratio",
        "peak memory": "bytes",
        "told": "seconds",
    }
    rows: list[list[Cell]] = []
    for entry in entries:
        if entry.skipped:
            continue
        spread = [_spread(entry, name) for name in SAMPLES]
        reported = median(entry.told_blocking) if entry.told_blocking else None
        share, first = (
            size / entry.torch_save_bytes for size in (entry.middle("bytes"), entry.first_bytes)
        )
        rows.append(
            [
                entry.state,
                entry.framework,
                entry.rival,
                entry.step_seconds,
                *spread,
                share,
                first,
                entry.peak,
                reported,
            ]
        )
    skipped = [
        f"{entry.framework}, {entry.rival}: skipped, {entry.skipped}"
        for entry in entries
        if entry.skipped
    ]
    about = (
        f"size {size}; medians of {repeats} saves in the steady state of a real post-training,"
        " smallest and largest; each way in a process of its own. Blocking: the call, waits before"
        " the next optimizer step, and the wait of the next save for this one. Loop loses: wall"
        " time of the steps that begin with a save, over as many without. Until durable: from the"
        " call, syncs included. Processor time: of those steps, less that of those without."
        " Complete restore: of the newest step by a new manager in the same process, files in the"
        " page cache, into the state of the program. Until first forward, until first step: the"
        " same, overlapped with training if the way can. Peak memory: largest of any save,"
        " including the first, beyond that of training alone. Told: the blocking that the library"
        " itself reports"
    )
    return Result(
        "compare",
        ". ".join([about, *skipped]),
        [Table("saves beside training", columns, rows)],
        figures(entries),
    )


def _spread(entry: Entry, name: str) -> str:
    """Format the middle, the smallest and the largest value in one unit."""
    middle, values = entry.middle(name), entry.samples[name]
    if name == "bytes":
        scale, name = (1e6, "MB") if middle >= 1e5 else (1e3, "kB")
    else:
        scale, name = (1.0, "s") if middle >= 0.9995 else (1e-3, "ms")
    return (
        f"{_digits(middle / scale)} ({_digits(min(values) / scale)} to"
        f" {_digits(max(values) / scale)}) {name}"
    )


def _digits(value: float) -> str:
    """Format three digits without an exponent."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.3f}"


# --- the page and the plot ------------------------------------------------------------------------


def plot_of(size: str) -> Path:
    """Return the file of the plot beside the page."""
    return PAGE.with_name(f"compare-{size}.png")


def section(entries: Sequence[Entry], result: Result, runs: Sequence[Invocation], size: str) -> str:
    """Write the part of the page for a size: the commands, a table for each state, the figures.

    ``runs``: the newest first.
    """
    measured = [entry for entry in entries if not entry.skipped]
    lines = []
    for number, run in enumerate(runs):
        place = run.machine
        origin = "Reused from an earlier run: " if number else ""
        versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
        lines += [
            (
                f"{origin}`{run.command}`, {place['date'][:10]}; {place['processor']},"
                f" {place['cores']} cores, {place['memory_bytes'] / 2**30:.0f} GiB,"
                f" {place['file_system']}, no accelerator used; load {place['load_average']:.1f} at"
                " the start (a shared machine: only ratios within this run are"
                f" meaningful). {versions}."
            ),
            "",
        ]
    lines.append(f"![Medians as bars, smallest and largest as whiskers]({plot_of(size).name})")
    for state in dict.fromkeys(entry.state for entry in measured):
        rows = [entry for entry in measured if entry.state == state]
        headings = ["", *SAMPLES.values(), "of torch.save", "peak memory", "syncs itself"]
        lines += [
            "",
            f"**{state}**: {rows[0].raw_bytes / 1e6:,.0f} MB"
            + "".join(
                f"; {framework}: {format_cell(steps[0], 'seconds')} a step"
                for framework in RIVALS
                if (steps := [e.step_seconds for e in rows if e.framework == framework])
            ),
            "",
            "| " + " | ".join(headings) + " |",
            "|" + "---|" * len(headings),
        ]
        for entry in rows:
            cells = [_spread(entry, name) for name in SAMPLES]
            share = format_cell(entry.middle("bytes") / entry.torch_save_bytes, "ratio")
            title = entry.rival if entry.rival not in OURS else f"{entry.rival}, {entry.framework}"
            lines.append(
                "| "
                + " | ".join([title, *cells, share, format_cell(entry.peak, "bytes"), entry.syncs])
                + " |"
            )
    skipped = [f"{entry.rival} was skipped: {entry.skipped}." for entry in entries if entry.skipped]
    lines += [
        "",
        *dict.fromkeys(skipped),
        *([""] if skipped else []),
        "| promised | measured | at most | |",
        "|---|---|---|---|",
    ]
    for figure in result.figures:
        holds = "holds" if figure.holds else "**missed**"
        lines.append(
            f"| {figure.name} | {_factor(figure.value)} | {_factor(figure.limit)} | {holds} |"
        )
    return "\n".join(lines) + "\n"


def _factor(value: float) -> str:
    return f"{value:.3g}"


def update_page(page: str, size: str, text: str) -> str:
    """Put ``text`` between the marks of a size.

    Raises:
        ValueError: The page has no such marks.
    """
    begin, end = f"<!-- compare {size}: begin -->", f"<!-- compare {size}: end -->"
    section = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
    if section is None:
        raise ValueError(f"the page has no {begin} ... {end}")
    return page[: section.start()] + f"{begin}\n{text}{end}" + page[section.end() :]


def draw(entries: Sequence[Entry], file: Path) -> None:
    """Draw medians as bars, smallest and largest as whiskers, to a small PNG.

    There is a row for each state and a column for each quantity.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [entry for entry in entries if not entry.skipped]
    states = list(dict.fromkeys(entry.state for entry in measured))
    quantities = ("blocking", "durable", "bytes", "complete", "cpu")
    most_rows = max(sum(entry.state == state for entry in measured) for state in states)
    figure, axes = pyplot.subplots(
        len(states),
        len(quantities),
        figsize=(13, (0.26 * most_rows + 0.8) * len(states)),
        squeeze=False,
        sharey="row",
        dpi=80,
    )
    for row, state in zip(axes, states, strict=True):
        bars = [entry for entry in measured if entry.state == state][::-1]
        labels = [
            f"{entry.rival} ({entry.framework})" if entry.rival in OURS else entry.rival
            for entry in bars
        ]
        colours = ["tab:orange" if entry.rival in OURS else "tab:gray" for entry in bars]
        for axis, quantity in zip(row, quantities, strict=True):
            scale = 1e-6 if quantity == "bytes" else 1.0
            values = [
                [scale * max(value, 0.0) for value in entry.samples[quantity]] for entry in bars
            ]
            middles = [median(repeats) for repeats in values]
            whiskers = [
                [m - min(repeats) for m, repeats in zip(middles, values, strict=True)],
                [max(repeats) - m for m, repeats in zip(middles, values, strict=True)],
            ]
            axis.barh(labels, middles, xerr=whiskers, color=colours, error_kw={"elinewidth": 0.8})
            axis.set_title(
                f"{state}: {SAMPLES[quantity]}, {'MB' if quantity == 'bytes' else 's'}", fontsize=8
            )
            axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None})
    pyplot.close(figure)
