"""The offline phase: what a run's state does over time, and what that allows to leave out."""

from deltacheck.profile.record import AdamRule, Curve, Event, LeafProfile, Profile

__all__ = ["AdamRule", "Curve", "Event", "LeafProfile", "Profile"]
