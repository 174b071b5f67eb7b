"""Backends: the only packages that import a framework, one package for each framework."""
