"""What saving and restoring costs, measured against the figures that the documents quote: `python
-m
benchmarks --list`.

Each module measures one thing: its `run(settings)` gives a `Result`, which is printed as tables and
written as JSON. Nothing here is a timed test: times depend on the machine, so every promise is a
ratio of two things measured in the same run.
"""
