"""The figures of the demo's page, each with a table of the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, stdev

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from deltacheck.evaluate.demo import summary
from deltacheck.evaluate.demo.methods import AUTO, DCP, DERIVED, EXACT, LOG, TORCH_SAVE
from deltacheck.evaluate.demo.summary import DemoOutcome, Way
from deltacheck.evaluate.workloads.recipe import MATURED_STEPS
from deltacheck.report.drawing import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    RED,
    SKY,
    Drawing,
    format_size,
    make_figure,
    set_log_axis,
)

_COLOURS = {TORCH_SAVE: INK, DCP: GREY, EXACT: BLUE, DERIVED: SKY, AUTO: ORANGE, LOG: GREEN}
_MARKERS = {TORCH_SAVE: "s", DCP: "x", EXACT: "o", DERIVED: "v", AUTO: "D", LOG: "^"}


def facts(outcome: DemoOutcome) -> dict[str, str]:
    """Return the facts at the head of the page."""
    kill = outcome.kill
    holds = all(verdict.holds for verdict in outcome.verdicts)
    return {
        "verdict": "every promise was kept" if holds else "a promise was broken",
        "model": f"{outcome.parameters / 1e6:.1f} M parameters, AdamW, bf16 weights",
        "run": f"{outcome.steps} steps, a checkpoint every {outcome.every}",
        "optimizer": f"settled: {MATURED_STEPS:,} steps added to its count",
        "killed": f"after step {kill['last_step']}, in the save of step {kill['saving_step']}",
        "a training step": f"{median(outcome.step_seconds) * 1e3:.0f} ms",
        "seed": str(outcome.seed),
        "in all": f"{outcome.seconds:.0f} s",
    }


def draw(outcome: DemoOutcome) -> tuple[Drawing, ...]:
    """Draw all figures, in the order in which they are shown."""
    with matplotlib.rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        figures = (_overview, _bytes, _losses, _noise, _promises)
        return tuple(figure(outcome) for figure in figures)


def _overview(outcome: DemoOutcome) -> Drawing:
    """Draw bytes, waits and restore of each way as bars beside each other."""
    figure = Figure(figsize=(12.0, 2.9), layout="constrained", facecolor="white")
    peer = outcome.peer
    parts: tuple[tuple[str, Callable[[Way], float], Callable[[float], str]], ...] = (
        (
            "bytes of a save, mean",
            lambda way: way.mean_bytes / 1e6,
            lambda value: f"{value:.1f} MB, {_share(value * 1e6 / peer.mean_bytes)}",
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
            lambda way: way.restore_seconds * 1e3,
            lambda value: f"{value:.0f} ms",
        ),
    )
    names = [way.method.title for way in outcome.ways]
    colours = [_COLOURS[way.method.key] for way in outcome.ways]
    panels = figure.subplots(1, len(parts), sharey=True)
    for axes, (title, value_of, text_of) in zip(panels, parts, strict=True):
        values = [value_of(way) for way in outcome.ways]
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
        axes.set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    caption = (
        "One training, saved in each way at every checkpoint. Bytes: all files divided by the"
        " number of checkpoints. Median: of the bytes of the saves, most of which follow the stable"
        " start of Policy.auto(). Waits: the median of the saves beside which training went on."
        " Restore: into a new process, with files in memory. Before the first save, the optimizer"
        " was settled: after some steps its moments were set to their unbiased estimates, and"
        f" {MATURED_STEPS:,} steps were added to its count."
    )
    columns = ("way", *summary.COSTS[1:])
    rows = tuple(summary.costs(outcome))
    return Drawing("overview", "Cost of a checkpoint", caption, figure, (), columns, rows)


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"


def _bytes(outcome: DemoOutcome) -> Drawing:
    figure, (axes,) = make_figure(3.4)
    rows = []
    for way in outcome.ways:
        steps = [save["step"] for save in way.saves]
        sizes = [save["stored_bytes"] for save in way.saves]
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
    sizes = [save["stored_bytes"] / 1e6 for way in outcome.ways for save in way.saves]
    set_log_axis(axes, sizes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} MB"))
    axes.set_xlabel("step", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    caption = (
        "Bytes of each save, on a logarithmic axis. The first save of each way has the whole"
        " state. Policy.auto() is exact until the run is stable. The gradient log stores the state"
        " itself every few saves."
    )
    columns = ("way", "step", "bytes")
    return Drawing("bytes", "Bytes of each save", caption, figure, (), columns, tuple(rows))


def _losses(outcome: DemoOutcome) -> Drawing:
    figure, (axes,) = make_figure(3.0)
    steps = list(outcome.losses)
    axes.plot(steps, list(outcome.losses.values()), color=FAINT, linewidth=5, label="not killed")
    for way in outcome.ways:
        # Drawn one upon the other: equal losses show as a single line.
        axes.plot(
            list(way.losses),
            list(way.losses.values()),
            color=_COLOURS[way.method.key],
            linewidth=1.2,
            marker=_MARKERS[way.method.key],
            markersize=3,
            label=f"from {way.method.title}",
        )
    axes.axvline(outcome.kill["last_step"], color=RED, linewidth=1, linestyle="--", label="SIGKILL")
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("training loss", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    rows = tuple(
        (
            str(step),
            f"{loss:.6f}",
            *(
                f"{way.losses[step] - loss:+.1e}" if step in way.losses else ""
                for way in outcome.ways
            ),
        )
        for step, loss in outcome.losses.items()
    )
    caption = (
        "The loss of each step of the run that was not killed, and of the runs that were resumed."
        " The table has the differences."
    )
    columns = ("step", "not killed", *(way.method.title for way in outcome.ways))
    return Drawing("losses", "Kill and resume", caption, figure, (), columns, rows, 0)


def _noise(outcome: DemoOutcome) -> Drawing:
    figure, (axes,) = make_figure(2.6)
    first, *seed_losses = outcome.final_losses
    noise = stdev(outcome.final_losses)
    _draw_noise(axes, outcome, noise, [loss - first for loss in seed_losses])
    rows = [
        (
            way.method.title,
            f"{way.final_loss:.6f}",
            f"{way.difference:+.2e}",
            str(way.different_leaves),
        )
        for way in outcome.ways
    ]
    rows += [
        (f"seed {outcome.seed + number}, not killed", f"{loss:.6f}", f"{loss - first:+.2e}", "")
        for number, loss in enumerate(seed_losses, start=1)
    ]
    caption = (
        "Held-out loss at the end of each resumed run, less that of the run that was not killed."
        f" Shaded: one standard deviation between {len(outcome.final_losses)} seeds, {noise:.2e}."
    )
    columns = ("run", "held-out loss", "difference", "leaves that differ")
    return Drawing("noise", "What was kept", caption, figure, (), columns, tuple(rows))


def _draw_noise(axes: Axes, outcome: DemoOutcome, noise: float, seed_losses: list[float]) -> None:
    axes.axvspan(-noise, noise, color="#F0F0F0")
    places = range(len(outcome.ways))
    for place, way in zip(places, outcome.ways, strict=True):
        axes.plot(
            way.difference, place, color=_COLOURS[way.method.key], marker=_MARKERS[way.method.key]
        )
        words = "every bit" if way.different_leaves == 0 else f"{way.difference:+.1e}"
        axes.annotate(
            words, (way.difference, place), (8, -3), textcoords="offset points", fontsize=8
        )
    names = [way.method.title for way in outcome.ways]
    axes.plot(seed_losses, [len(names)] * len(seed_losses), "o", color=PINK)
    axes.set_yticks([*places, len(names)], [*names, "other seeds, not killed"], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("difference of the final held-out loss", fontsize=8)


def _promises(outcome: DemoOutcome) -> Drawing:
    """Draw the leaves of the restored step by their promise."""
    figure, (axes,) = make_figure(2.4)
    kinds = {"exact": BLUE, "bounded": ORANGE, "reused": PINK}
    rows = []
    for place, way in enumerate(outcome.ways):
        counts = dict.fromkeys(kinds, 0)
        counts["exact"] = way.leaves - len(way.inexact)
        for leaf in way.inexact:
            counts[leaf["contract"]] += 1
        begin = 0
        for kind, count in counts.items():
            label = kind if place == 0 else None
            axes.barh(place, count, 0.62, left=begin, color=kinds[kind], label=label)
            begin += count
        lost = outcome.kill["last_step"] - way.restored_step
        rows.append(
            (
                way.method.title,
                way.method.promise,
                str(way.restored_step),
                str(lost),
                summary.kept(way),
            )
        )
    axes.set_yticks(
        range(len(outcome.ways)), [way.method.title for way in outcome.ways], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlabel("leaves and values of the restored step, by contract", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.03))
    caption = (
        "Each restored leaf was compared with the live one that was saved: exact leaves by their"
        " bits, the others by the limits of their contracts, measured anew."
    )
    columns = ("way", "promise", "restored step", "steps lost", "came back")
    return Drawing("promises", "Promises", caption, figure, (), columns, tuple(rows), 2)
