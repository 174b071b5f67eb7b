"""Comparison of a restored state with the live one that was saved."""
