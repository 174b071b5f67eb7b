"""`deltacheck eval`: what checkpoints of a run cost, whether it recovers, and whether the model is
as
good as without the kill.

Read `run.py` first: it is the story. `workload.py` is what a user gives; `child.py` plays its parts
in processes of their own, which may be killed; `records.py` is what they bring back; `contract.py`,
`statistics.py` and `judge.py` decide, as pure functions over it.
"""

from deltacheck.evaluate.workload import Workload

__all__ = ["Workload"]
