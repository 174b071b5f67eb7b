"""Maintain a root: verify, survey, repair, compact, copy, branch and measure drift."""
