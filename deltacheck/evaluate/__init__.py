"""`deltacheck eval`: the cost of a run's checkpoints, its recovery, and the quality of its model.

``run.py`` is the course of an evaluation, and ``workload.py`` is what a user implements.
``session.py`` gives tasks to processes that may be killed, ``worker.py`` performs them, and
``records.py`` holds their results. ``contract.py``, ``significance.py`` and ``judge.py`` decide, as
pure functions of the results.
"""

from deltacheck.evaluate.workload import TorchRun, Workload

__all__ = ["TorchRun", "Workload"]
