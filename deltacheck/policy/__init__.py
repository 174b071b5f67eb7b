"""The online phase: what a save must write, decided by pure functions over frozen records."""

from deltacheck.policy.exact import Policy, needs_keyframe

__all__ = ["Policy", "needs_keyframe"]
