"""Wheels: how they are built, checked in a bare environment, and tried on any machine."""
