"""Codes of leaves that are restored with an error: masters on lattices, moments, ratios."""
