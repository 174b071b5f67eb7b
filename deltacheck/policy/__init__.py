"""The online phase: what a save must write, decided by pure functions over frozen records."""

from deltacheck.policy.presets import Policy
from deltacheck.policy.retention import KeepBest

__all__ = ["KeepBest", "Policy"]
