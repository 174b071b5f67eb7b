"""Carry out a policy at each save: derive, quantize or reuse leaves, and measure the errors.

The laws are numbered as in ``docs/explanation/policy.md``.
"""
