"""Rebuild lost documents of segments from what is left."""
