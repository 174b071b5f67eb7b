"""The plan and the results of an evaluation whose killed run is saved in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltacheck.evaluate.records import EvaluationPlan, Evidence, Recovery

FINAL_STATE = "final_state"  # of the first unkilled run, in the folder of the evaluation


@dataclass(frozen=True, slots=True)
class WayPlan(EvaluationPlan):
    """The runs of a demo.

    The killed run is saved in each of ``ways`` (keys of ``methods.METHODS``), side by side, and
    resumed from each of them. The last step is saved, too, because the ends of runs are compared.
    """

    ways: tuple[str, ...] = ()

    def checkpoints(self) -> tuple[int, ...]:
        """Return the steps that are saved."""
        return (*range(self.every, self.steps, self.every), self.steps)


@dataclass(frozen=True, slots=True)
class WaySaves:
    """The saves of one way until the kill.

    ``saves``: an event for each complete one; ``overlapped`` is true if training went on beside it.
    ``mean_bytes``: of all files of a checkpoint; merges of a root's deltas are included.
    """

    way: str
    saves: tuple[Mapping[str, Any], ...]
    mean_bytes: float


@dataclass(frozen=True, slots=True)
class WayRecovery(Recovery):
    """The recovery from one way of saving."""

    way: str = ""

    @property
    def name(self) -> str:
        """A description of the recovery."""
        return f"{self.kill.name}, {self.way}"


@dataclass(frozen=True, slots=True)
class WayEvidence(Evidence):
    """All results of a demo. ``way_saves``: of each way, in the killed run."""

    recoveries: tuple[WayRecovery, ...]
    way_saves: tuple[WaySaves, ...] = ()
