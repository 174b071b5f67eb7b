"""State in sentences what a report shows, and name the command to run next."""

from __future__ import annotations

import shlex
from collections import Counter

from deltacheck.policy.causes import CHANGED, EVENT, KEYFRAME, LATTICE, MERGED, REFRESH, REST
from deltacheck.policy.presets import LOST_STEPS
from deltacheck.report.data import Record, StepRecord
from deltacheck.report.formatting import format_bytes

_CAUSES = {
    KEYFRAME: "leaves that are new, or were written whole to limit their chains",
    LATTICE: "master weights on another lattice, since the learning rate has changed",
    REFRESH: "moments that were too old to be reused",
    EVENT: "leaves that are exact after an event or a resume",
    CHANGED: "changes since the save before",
    MERGED: "deltas that were merged to shorten chains",
    REST: "tables and manifests",
}
# Saves of a larger share of the state gain from a policy with bounds.
_LARGE_SHARE = 0.1


def conclusion(record: Record) -> list[str]:
    """Return the sentences at the head of a report.

    Args:
        record: The data of the root.
    """
    if not record.steps:
        return ["The root has no committed step."]
    steps = [step for step in record.steps if step.problem is None]
    sentences = _bytes(steps) + ([_promise(steps[-1])] if steps else [])
    return [*sentences, _next_command(record)]


def _bytes(steps: list[StepRecord]) -> list[str]:
    raw_bytes = sum(step.raw_bytes for step in steps)
    written_bytes = sum(step.written_bytes for step in steps)
    if not (raw_bytes and written_bytes):
        return []
    causes: Counter[str] = Counter()
    for step in steps:
        causes.update(step.causes)
    cause, cause_bytes = causes.most_common(1)[0]
    saves = "1 save" if len(steps) == 1 else f"{len(steps)} saves"
    share, largest = 100 * written_bytes / raw_bytes, 100 * cause_bytes / written_bytes
    return [
        f"{saves} wrote {format_bytes(written_bytes, 3)}, {share:.1f} % of what whole checkpoints"
        f" take. The largest part ({largest:.0f} %): {_CAUSES[cause]}."
    ]


def _promise(step: StepRecord) -> str:
    """Return what a restore of a step gives back, and what a resume from it is expected to cost."""
    begin = f"A restore of step {step.step} gives back"
    if not step.held:
        return f"{begin} every bit."
    parts = []
    for name, size in (
        ("every bit", step.exact_bytes),
        ("a value within its bound", step.bounded_bytes),
        ("the value of an earlier step", step.reused_bytes),
    ):
        if size:
            parts.append(f"{name} of {100 * size / max(step.raw_bytes, 1):.0f} % of the state")
    ages = [held.age_steps for held in step.held if held.contract == "reused"]
    kind = "reused" if ages else "bounded"
    age = f", at most {max(ages)} updates old" if ages else ""
    return (
        f"{begin} {', '.join(parts)}{age}. A resume from such a step cost {LOST_STEPS[kind]} steps"
        " of progress in the runs that were measured."
    )


def _next_command(record: Record) -> str:
    """Return a sentence with the command that helps most."""
    root = shlex.quote(record.root)
    if record.problems:
        return f"Next: deltacheck repair {root} --dry-run names the steps that are lost."
    last = record.steps[-1]
    if last.held:
        return (
            f"Next: deltacheck verify {root} {last.step} prints the contract and the measured error"
            " of each leaf."
        )
    later_steps = record.steps[1:]
    raw_bytes = sum(step.raw_bytes for step in later_steps)
    if raw_bytes and sum(step.written_bytes for step in later_steps) > _LARGE_SHARE * raw_bytes:
        return (
            f"Next: deltacheck plan {root} --policy exact --policy auto prints what the stage-aware"
            " policy would write."
        )
    return f"Next: deltacheck verify {root} reads and checks all steps."
