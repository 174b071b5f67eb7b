"""The ways of saving that the demo compares, and their promises."""

from __future__ import annotations

from dataclasses import dataclass

TORCH_SAVE, DCP, EXACT, DERIVED, AUTO, LAW = (
    "torch_save",
    "dcp_async",
    "exact",
    "derived",
    "auto",
    "law",
)


@dataclass(frozen=True, slots=True)
class Method:
    """A way of saving.

    ``key`` names its folder and its figures. ``title`` is its name in tables. ``promise`` is that
    of a restore. ``is_exact``: each bit comes back.
    """

    key: str
    title: str
    promise: str
    is_exact: bool = True


METHODS = (
    Method(TORCH_SAVE, "torch.save + fsync", "every bit"),
    Method(DCP, "torch DCP async_save", "every bit"),
    Method(EXACT, "Policy.exact()", "every bit"),
    Method(DERIVED, "Policy.exact(derive=True)", "every bit; weights computed from masters"),
    Method(
        AUTO,
        "Policy.auto()",
        "weights: every bit; masters: within a bound; moments: of a save before",
        is_exact=False,
    ),
    Method(LAW, "Policy.exact(law=True)", "every bit; optimizer state predicted by Adam's law"),
)
PEER = METHODS[0]  # ratios refer to it
OWN_LAYOUT = "bfloat16 weights, float32 masters"  # of the demo's training
