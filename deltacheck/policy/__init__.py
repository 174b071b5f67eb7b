"""The online phase: pure functions that decide how a save stores each leaf."""

from deltacheck.policy.presets import Policy
from deltacheck.policy.retention import Keep, KeepBest

__all__ = ["Keep", "KeepBest", "Policy"]
