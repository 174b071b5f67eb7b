"""The ways of saving that the demo compares: their promises, and the steps that they have left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import deltacheck

TORCH_SAVE, DCP, EXACT, DERIVED, AUTO, LOG = (
    "torch_save",
    "dcp_async",
    "exact",
    "derived",
    "auto",
    "gradient_log",
)
# In the folder of a method
ROOT = "root"
SUFFIX, COMPLETE = ".pt", ".metadata"


@dataclass(frozen=True, slots=True)
class Method:
    """A way of saving.

    ``key`` names its folder and its figures. ``title`` is its name in tables. ``promise`` is that
    of a restore. ``is_ours``: its folder holds a root. ``is_exact``: each bit comes back.
    """

    key: str
    title: str
    promise: str
    is_ours: bool = True
    is_exact: bool = True


METHODS = (
    Method(TORCH_SAVE, "torch.save + fsync", "every bit", is_ours=False),
    Method(DCP, "torch DCP async_save", "every bit", is_ours=False),
    Method(EXACT, "Policy.exact()", "every bit"),
    Method(DERIVED, "Policy.exact(derive=True)", "every bit; weights computed from masters"),
    Method(
        AUTO,
        "Policy.auto()",
        "weights: every bit; masters: within a bound; moments: of a save before",
        is_exact=False,
    ),
    Method(LOG, "GradientLog", "every bit, or an error: optimizer steps are repeated"),
)
PEER = METHODS[0]  # ratios refer to it


def saved_steps(method: Method, folder: Path) -> list[int]:
    """Return the complete steps in the folder of a method, oldest first.

    Args:
        method: The method.
        folder: Its folder, which a killed process may have left.
    """
    if method.is_ours:
        root = folder / ROOT
        return sorted(deltacheck.open(root).steps()) if root.exists() else []
    if method.key == TORCH_SAVE:
        return sorted(int(file.stem) for file in folder.glob(f"*{SUFFIX}"))
    return sorted(int(file.parent.name) for file in folder.glob(f"*/{COMPLETE}"))
