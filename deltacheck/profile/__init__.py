"""The offline phase: profiles of a run's state, and predictions from them."""

from deltacheck.policy.events import Event
from deltacheck.profile.record import AdamRule, Curve, LeafProfile, Profile

__all__ = ["AdamRule", "Curve", "Event", "LeafProfile", "Profile"]
