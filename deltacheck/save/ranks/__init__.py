"""Saves of several ranks: their messages, their agreement, and one step for all."""
