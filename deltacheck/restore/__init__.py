"""Restore a step: find the chains of its leaves, read and verify them, and compute the rest."""
