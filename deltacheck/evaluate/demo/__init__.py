"""`deltacheck demo`: a fine-tuning run that is killed, resumes, and is compared bit for bit.

The demo is a fixed plan of ``deltacheck.evaluate``: ``demonstration.py`` lists its tasks, and
``summary.py`` prints the result. The training is in ``deltacheck.evaluate.workloads``. Nothing here
imports torch before the demo runs.
"""
