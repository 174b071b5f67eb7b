"""`deltacheck demo`: a fine-tuning that is saved in six ways, killed, and resumed from each.

``demonstration.py`` is the course. Runs without checkpoints are tasks of ``deltacheck.evaluate``;
``demo_tasks.py`` has the others. The optimizer is settled before the first save
(``workloads.builtin.demo``), so that the lossy policy shows its size in few steps. ``methods.py``
lists the ways of saving, ``savers.py`` performs them. ``summary.py`` judges and prints,
``demo_figures.py`` draws. The training is in ``deltacheck.evaluate.workloads``. Nothing here
imports torch before the demo runs.
"""
