"""The figures of any evaluation, each with a table of the same numbers."""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deltacheck.evaluate.records import Evidence
from deltacheck.report.drawing import Drawing, format_size

# Blue and vermilion of Okabe and Ito's palette, which colour-blind readers can distinguish; greys
_OURS, _WRONG, _PEER, _UNKILLED = "#0072B2", "#D55E00", "#8C8C8C", "#BBBBBB"


def draw(evidence: Evidence) -> tuple[Drawing, ...]:
    """Draw all figures, in the order in which they are shown."""
    with matplotlib.rc_context(
        {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 8}
    ):
        return _bytes(evidence), _latency(evidence), _recovery(evidence), _losses(evidence)


def _bytes(evidence: Evidence) -> Drawing:
    figure, axes = _axes()
    positions = range(len(evidence.saves))
    axes.bar(
        [x - 0.2 for x in positions],
        [save.stored_bytes / 1e6 for save in evidence.saves],
        0.4,
        color=_OURS,
        label="deltacheck",
    )
    axes.bar(
        [x + 0.2 for x in positions],
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
            format_size(s.raw_bytes),
            format_size(s.stored_bytes),
            format_size(s.peer_bytes),
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
    # The axis begins at zero, or small differences would look large.
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
        "Milliseconds. The peer blocks until its file is written and synced; our first save creates"
        " the copy that deltas are taken from."
    )
    columns = ("step", "training waits", "until durable", evidence.peer, "blocking over the peer's")
    return Drawing("latency", "Latency", caption, figure, (), columns, rows, 0)


def _recovery(evidence: Evidence) -> Drawing:
    figure, axes = _axes(0.6 + 0.25 * len(evidence.recoveries))
    rows = []
    for y, recovery in enumerate(evidence.recoveries):
        recovered = recovery.ending is not None
        correct = recovered and not recovery.failed and not recovery.not_put_back
        end = evidence.plan.steps if recovered else recovery.last_step
        trained = end - recovery.restored_step
        colour = _OURS if correct else _WRONG
        axes.barh(y, recovery.last_step, 0.6, color=_UNKILLED)
        axes.barh(y, trained, 0.3, left=recovery.restored_step, color=colour)
        paths = [leaf.path for leaf in recovery.failed] + list(recovery.not_put_back)
        rows.append(
            (
                recovery.name,
                str(recovery.last_step),
                str(recovery.restored_step),
                str(recovery.leaves),
                str(len(recovery.inexact)),
                recovery.error or ", ".join(paths) or "nothing",
            )
        )
    names = [recovery.name for recovery in evidence.recoveries]
    axes.set_yticks(range(len(names)), names)
    # The first kill is on top, as in the table.
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
    for recovery in evidence.recoveries:
        if recovery.ending is None:
            continue
        losses, final = recovery.ending.losses, recovery.ending.evaluation
        axes.plot(list(losses), list(losses.values()), color=_OURS, linewidth=0.8)
        expected = unkilled[recovery.kill.seed].evaluation
        difference = f"{final - expected:+.3g}"
        rows.append((recovery.name, f"{final:.6g}", f"{expected:.6g}", difference))
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
