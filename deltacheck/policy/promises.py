"""The promises of a policy for people, before the first save."""

from __future__ import annotations

from deltacheck.policy.decide import mean_error
from deltacheck.policy.presets import Hidden, Policy


def promises(policy: Policy) -> list[str]:
    """Return what a restore gives back under a policy, one line for each kind of leaf.

    Args:
        policy: The policy.
    """
    hidden = policy.hidden
    if hidden is None:
        return ["all leaves: every bit"]
    lines = []
    if hidden.float32_weights == "bounded":
        lines.append(f"float32 weights: within {_lr(hidden)}")
    if hidden.weights == "exact":
        lines.append(
            f"masters of bfloat16 weights: within {_lr(hidden)}, and in the cell of their weight"
        )
    else:
        lines.append(f"bfloat16 weights: the cast of their master, which is within {_lr(hidden)}")
    if hidden.moments != "exact":
        lines += [
            f"second moments of Adam: within {hidden.moment_error_octaves:g} octaves",
            f"first moments of Adam: within {mean_error(hidden):g} updates",
        ]
    if hidden.moments == "reused":
        age = hidden.max_age_steps or "1 / (1 - beta2)"
        lines.append(
            f"moments once the run is stable: those of one earlier step, at most {age} updates old;"
            " each resume then costs 2 to 3.5 steps of progress (measured with beta1 = 0.9)"
        )
    lines.append("all other leaves, and all leaves of a save after an event: every bit")
    return lines


def _lr(hidden: Hidden) -> str:
    return f"{hidden.master_error_lr:g} learning rates"
