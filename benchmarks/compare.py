"""Ours beside what people use, in one run: same state, same disk, everything synced; its own
options: `python -m benchmarks compare --help`.
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
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit, written
from benchmarks.rivals import BOUNDED, EXACT, POST_TRAINING, RIVALS
from deltacheck.evaluate import machine

OURS = (EXACT, POST_TRAINING, BOUNDED)
ASYNC = {"torch": "torch DCP async_save", "jax": "Orbax CheckpointManager async"}
BLOCKING_AT_MOST = 0.5  # of the asynchronous rival's
BYTES_AT_MOST = {EXACT: 0.65, POST_TRAINING: 0.01, BOUNDED: 0.01}  # of torch.save
RESTORE_AT_MOST = 1.5  # of torch.load
MEMORY_AT_MOST = 1.0  # of the asynchronous rival's
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "benchmarks.md"

# What was measured in each repeat: name in the record -> heading.
SAMPLES = {
    "blocking": "blocking",
    "loop loses": "loop loses",
    "durable": "until durable",
    "cpu": "processor time",
    "bytes": "bytes",
    "restore": "restore",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One rival on one state. ``samples``: by the names of ``SAMPLES``, seconds or bytes of each
    repeat. ``skipped``: why there are none.

    ``peak``: most memory beyond the training's own, of all saves, bytes. ``told_blocking``: what
    the library itself says. ``torch_save_bytes``: of the same state. ``saves_before``: until the
    steady state, which ``steady`` says was reached.
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
        return self.framework, self.state, self.rival

    def middle(self, name: str) -> float:
        """The median; of bytes the mean, since saves with keyframes are larger than those between
        them.
        """
        return (mean if name == "bytes" else median)(self.samples[name])


@dataclass(frozen=True, slots=True)
class Made:
    """A run of this benchmark, and where it was."""

    command: str
    machine: Mapping[str, Any]


def main(
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Write all figures, and every repeat, to this file, as soon as each is there.",
        ),
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--also",
            help=(
                "What earlier runs wrote with --json: taken over, not measured again. Ratios"
                " between runs say less."
            ),
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 1 where a wanted figure is missed, and name it."),
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
        int, typer.Option("--repeats", min=1, help="Saves that count, of each rival on each state.")
    ] = 5,
    every: Annotated[
        int | None, typer.Option("--every", min=1, help="Training steps between two saves.")
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option("--rivals", help="Only those whose names contain one of these, with commas."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="On the disk to measure (default: where temporary files go)."
        ),
    ] = None,
    write_docs: Annotated[
        bool,
        typer.Option(
            "--write-docs", help="Rewrite tables and plot of this size in the documentation."
        ),
    ] = False,
) -> None:
    """Measure ways of saving beside each other while a real post-training goes on."""
    console = Console(width=None if Console().is_terminal else 250)
    chosen = (
        list(STATES) if states is None and size != "small" else (states or "rl_like").split(",")
    )
    if size not in (*SIZES, "full") or not set(chosen) <= STATES.keys():
        console.print(
            f"--size is one of {', '.join(SIZES)}, full; --states are of {', '.join(STATES)}"
        )
        raise typer.Exit(2)
    options = {
        "size": size,
        "states": ",".join(chosen),
        "repeats": repeats,
        "every": every,
        "rivals": rivals and f'"{rivals}"',
    }
    command = "python -m benchmarks compare " + " ".join(
        f"--{k} {v}" for k, v in options.items() if v is not None
    )
    earlier = [json.loads(file.read_text()) for file in also or []]
    taken = {
        entry.key: entry for record in earlier for entry in (Entry(**e) for e in record["entries"])
    }
    runs = [Made(record["command"], record["machine"]) for record in earlier]
    entries: list[Entry] = []
    result = judged(entries, size, repeats)
    with tempfile.TemporaryDirectory(prefix="deltacheck-compare-", dir=folder) as name:
        runs.insert(0, Made(command, machine.describe(Path(name))))
        for entry in compared(
            size,
            chosen,
            repeats,
            every,
            (rivals or "").split(","),
            Path(name),
            console.print,
            taken,
        ):
            entries.append(entry)
            result = judged(entries, size, repeats)
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
        PAGE.write_text(rewritten(PAGE.read_text(), size, section(entries, result, runs, size)))
    raise typer.Exit(1 if check and any(not figure.holds for figure in result.figures) else 0)


def run(settings: Settings) -> Result:
    """As one of all benchmarks: the small size, or the tiny one."""
    size, repeats = ("tiny", 2) if settings.quick else ("small", 5)
    return judged(
        list(compared(size, ["rl_like"], repeats, None, [""], settings.folder, lambda line: None)),
        size,
        repeats,
    )


def compared(
    size_name: str,
    states: Iterable[str],
    repeats: int,
    every: int | None,
    rivals: Sequence[str],
    folder: Path,
    tell: Callable[[str], object],
    taken: Mapping[tuple[str, str, str], Entry] = MappingProxyType({}),
) -> Iterable[Entry]:
    """Every rival whose name contains one of ``rivals``, on every state, one process after the
    other; those ``taken`` are not measured.
    """
    size = size_of(size_name)
    size = size if every is None else Size(**(asdict(size) | {"every": every}))
    for state in states:
        for framework, kinds in RIVALS.items():
            wanted = [kind for kind in kinds if any(part in kind.name for part in rivals)]
            prepared = folder / f"{framework}-{state}"
            for kind in wanted:
                if (framework, state, kind.name) in taken:
                    yield taken[framework, state, kind.name]
                    continue
                if kind.needs and find_spec(kind.needs) is None:
                    tell(
                        f"{framework}, {state}, {kind.name}: skipped, {kind.needs} is not installed"
                    )
                    yield Entry(
                        framework, state, kind.name, skipped=f"{kind.needs} is not installed"
                    )
                    continue
                if not prepared.exists():
                    prepared.mkdir()
                    tell(f"{framework}, {state}: preparing")
                    in_own_process(
                        "benchmarks.race", Job(framework, state, size, str(prepared)).as_argument()
                    )
                own = folder / "rival"
                own.mkdir()
                job = Job(
                    framework, state, size, str(prepared), str(own / "root"), kind.name, repeats
                )
                entry = Entry(
                    framework,
                    state,
                    kind.name,
                    kind.syncs,
                    **in_own_process("benchmarks.race", job.as_argument()),
                )
                shutil.rmtree(own)
                tell(
                    f"{framework}, {state}, {kind.name}: blocking"
                    f" {written(entry.middle('blocking'), 'seconds')},"
                    f" {written(entry.middle('bytes'), 'bytes')}, restore"
                    f" {written(entry.middle('restore'), 'seconds')}"
                )
                yield entry
            shutil.rmtree(prepared, ignore_errors=True)


def figures(entries: Sequence[Entry]) -> list[Figure]:
    """What was wanted of ours, from what was measured: a figure for each pair of entries that are
    both there.
    """
    found = {(e.framework, e.state, e.rival): e for e in entries if not e.skipped}
    wanted: list[Figure] = []
    for (framework, state, name), ours in found.items():
        if name not in OURS:
            continue
        at = f"{framework}, {state}, {name.removeprefix('deltacheck, ')}"
        rival = found.get((framework, state, ASYNC[framework]))
        if rival is not None:
            ratio = ours.middle("blocking") / rival.middle("blocking")
            wanted.append(Figure(f"blocking, {at}, of {rival.rival}", ratio, BLOCKING_AT_MOST))
        share = ours.middle("bytes") / ours.torch_save_bytes if ours.steady else float("inf")
        wanted.append(Figure(f"bytes, {at}, of torch.save", share, BYTES_AT_MOST[name]))
        loaded = found.get(("torch", state, "torch.save"))
        if loaded is not None:
            wanted.append(
                Figure(
                    f"restore, {at}, of torch.load",
                    ours.middle("restore") / loaded.middle("restore"),
                    RESTORE_AT_MOST,
                )
            )
        if rival is not None:
            wanted.append(
                Figure(
                    f"peak memory, {at}, of {rival.rival}", ours.peak / rival.peak, MEMORY_AT_MOST
                )
            )
    return wanted


def judged(entries: Sequence[Entry], size: str, repeats: int) -> Result:
    """Tables and figures of what was measured."""
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
        told = median(entry.told_blocking) if entry.told_blocking else None
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
                told,
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
        " the next optimizer step, and what the next save would have to wait for. Loop loses: wall"
        " time of the steps that begin with a save, over as many without. Until durable: from the"
        " call, syncs included. Processor time: of those steps, less that of those without."
        " Restore: of the newest step by a new manager in the same process, files in the page"
        " cache. Peak memory: most of any save, the first included, beyond what the training takes"
        " alone. Told: what the library itself says of its blocking"
    )
    return Result(
        "compare",
        ". ".join([about, *skipped]),
        [Table("saves beside training", columns, rows)],
        figures(entries),
    )


def _spread(entry: Entry, name: str) -> str:
    """The middle, the smallest and the largest, in one unit."""
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
    """Three digits, and no exponent."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 99.95
        else f"{value:.3g}"
        if abs(value) >= 0.01
        else f"{value:.3f}"
    )


