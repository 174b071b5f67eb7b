"""The commands ``ls``, ``show``, ``log`` and ``diff``: what a root holds.

The functions that collect their documents are also those of ``deltacheck view``.
"""
