"""Measurements of the cost of saving and restoring: `python -m benchmarks --list`.

Each module measures one thing. Its `run(settings)` returns a `Result`, which is printed as tables
and written as JSON. Nothing here is a timed test: times depend on the machine, so every promised
figure is a ratio of two measurements of the same run.
"""
