"""Describe a leaf of a state: its path, type, chunks, tiles, digest and contract."""
