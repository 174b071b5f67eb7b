"""The five figures of a report.

Each function draws one figure from a ``Record``, with a table of the same numbers.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from deltacheck.policy.causes import (
    CAUSES,
    CHANGED,
    EVENT,
    KEYFRAME,
    LATTICE,
    MERGED,
    REFRESH,
    REST,
)
from deltacheck.policy.events import Event
from deltacheck.profile.record import LeafProfile, Profile
from deltacheck.report.data import HeldLeaves, Record, StepRecord
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
    Row,
    Tip,
    add_legend,
    draw_reference,
    format_size,
    make_figure,
    set_bytes_axis,
    set_log_axis,
    shorten,
)

# If there are more checkpoints, neighbours share a column.
MOST_COLUMNS = 80

_CAUSE_COLOURS = dict(
    zip((*CAUSES, MERGED, REST), (BLUE, ORANGE, PINK, RED, GREEN, SKY, GREY), strict=True)
)
_CAUSE_WORDS = {
    KEYFRAME: "keyframe: new, or the chain is full",
    LATTICE: "lattice: the rate has changed",
    REFRESH: "refresh: moments too old",
    EVENT: "event: exact again",
    CHANGED: "changed",
    MERGED: "merged behind the training",
    REST: "rest: tables and metadata",
}
_CONTRACT_COLOURS = {"exact": BLUE, "bounded": ORANGE, "reused": PINK}
_STAGE_COLOURS = {"warm": ORANGE, "stable": GREEN, "degraded": RED}
_CYCLE = (BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY, "#000000")
_STYLES = ("-", "--", ":", "-.")
_LEAST_CHANGE = 1e-4  # share of words; the lightest colour of the heat map
# Measured error / limit; larger values are drawn here.
_MOST_USED = 3.0


def draw(record: Record) -> tuple[Drawing, ...]:
    """Draw the figures for which there is data, in the order of the page."""
    figures = [written_bytes, changes, drift, contracts, restore_cost]
    if record.profile is None and not any(step.stage for step in record.steps):
        figures.remove(drift)
    if not any(step.held for step in record.steps):
        figures.remove(contracts)
    # A $ in the path of a leaf must not begin a formula.
    with matplotlib.rc_context({"text.parse_math": False, "font.family": "DejaVu Sans"}):
        return tuple(figure(record) for figure in figures if record.steps)


# --- the figures ----------------------------------------------------------------------------------


def written_bytes(record: Record) -> Drawing:
    """Draw the bytes of each save, by the cause of their writing."""
    figure, (axes,) = make_figure(3.6)
    columns = _columns(record.steps)
    tips = []
    bottom = _draw_bars(axes, columns)
    raw = np.array([_mean(steps, lambda step: step.raw_bytes) for steps in columns])
    for column, steps in enumerate(columns):
        parts = ", ".join(
            f"{cause} {format_size(size)}"
            for cause in _CAUSE_COLOURS
            if (size := _mean_size(steps, cause))
        )
        text = (
            f"{_title(steps)}: {format_size(bottom[column])} written,"
            f" {bottom[column] / max(raw[column], 1):.1%} of the state ({parts})"
        )
        tips.append(_tip(axes, column, max(bottom[column], raw[column]), text))
    draw_reference(axes, raw)
    _step_axis(axes, columns)
    set_bytes_axis(axes, max([*bottom, *raw], default=0))
    axes.set_ylabel("written by the save", fontsize=8)
    add_legend(axes)
    rows = tuple(
        (
            str(s.step),
            str(s.seq),
            *(f"{s.causes.get(cause, 0):,}" for cause in _CAUSE_COLOURS),
            f"{s.written_bytes:,}",
            f"{s.raw_bytes:,}",
            _percent(s),
        )
        for s in record.steps
    )
    return Drawing(
        "bytes",
        "Bytes written by each save",
        f"{_mean_of_all(record.steps)}All files that a save added, by cause. keyframe: a leaf is"
        " new, or its chain of deltas reached its limit. lattice: the learning rate has changed so"
        " far that master weights need another lattice. refresh: moments that would have been"
        " reused were too old or had drifted. event: an event, a resume or a guard ended a weaker"
        " contract, and the leaf is stored exactly. changed: the difference from the save before."
        " merged: deltas that were merged behind the training since then, to shorten chains. rest:"
        " manifest and tables. The dashed line is the state in memory." + _together(record.steps),
        figure,
        tuple(tips),
        ("step", "seq", *_CAUSE_COLOURS, "sum", "state", "sum / state"),
        rows,
        0,
    )


def _mean_size(steps: Sequence[StepRecord], cause: str) -> float:
    return _mean(steps, lambda step: step.causes.get(cause, 0))


def _draw_bars(axes: Axes, columns: Sequence[Sequence[StepRecord]]) -> NDArray[np.float64]:
    """Draw the causes of each column on top of each other, and return the heights of columns."""
    bottom = np.zeros(len(columns))
    for cause, colour in _CAUSE_COLOURS.items():
        heights = np.array([_mean_size(steps, cause) for steps in columns])
        # A cause that no step has would only fill the legend.
        if not heights.any():
            continue
        # White edges between narrow bars would hide the bars.
        edge = 0.3 if len(columns) <= 40 else 0.0
        axes.bar(
            range(len(columns)),
            heights,
            0.86,
            bottom,
            color=colour,
            label=_CAUSE_WORDS[cause],
            edgecolor="white",
            linewidth=edge,
        )
        bottom += heights
    return bottom


def changes(record: Record) -> Drawing:
    """Draw the changed fraction of leaf groups over time."""
    names = list(record.groups)
    columns = _columns(record.steps)
    figure, (axes,) = make_figure(max(2.2, 0.9 + 0.2 * len(names)))
    values, tips, marks = _draw_cells(axes, names, columns)
    if names:
        _draw_shades(figure, axes, values)
    # The first group is on top, as in the table.
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_yticks(
        range(len(names)),
        [shorten(f"{name}  ({len(record.groups[name])})") for name in names],
        fontsize=7.5,
    )
    axes.tick_params(axis="y", length=0)
    _step_axis(axes, columns)
    axes.grid(False)
    if marks:
        figure.legend(handles=marks, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    rows = tuple(
        (
            name,
            str(len(record.groups[name])),
            *(_share(step.changed.get(name, math.nan)) for step in record.steps),
        )
        for name in names
    )
    return Drawing(
        "changes",
        "What changed, by leaf group",
        "Of the words of a group that were not written whole, the share whose bits differ from"
        " those of the checkpoint before. A leaf that is written whole (a keyframe) does not show"
        " what changed. White: not stored, but computed from other leaves. In brackets: number of"
        " leaves." + _together(record.steps),
        figure,
        tuple(tips),
        ("leaves", "number", *(str(step.step) for step in record.steps)),
        rows,
    )


def _draw_cells(
    axes: Axes, names: Sequence[str], columns: Sequence[Sequence[StepRecord]]
) -> tuple[NDArray[np.float64], list[Tip], list[Patch]]:
    """Draw the cells that have no shade: nothing changed, or all was written whole.

    Returns:
        The fractions of the others, the tips of all, and the marks of the legend.
    """
    values = np.full((len(names), len(columns)), np.nan)
    tips = []
    zeros = wholes = False
    for (row, name), (column, steps) in itertools.product(enumerate(names), enumerate(columns)):
        present = [step.changed[name] for step in steps if name in step.changed]
        densities = [value for value in present if value is not None]
        corner = (column - 0.5, row - 0.5)
        if densities and max(densities) > 0:
            # The scale is logarithmic, so values below its end get the lightest colour instead of
            # none.
            values[row, column] = max(statistics.fmean(densities), _LEAST_CHANGE)
        elif densities:
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="#F4F4F4", edgecolor="none"))
            zeros = True
        elif present:
            axes.add_patch(
                Rectangle(
                    corner, 1, 1, facecolor="white", edgecolor=FAINT, hatch="////", linewidth=0
                )
            )
            wholes = True
        if present:
            text = (
                f"{100 * statistics.fmean(densities):.3g} % of the words changed"
                if densities
                else "written whole"
            )
            box = (*corner, column + 0.5, row + 0.5)
            tips.append(Tip(axes, box, f"{name}, {_title(steps)}: {text}"))
    marks = [
        Patch(facecolor="white", edgecolor="#B0B0B0", hatch="////", label="written whole")
    ] * wholes
    marks += [Patch(facecolor="#F4F4F4", edgecolor=FAINT, label="nothing changed")] * zeros
    return values, tips, marks


def _draw_shades(figure: Figure, axes: Axes, values: NDArray[np.float64]) -> None:
    """Draw changed fractions as shades, and their scale."""
    # Fractions span several orders of magnitude, from a few words to all. The scale begins at the
    # decade of the smallest one, so that colours tell the groups of a run apart.
    fractions = values[~np.isnan(values)]
    decade = 10.0 ** math.floor(math.log10(fractions.min())) if fractions.size else 0.1
    image = axes.imshow(
        values,
        cmap="cividis_r",
        norm=LogNorm(min(decade, 0.1), 1),
        aspect="auto",
        interpolation="nearest",
        rasterized=True,
    )
    shrink = min(1.0, 8 / values.shape[0] + 0.2)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30, shrink=shrink)
    bar.set_label("changed words / words", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    bar.outline.set_visible(False)  # type: ignore[operator,unused-ignore]


# The units of drift, in the order of their panels.
_UNITS = {
    "lr": "in units of the learning rate",
    "octaves": "in octaves",
    "relative": "relative (L2)",
}
_DRIFT_COLUMNS = (
    *("role", "unit or stage", "step", "median", "lower quartile", "upper quartile", "reason"),
)


def drift(record: Record) -> Drawing:
    """Draw the drift over training steps, the stable start, and the stage of each checkpoint."""
    profile = record.profile
    units = [unit for unit in _UNITS if profile is not None and any(_curves(profile, unit))]
    # The last panel is the strip of stages, which every report has.
    heights = [2.0] * len(units) + [0.45]
    figure, panels = make_figure(sum(heights) + 0.9, heights, sharex=True)
    tips: list[Tip] = []
    rows: list[Row] = []
    for axes, unit in zip(panels, units, strict=False):
        assert profile is not None
        for number, (role, leaves) in enumerate(_curves(profile, unit)):
            colour, style = _CYCLE[number % len(_CYCLE)], _STYLES[number % 4]
            for step, *values in _draw_curve(axes, role, leaves, colour, style):
                rows.append((role, _UNITS[unit], str(step), *(f"{value:.4g}" for value in values)))
        heights = [y for line in axes.lines for y in np.asarray(line.get_ydata(), float).tolist()]
        set_log_axis(axes, heights)
        axes.set_ylabel(f"drift,\n{_UNITS[unit]}", fontsize=8)
        _stable_start(axes, record.stable_start)
        _events(axes, profile.events)
        add_legend(axes)
    _stage_strip(panels[-1], record.steps, tips)
    if not units:
        panels[-1].set_title(
            "No profile was given: the drift is unknown", fontsize=9, color=INK, loc="left"
        )
    panels[-1].set_xlabel("training step", fontsize=9, color=INK)
    stages = [
        ("stage", step.stage or "none", str(step.step), "", "", "", step.reason)
        for step in record.steps
    ]
    rows = [(*row, "") for row in rows]
    start = record.stable_start
    reuse = "" if start is None else f" Moments may be reused from step {start} on."
    return Drawing(
        "drift",
        "Drift, stable start and stage",
        "The change of sampled elements between two observations of the profile: the median over"
        " the leaves of a role, and their quartiles. The vertical line is the stable start,"
        " triangles are events that re-arm the policy; the strip is the policy's stage at each"
        " checkpoint." + reuse,
        figure,
        tuple(tips),
        _DRIFT_COLUMNS,
        (*rows, *stages),
        2,
    )


def contracts(record: Record) -> Drawing:
    """Draw the contracts of each step, and the measured errors."""
    figure, (top, bottom) = make_figure(4.6, [1.0, 1.5], sharex=True)
    columns = _columns(record.steps)
    tips = [*_draw_shares(top, columns), *_draw_errors(bottom, record.steps, columns)]
    _step_axis(bottom, columns)
    rows = []
    for step in record.steps:
        rows.append(
            (str(step.step), "all others", "exact", "", "", "", "", "", f"{step.exact_bytes:,}")
        )
        rows += [
            (
                str(step.step),
                h.of,
                h.contract,
                h.norm,
                f"{h.limit:.6g}",
                f"{h.measured:.6g}",
                str(h.age_steps),
                str(h.leaves),
                "",
            )
            for h in step.held
        ]
    return Drawing(
        "contracts",
        "Contracts and measured errors",
        "Above: the share of the state's bytes that a restore gives bit for bit, within a bound, or"
        " as of an earlier step. Below: for each leaf class the leaf that came nearest to its"
        " limit, as the save measured it; the dashed line is the limit." + _together(record.steps),
        figure,
        tuple(tips),
        (
            "step",
            "leaf class",
            "contract",
            "norm",
            "limit",
            "measured",
            "age in steps",
            "leaves",
            "bytes of the state",
        ),
        tuple(rows),
        4,
    )


def _draw_shares(axes: Axes, columns: Sequence[Sequence[StepRecord]]) -> list[Tip]:
    """Draw the share of the state under each contract."""
    base = np.zeros(len(columns))
    for name, colour in _CONTRACT_COLOURS.items():
        share = np.array([_mean_share(steps, name) for steps in columns])
        if share.any():
            axes.bar(range(len(columns)), share, 0.86, base, color=colour, label=name)
        base += share
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylabel("state by\ncontract", fontsize=8)
    add_legend(axes)
    tips = []
    for column, steps in enumerate(columns):
        parts = ", ".join(f"{name} {_mean_share(steps, name):.1%}" for name in _CONTRACT_COLOURS)
        tips.append(_tip(axes, column, 1, f"{_title(steps)}: {parts} of the bytes"))
    return tips


def _draw_errors(
    axes: Axes, steps: Sequence[StepRecord], columns: Sequence[Sequence[StepRecord]]
) -> list[Tip]:
    """Draw a line for each class of leaves that are not exact: measured error / limit."""
    tips = []
    held = [contract for step in steps for contract in step.held]
    kinds = dict.fromkeys((contract.of, contract.contract, contract.norm) for contract in held)
    for number, kind in enumerate(kinds):
        worst = [_worst(group, kind) for group in columns]
        # NaN leaves a gap in the line if a step has no such contract.
        heights = [
            math.nan if contract is None else min(contract.used, _MOST_USED) for contract in worst
        ]
        axes.plot(
            range(len(columns)),
            heights,
            color=_CYCLE[number % len(_CYCLE)],
            linestyle=_STYLES[number // len(_CYCLE) % 4],
            marker="o",
            markersize=3,
            label=f"{shorten(kind[0], 32)}, {kind[1]} ({kind[2]})",
        )
        for column, (height, contract) in enumerate(zip(heights, worst, strict=True)):
            if contract is not None:
                box = (column - 0.5, max(height - 0.04, 0), column + 0.5, height + 0.04)
                text = (
                    f"{kind[0]}, {_title(columns[column])}: measured {contract.measured:.3g} of"
                    f" {contract.limit:.3g} ({contract.norm})"
                )
                tips.append(Tip(axes, box, text))
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    largest = max(min(contract.used, _MOST_USED) for contract in held)
    axes.set_ylim(0, max(1.15, 1.1 * largest))
    add_legend(axes)
    axes.set_ylabel("measured error /\nits limit", fontsize=8)
    return tips


def restore_cost(record: Record) -> Drawing:
    """Draw the chain depth, and the bytes that a restore reads."""
    figure, (top, bottom) = make_figure(4.2, [1.0, 1.3], sharex=True)
    columns = _columns(record.steps)
    places = range(len(columns))
    deepest = [max(step.depth for step in steps) for steps in columns]
    mean = [_mean(steps, lambda step: step.mean_depth) for steps in columns]
    top.step(places, deepest, where="mid", color=RED, label="deepest leaf")
    top.step(places, mean, where="mid", color=BLUE, linestyle="--", label="mean over bytes")
    top.set_ylabel("deltas to apply", fontsize=8)
    top.set_ylim(0, max([*deepest, 1]) * 1.15)
    top.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    add_legend(top)
    read = [_mean(steps, lambda step: step.read_bytes) for steps in columns]
    raw = np.array([_mean(steps, lambda step: step.raw_bytes) for steps in columns])
    bottom.bar(places, read, 0.86, color=SKY, label="a restore reads")
    tips = []
    for column, steps in enumerate(columns):
        text = (
            f"{_title(steps)}: a restore reads {format_size(read[column])}; at most"
            f" {deepest[column]} deltas, {mean[column]:.1f} in the mean"
        )
        tips.append(_tip(bottom, column, max(read[column], raw[column]), text))
        tips.append(_tip(top, column, top.get_ylim()[1], text))
    draw_reference(bottom, raw)
    set_bytes_axis(bottom, max([*read, *raw], default=0))
    bottom.set_ylabel("files to read", fontsize=8)
    add_legend(bottom)
    _step_axis(bottom, columns)
    rows = tuple(
        (
            str(s.step),
            str(s.seq),
            str(s.depth),
            f"{s.mean_depth:.2f}",
            f"{s.read_bytes:,}",
            f"{s.raw_bytes:,}",
        )
        for s in record.steps
    )
    return Drawing(
        "restore",
        "What a restore costs",
        "Deltas that a restore applies, and the bytes that it reads: the chains of all leaves, and"
        " the tables of all segments that the step names." + _together(record.steps),
        figure,
        tuple(tips),
        ("step", "seq", "deepest", "mean depth", "bytes read", "state"),
        rows,
        0,
    )


# --- parts of figures -----------------------------------------------------------------------------


def _columns(steps: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Group the checkpoints to at most ``MOST_COLUMNS`` columns."""
    # Rounded up, so that there are never more columns than the limit.
    group_size = max(1, -(-len(steps) // MOST_COLUMNS))
    return [steps[first : first + group_size] for first in range(0, len(steps), group_size)]


def _mean_of_all(steps: Sequence[StepRecord]) -> str:
    """Return a sentence with the mean of all saves, the first one and merges included."""
    raw_bytes = sum(step.raw_bytes for step in steps)
    if not raw_bytes:
        return ""
    written_size = sum(step.written_bytes for step in steps)
    return (
        f"Mean of all {len(steps)} checkpoints, keyframes and merges included:"
        f" {format_size(written_size / len(steps))}, {written_size / raw_bytes:.2%} of the state. "
    )


def _together(steps: Sequence[StepRecord]) -> str:
    group_size = max(1, -(-len(steps) // MOST_COLUMNS))
    return (
        f" A column shows the mean of {group_size} checkpoints; the table lists each of them."
        if group_size > 1
        else ""
    )


def _mean(steps: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    return statistics.fmean(value(step) for step in steps)


def _mean_share(steps: Sequence[StepRecord], contract: str) -> float:
    """Return the mean share of the state's bytes under a contract."""
    return _mean(steps, lambda step: _bytes_under(step, contract) / max(step.raw_bytes, 1))


def _title(steps: Sequence[StepRecord]) -> str:
    return (
        f"step {steps[0].step}" if len(steps) == 1 else f"steps {steps[0].step} to {steps[-1].step}"
    )


def _tip(axes: Axes, column: int, top: float, text: str) -> Tip:
    """Return the tip of a column, from the axis up to ``top``."""
    return Tip(axes, (column - 0.5, 0, column + 0.5, top), text)


def _step_axis(axes: Axes, columns: Sequence[Sequence[StepRecord]]) -> None:
    # More than 16 labels would overlap.
    every = max(1, math.ceil(len(columns) / 16))
    axes.set_xticks(
        range(0, len(columns), every), [str(steps[0].step) for steps in columns[::every]]
    )
    axes.set_xlim(-0.6, max(len(columns), 1) - 0.4)
    axes.set_xlabel("training step of the checkpoint", fontsize=9, color=INK)


def _curves(profile: Profile, unit: str) -> Iterator[tuple[str, list[LeafProfile]]]:
    """Yield the leaves whose drift is in ``unit``, by role."""
    by_role: dict[str, list[LeafProfile]] = {}
    for leaf in profile.leaves.values():
        if leaf.drift_unit == unit and leaf.drift.steps:
            by_role.setdefault(leaf.role.replace("_", " "), []).append(leaf)
    yield from by_role.items()


def _draw_curve(
    axes: Axes, role: str, leaves: Sequence[LeafProfile], colour: str, style: str
) -> Iterator[tuple[int, float, float, float]]:
    """Draw the drift of the leaves of a role, and yield its points: step, median, quartiles."""
    steps, middle, low, high = _quartiles(leaves)
    # A logarithmic axis has no place for zeros, so the legend has to name them.
    is_still = not any(value > 0 for value in middle)
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(
        steps,
        middle,
        color=colour,
        linestyle=style,
        marker="o",
        markersize=2.5,
        label=f"{role}: no drift" if is_still else role,
    )
    yield from zip(steps, middle, low, high, strict=True)


def _quartiles(
    leaves: Sequence[LeafProfile],
) -> tuple[list[int], list[float], list[float], list[float]]:
    values: dict[int, list[float]] = {}
    for leaf in leaves:
        for step, value in zip(leaf.drift.steps, leaf.drift.values, strict=True):
            # A jump from zero has an infinite relative drift, which has no place on an axis.
            if math.isfinite(value):
                values.setdefault(step, []).append(value)
    steps = sorted(values)
    low, middle, high = (
        [float(np.quantile(values[step], q)) for step in steps] for q in (0.25, 0.5, 0.75)
    )
    return steps, middle, low, high


def _stable_start(axes: Axes, step: int | None) -> None:
    if step is not None:
        axes.axvline(step, color=INK, linestyle="--", linewidth=1.2, label=f"stable start, {step}")


def _events(axes: Axes, events: Sequence[Event]) -> None:
    if events:
        place = axes.get_xaxis_transform()  # x in steps, y in the height of the panel
        positions = [event.step for event in events]
        axes.plot(
            positions,
            [0.97] * len(positions),
            "v",
            color=RED,
            markersize=6,
            transform=place,
            label="event",
            clip_on=False,
        )


def _stage_strip(axes: Axes, steps: Sequence[StepRecord], tips: list[Tip]) -> None:
    # The first and the last field reach half of a mean interval beyond their step. A single step
    # gets a width of 1, or it would not be seen.
    width = (steps[-1].step - steps[0].step) / max(len(steps) - 1, 1) or 1.0
    midpoints = [(a.step + b.step) / 2 for a, b in itertools.pairwise(steps)]
    ends = [steps[0].step - width / 2, *midpoints, steps[-1].step + width / 2]
    start = 0
    # Neighbours of one stage are one area: the seams between areas would show as lines.
    for stage, group in itertools.groupby(steps, key=lambda step: step.stage):
        end = start + len(list(group))
        axes.axvspan(
            ends[start], ends[end], color=_STAGE_COLOURS.get(stage, "#EDEDED"), linewidth=0
        )
        start = end
    for step, (start_step, end_step) in zip(steps, itertools.pairwise(ends), strict=True):
        tips.append(
            Tip(
                axes,
                (start_step, 0, end_step, 1),
                f"step {step.step}: stage {step.stage or 'none (exact policy)'}"
                + (f"; {step.reason}" if step.reason else ""),
            )
        )
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["stage"])
    axes.grid(False)
    stages = {step.stage: None for step in steps}
    handles = [
        Patch(color=_STAGE_COLOURS.get(stage, "#EDEDED"), label=stage or "none (exact)")
        for stage in stages
    ]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.2), frameon=False, fontsize=8
    )


def _bytes_under(step: StepRecord, contract: str) -> int:
    return {"exact": step.exact_bytes, "bounded": step.bounded_bytes, "reused": step.reused_bytes}[
        contract
    ]


def _worst(steps: Sequence[StepRecord], kind: tuple[str, str, str]) -> HeldLeaves | None:
    candidates = [
        held for step in steps for held in step.held if (held.of, held.contract, held.norm) == kind
    ]
    return max(candidates, key=lambda contract: contract.used, default=None)


def _share(value: float | None) -> str:
    return "whole" if value is None else "" if math.isnan(value) else f"{100 * value:.4g} %"


def _percent(step: StepRecord) -> str:
    return f"{step.written_bytes / step.raw_bytes:.2%}" if step.raw_bytes else ""
