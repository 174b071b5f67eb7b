"""The offline phase: what a run's state does over time, and what that allows to leave out."""

from deltacheck.policy.events import Event
from deltacheck.profile.record import AdamRule, Curve, LeafProfile, Profile

__all__ = ["AdamRule", "Curve", "Event", "LeafProfile", "Profile"]
