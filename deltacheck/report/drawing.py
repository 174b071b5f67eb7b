"""Drawings: a figure of Matplotlib, a table with the same numbers, and tips.

One library draws both the vector graphics of a page and images, without a browser and without a
script in the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from deltacheck.report.formatting import escape_unprintable, format_bytes

_WIDTH = 10.0  # inches

# The colours of Okabe and Ito, which colour-blind readers can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
RED = "#D55E00"
PINK = "#CC79A7"
GREY = "#8C8C8C"
INK = "#222222"
FAINT = "#D9D9D9"

Row: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tip:
    """A text that a page shows for an area of a figure.

    Attributes:
        axes: Axes whose data coordinates ``box`` uses.
        box: Left, bottom, right and top of the area.
        text: The text.
    """

    axes: Axes
    box: tuple[float, float, float, float]
    text: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure and its table.

    Attributes:
        name: Name of its file.
        title: Title.
        caption: Explanation above the figure.
        figure: The figure.
        tips: Texts for areas of the figure.
        columns: Headings of the table.
        rows: Rows of the table. It has every step, also if the figure combines steps.
        words: Number of the first columns that are texts, not numbers.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    tips: tuple[Tip, ...]
    columns: Row
    rows: tuple[Row, ...]
    words: int = 1


def format_size(count: float) -> str:
    """Format a number of bytes with three significant digits."""
    return format_bytes(count, 3)


def make_figure(
    height: float, heights: Sequence[float] = (1.0,), sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure of panels one below the other.

    Args:
        height: Height of the figure in inches.
        heights: Relative heights of the panels.
        sharex: If true, the panels have the same x axis.
    """
    # ``Figure`` is used without pyplot, which would keep every figure alive and may open a display.
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="white")
    subplots = figure.subplots(
        len(heights), 1, sharex=sharex, squeeze=False, gridspec_kw={"height_ratios": list(heights)}
    )
    panels: list[Axes] = list(subplots[:, 0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#777777")
        # Also for panels that share an axis, whose upper labels Matplotlib hides.
        axes.tick_params(colors=INK, labelsize=8, color="#777777", labelbottom=True)
        axes.grid(axis="y", color="#E8E8E8", linewidth=0.7)
        axes.set_axisbelow(True)
    return figure, panels


def add_legend(axes: Axes) -> None:
    """Add a legend beside the panel. The top of a stack comes first."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            # A stack is drawn from the bottom, so its labels come in the opposite order.
            handles[::-1],
            labels[::-1],
            frameon=False,
            fontsize=8,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.03),
        )


def draw_reference(axes: Axes, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """Draw the size of the state as a dashed line over columns."""
    # The line begins and ends at the edges of the columns, half a step beyond their centres.
    axes.step(
        [-0.5, *(k + 0.5 for k in range(len(values)))],
        [values[0], *values],
        where="pre",
        color=INK,
        linestyle="--",
        linewidth=1,
        label="state in memory",
    )


def set_bytes_axis(axes: Axes, most: float) -> None:
    """Set a y axis from 0 to ``most`` bytes, with ticks at round binary sizes."""
    # Ticks are chosen in this unit: round decimal numbers of bytes are odd numbers of MiB.
    unit = 1024 ** max(0, math.floor(math.log(most, 1024))) if most >= 1 else 1
    axes.set_ylim(0, most * 1.12 if most else 1)
    ticks = [
        value * unit
        for value in MaxNLocator(nbins=5).tick_values(0, most / unit)
        if value * unit <= most * 1.12
    ]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))


def set_log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with labelled ticks however small the range is.

    Args:
        axes: The axes.
        values: The values to show. Without a positive one the axis stays linear.
    """
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:
        return
    low, high = min(positive) / 1.3, max(positive) * 1.3
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # Powers of ten alone; if there are few in the range, more digits.
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [d * 10.0**power for power in decades for d in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: max(1, len(ticks) // 8)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def shorten(name: str, most: int = 44) -> str:
    """Shorten a leaf path by its middle."""
    name = escape_unprintable(name)
    return name if len(name) <= most else f"{name[: most // 2 - 4]}...{name[-most // 2 :]}"
