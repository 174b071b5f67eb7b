"""Roots: their segments, their committed steps, tags, opening and creation."""
