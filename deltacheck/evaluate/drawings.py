"""The figures of an evaluation's page: evidence -> drawings, each with the table that says the same
in numbers.
"""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deltacheck.evaluate.records import Evidence
from deltacheck.report.figures import Drawing, size

_OURS, _PEER, _UNKILLED = "#0072B2", "#8C8C8C", "#BBBBBB"  # Okabe and Ito's blue; greys


def draw(evidence: Evidence) -> tuple[Drawing, ...]:
    """All figures, in the order in which they are shown."""
    with matplotlib.rc_context(
        {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 8}
    ):
        return _bytes(evidence), _latency(evidence), _recovery(evidence), _losses(evidence)


def _bytes(evidence: Evidence) -> Drawing:
    figure, axes = _axes()
    places = range(len(evidence.saves))
    axes.bar(
        [at - 0.2 for at in places],
        [save.stored_bytes / 1e6 for save in evidence.saves],
        0.4,
        color=_OURS,
        label="deltacheck",
    )
    axes.bar(
        [at + 0.2 for at in places],
        [save.peer_bytes / 1e6 for save in evidence.saves],
        0.4,
        color=_PEER,
        label=evidence.peer,
    )
    _saves_axis(axes, evidence)
    axes.set_ylabel("MB")
    rows = tuple(
        (
            str(s.step),
            size(s.raw_bytes),
            size(s.stored_bytes),
            size(s.peer_bytes),
            f"{s.stored_bytes / s.peer_bytes:.2%}",
        )
        for s in evidence.saves
    )
    caption = "Bytes of all files that a save adds, beside the peer's file of the same state."
    return Drawing(
        "size",
        "Size",
        caption,
        figure,
        (),
        ("step", "in memory", "deltacheck", evidence.peer, "share"),
        rows,
        0,
    )


def _latency(evidence: Evidence) -> Drawing:
    figure, axes = _axes()
    for name, colour, style, seconds in (
        ("training waits", _OURS, "-", [save.blocking_seconds for save in evidence.saves]),
        ("until durable", _OURS, "--", [save.durable_seconds for save in evidence.saves]),
        (evidence.peer, _PEER, "-", [save.peer_seconds for save in evidence.saves]),
    ):
        axes.plot(
            [1e3 * value for value in seconds],
            color=colour,
            linestyle=style,
            marker=".",
            label=name,
        )
    _saves_axis(axes, evidence)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    rows = tuple(
        (
            str(s.step),
            *(
                f"{1e3 * value:.1f}"
                for value in (s.blocking_seconds, s.durable_seconds, s.peer_seconds)
            ),
            f"{s.blocking_seconds / s.peer_seconds:.2f}",
        )
        for s in evidence.saves
    )
    caption = (
        "Milliseconds. The peer blocks until its file is written and synced; our first save makes"
        " the copy that later ones are compared with."
    )
    columns = ("step", "training waits", "until durable", evidence.peer, "blocking over the peer's")
    return Drawing("latency", "Latency", caption, figure, (), columns, rows, 0)


def _recovery(evidence: Evidence) -> Drawing:
    figure, axes = _axes(0.6 + 0.25 * len(evidence.recoveries))
    rows = []
    for at, one in enumerate(evidence.recoveries):
        good = one.ending is not None and not one.failed and not one.not_put_back
        end = evidence.plan.steps if one.ending is not None else one.last_step
        axes.barh(at, one.last_step, 0.6, color=_UNKILLED)
        axes.barh(
            at,
            end - one.restored_step,
            0.3,
            left=one.restored_step,
            color=_OURS if good else "#D55E00",
        )
        wrong = one.error or ", ".join([leaf.path for leaf in one.failed] + list(one.not_put_back))
        rows.append(
            (
                one.kill.name,
                str(one.last_step),
                str(one.restored_step),
                str(one.leaves),
                str(len(one.inexact)),
                wrong or "nothing",
            )
        )
    axes.set_yticks(range(len(evidence.recoveries)), [one.kill.name for one in evidence.recoveries])
    axes.invert_yaxis()
    axes.set_xlabel("step")
    caption = (
        "Grey: trained until the kill. Blue: restored in a fresh process, and trained to the end;"
        " red: a leaf was not what was promised."
    )
    columns = (
        "killed",
        "last step",
        "restored",
        "leaves compared",
        "promised less than every bit",
        "wrong",
    )
    return Drawing("recovery", "Recovery", caption, figure, (), columns, tuple(rows))


def _losses(evidence: Evidence) -> Drawing:
    figure, axes = _axes()
    unkilled = {ending.seed: ending for ending in evidence.unkilled}
    for ending in evidence.unkilled:
        axes.plot(list(ending.losses), list(ending.losses.values()), color=_UNKILLED, linewidth=0.8)
    rows = []
    for one in evidence.recoveries:
        if one.ending is None:
            continue
        axes.plot(
            list(one.ending.losses), list(one.ending.losses.values()), color=_OURS, linewidth=0.8
        )
        without = unkilled[one.kill.seed].evaluation
        rows.append(
            (
                one.kill.name,
                f"{one.ending.evaluation:.6g}",
                f"{without:.6g}",
                f"{one.ending.evaluation - without:+.3g}",
            )
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss of a step")
    caption = (
        "Grey: unkilled seeds. Blue: trained after a restore; equal curves lie on each other. The"
        " table has the held-out losses at the end."
    )
    return Drawing(
        "quality",
        "Quality",
        caption,
        figure,
        (),
        ("killed", "final loss", "unkilled", "difference"),
        tuple(rows),
    )


def _axes(height: float = 2.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10.0, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _saves_axis(axes: Axes, evidence: Evidence) -> None:
    axes.set_xticks(range(len(evidence.saves)), [str(save.step) for save in evidence.saves])
    axes.set_xlabel("step")
    axes.legend(frameon=False)