# --- the page and the plot ------------------------------------------------------------------------


def plot_of(size: str) -> Path:
    """The plot beside the page."""
    return PAGE.with_name(f"compare-{size}.png")


def section(entries: Sequence[Entry], result: Result, runs: Sequence[Made], size: str) -> str:
    """The part of the page that is about a size: how it was measured, a table for each state, and
    what was missed. ``runs``: the newest first.
    """
    there = [entry for entry in entries if not entry.skipped]
    lines = []
    for number, run in enumerate(runs):
        place = run.machine
        taken = "Taken over from an earlier run: " if number else ""
        versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items())
        lines += [
            (
                f"{taken}`{run.command}`, {place['date'][:10]}; {place['processor']},"
                f" {place['cores']} cores, {place['memory_bytes'] / 2**30:.0f} GiB,"
                f" {place['file_system']}, no accelerator used; load {place['load_average']:.1f} at"
                " the start (a machine that others use: only ratios within this run say"
                f" something). {versions}."
            ),
            "",
        ]
    lines.append(f"![Medians as bars, smallest and largest as whiskers]({plot_of(size).name})")
    for state in dict.fromkeys(entry.state for entry in there):
        mine = [entry for entry in there if entry.state == state]
        one = mine[0]
        headings = ["", *SAMPLES.values(), "of torch.save", "peak memory", "syncs itself"]
        lines += [
            "",
            f"**{state}**: {one.raw_bytes / 1e6:,.0f} MB"
            + "".join(
                f"; {framework}: {written(steps[0], 'seconds')} a step"
                for framework in RIVALS
                if (steps := [e.step_seconds for e in mine if e.framework == framework])
            ),
            "",
            "| " + " | ".join(headings) + " |",
            "|" + "---|" * len(headings),
        ]
        for entry in mine:
            cells = [_spread(entry, name) for name in SAMPLES]
            share = written(entry.middle("bytes") / entry.torch_save_bytes, "ratio")
            title = entry.rival if entry.rival not in OURS else f"{entry.rival}, {entry.framework}"
            lines.append(
                "| "
                + " | ".join([title, *cells, share, written(entry.peak, "bytes"), entry.syncs])
                + " |"
            )
    skipped = [f"{entry.rival} was skipped: {entry.skipped}." for entry in entries if entry.skipped]
    lines += [
        "",
        *dict.fromkeys(skipped),
        *([""] if skipped else []),
        "| wanted | measured | at most | |",
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


def rewritten(page: str, size: str, text: str) -> str:
    """The page with ``text`` between the marks of a size. Raises ``ValueError`` where it has
    none.
    """
    begin, end = f"<!-- compare {size}: begin -->", f"<!-- compare {size}: end -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no {begin} ... {end}")
    return page[: found.start()] + f"{begin}\n{text}{end}" + page[found.end() :]


