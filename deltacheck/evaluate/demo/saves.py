"""The saves of the demo: their measured times, and the changes that their manifests record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltacheck.evaluate.processes import Event
from deltacheck.evaluate.workloads.leaf_classes import leaf_class
from deltacheck.leaf.spec import LeafKind
from deltacheck.report import history
from deltacheck.store.roots.opening import open_root


def describe_saves(root: Path, saved: list[Event]) -> list[dict[str, Any]]:
    """Add to the times of each save what its manifest says of its leaves, summed up by class."""
    opened = open_root(root)
    steps = {step.ref.step: step for step in history.steps(opened, history.committed(opened, []))}
    records = []
    for event in saved:
        states = steps[event["step"]].states or {}
        by_class: dict[str, list[history.ReportedLeaf]] = {}
        for path, state in states.items():
            by_class.setdefault(leaf_class(path), []).append(state)
        records.append(
            {
                "event": "saved",
                "step": event["step"],
                "keyframe": all(state.kind is LeafKind.KEYFRAME for state in states.values()),
                "raw_bytes": sum(state.spec.raw_bytes for state in states.values()),
                "stored_bytes": event["stored_bytes"],
                "blocking_seconds": event["blocking_seconds"],
                "durable_seconds": event["durable_seconds"],
                "classes": {name: _change(leaves) for name, leaves in by_class.items()},
            }
        )
    return records


def _change(leaves: list[history.ReportedLeaf]) -> dict[str, int]:
    """Sum up leaves; all words of a leaf that was written whole count as changed."""
    counts = [state.changed_words() for state in leaves]
    return {
        "raw_bytes": sum(state.spec.raw_bytes for state in leaves),
        "words": sum(state.words for state in leaves),
        "changed": sum(
            state.words if count is None else count
            for state, count in zip(leaves, counts, strict=True)
        ),
    }
