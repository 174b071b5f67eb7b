"""The leaf classes that figures are grouped by: they change at very different rates."""

from __future__ import annotations

_OPTIMIZER_STATE = {"master": "fp32 master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

CLASSES = ("bf16 weights", *_OPTIMIZER_STATE.values(), "other")


def leaf_class(path: str) -> str:
    """Return the class of a leaf of the training state, from its path."""
    names = path.split("/")
    if names[0] == "model":
        return "bf16 weights"
    if names[:2] == ["optimizer", "state"]:
        return _OPTIMIZER_STATE.get(names[-1], "other")
    return "other"