def draw(entries: Sequence[Entry], file: Path) -> None:
    """Medians as bars, smallest and largest as whiskers: a row for each state, a column for each
    quantity. A small PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = [entry for entry in entries if not entry.skipped]
    states = list(dict.fromkeys(entry.state for entry in there))
    quantities = ("blocking", "durable", "bytes", "restore", "cpu")
    most = max(sum(entry.state == state for entry in there) for state in states)
    figure, axes = pyplot.subplots(
        len(states),
        len(quantities),
        figsize=(13, (0.26 * most + 0.8) * len(states)),
        squeeze=False,
        sharey="row",
        dpi=80,
    )
    for row, state in zip(axes, states, strict=True):
        mine = [entry for entry in there if entry.state == state][::-1]
        labels = [
            f"{entry.rival} ({entry.framework})" if entry.rival in OURS else entry.rival
            for entry in mine
        ]
        colours = ["tab:orange" if entry.rival in OURS else "tab:gray" for entry in mine]
        for axis, quantity in zip(row, quantities, strict=True):
            scale = 1e-6 if quantity == "bytes" else 1.0
            values = [
                [scale * max(value, 0.0) for value in entry.samples[quantity]] for entry in mine
            ]
            middles = [median(of) for of in values]
            whiskers = [
                [m - min(of) for m, of in zip(middles, values, strict=True)],
                [max(of) - m for m, of in zip(middles, values, strict=True)],
            ]
            axis.barh(labels, middles, xerr=whiskers, color=colours, error_kw={"elinewidth": 0.8})
            axis.set_title(
                f"{state}: {SAMPLES[quantity]}, {'MB' if quantity == 'bytes' else 's'}", fontsize=8
            )
            axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None})
    pyplot.close(figure)
