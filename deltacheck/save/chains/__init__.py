"""Chains of deltas between saves: their state, and leaves that are written whole again."""
