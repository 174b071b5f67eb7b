"""The figures of the demo: its ways beside each other, then those of its evaluation."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.demo import evaluation_figures, results
from benchmarks.demo.methods import AUTO, DCP, DERIVED, EXACT, LAW, TORCH_SAVE
from benchmarks.demo.results import DemoOutcome, Way
from deltacheck.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    Drawing,
    format_size,
    make_figure,
    set_log_axis,
)

_COLOURS = {TORCH_SAVE: INK, DCP: GREY, EXACT: BLUE, DERIVED: SKY, AUTO: ORANGE, LAW: GREEN}
_MARKERS = {TORCH_SAVE: "s", DCP: "x", EXACT: "o", DERIVED: "v", AUTO: "D", LAW: "^"}


def facts(outcome: DemoOutcome) -> dict[str, str]:
    """Return the facts at the head of the page."""
    plan, recovery = outcome.evidence.plan, outcome.peer.recovery
    return {
        "verdict": "every promise was kept" if outcome.holds else "a promise was broken",
        "state": f"{format_size(outcome.evidence.saves[-1].raw_bytes)}, AdamW, bf16 weights",
        "run": f"{plan.steps} steps, a checkpoint every {plan.every}",
        "killed": f"after step {recovery.last_step}, in the save of step"
        f" {recovery.kill.saving_step}",
        "noise": f"{outcome.noise:.1e}, standard deviation of the final loss between seeds",
        "seed": str(plan.first_seed),
        "in all": f"{outcome.seconds:.0f} s",
    }


def draw(outcome: DemoOutcome) -> tuple[Drawing, ...]:
    """Draw all figures, in the order in which they are shown."""
    with matplotlib.rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        figures = (_overview(outcome), _bytes(outcome))
    return (*figures, *evaluation_figures.draw(outcome.evidence))


def _overview(outcome: DemoOutcome) -> Drawing:
    """Draw bytes, waits and restore of each way as bars, and below them bytes by layout."""
    figure = Figure(figsize=(12.0, 4.6), layout="constrained", facecolor="white")
    upper, lower = figure.subfigures(2, 1, height_ratios=(2.9, 1.7))
    peer = outcome.peer
    parts: tuple[tuple[str, Callable[[Way], float], Callable[[float], str]], ...] = (
        (
            "bytes of a save, mean",
            lambda way: way.saved.mean_bytes / 1e6,
            lambda value: f"{value:.1f} MB, {_share(value * 1e6 / peer.saved.mean_bytes)}",
        ),
        (
            "bytes of a save, median",
            lambda way: way.median_bytes / 1e6,
            lambda value: f"{value:.1f} MB, {_share(value * 1e6 / peer.median_bytes)}",
        ),
        (
            "training waits for a save",
            lambda way: way.waits * 1e3,
            lambda value: f"{value:.1f} ms",
        ),
        (
            "restore after the kill",
            lambda way: way.recovery.restore_seconds * 1e3,
            lambda value: f"{value:.0f} ms",
        ),
    )
    names = [way.method.title for way in outcome.ways]
    colours = [_COLOURS[way.method.key] for way in outcome.ways]
    panels = upper.subplots(1, len(parts), sharey=True)
    for axes, (title, value_of, text_of) in zip(panels, parts, strict=True):
        values = [value_of(way) for way in outcome.ways]
        _bars(axes, title, values, colours, text_of)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    by_layout = results.shares_by_layout(outcome)
    lower.suptitle("Bytes of a save in three layouts, mean, of torch.save", fontsize=9, color=INK)
    panels = lower.subplots(1, len(by_layout), sharey=True)
    for axes, (name, shares) in zip(panels, by_layout.items(), strict=True):
        _bars(axes, name, list(shares.values()), [_COLOURS[key] for key in shares], _share)
        titles = [way.method.title for way in outcome.ways if way.method.key in shares]
        axes.set_yticks(range(len(titles)), titles, fontsize=8)
    panels[0].invert_yaxis()
    caption = (
        "One training, saved in each way at every checkpoint. Bytes: of all files of"
        " the checkpoints. Waits: the median of the saves beside which training went on. Restore:"
        " into a new process, with files in memory. Below: the same bytes in three layouts of the"
        " state, the first save included; the second and third are short trainings of their own."
    )
    columns = ("way", *results.COSTS[1:])
    rows = tuple(results.costs(outcome))
    return Drawing("overview", "Cost of a checkpoint", caption, figure, (), columns, rows)


def _bars(
    axes: Axes,
    title: str,
    values: list[float],
    colours: list[str],
    text_of: Callable[[float], str],
) -> None:
    axes.barh(range(len(values)), values, 0.62, color=colours)
    for place, value in enumerate(values):
        axes.annotate(
            text_of(value), (value, place), (4, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    axes.set_xlim(0, max(values) * 1.7)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def _bytes(outcome: DemoOutcome) -> Drawing:
    figure, (axes,) = make_figure(3.4)
    rows = []
    for way in outcome.ways:
        steps = [save["step"] for save in way.saved.saves]
        sizes = [save["stored_bytes"] for save in way.saved.saves]
        axes.plot(
            steps,
            [size / 1e6 for size in sizes],
            color=_COLOURS[way.method.key],
            marker=_MARKERS[way.method.key],
            markersize=4,
            linewidth=1.2,
            label=way.method.title,
        )
        rows += [
            (way.method.title, str(step), format_size(size))
            for step, size in zip(steps, sizes, strict=True)
        ]
    sizes = [save["stored_bytes"] / 1e6 for way in outcome.ways for save in way.saved.saves]
    set_log_axis(axes, sizes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MB"))
    axes.set_xlabel("step", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    caption = (
        "Bytes of each save, on a logarithmic axis. The first save of each way has the whole"
        " state. Policy.auto() reuses moments once the run is stable."
    )
    columns = ("way", "step", "bytes")
    return Drawing("bytes", "Bytes of each save", caption, figure, (), columns, tuple(rows))
