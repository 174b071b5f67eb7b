"""The plan of an evaluation and its results, as frozen records.

Worker processes report the results, the judges read them, and the report shows them. The names of
the fields of ``EvaluationPlan``, ``Kill``, ``MeasuredSave``, ``LeafGroup``, ``LeafCheck``,
``Ending`` and ``Recovery`` are keys of the JSON that `deltacheck eval` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deltacheck.policy.presets import policy_of

MEASURED = "measured"

# Names in the folder of an evaluation
PLAN, PROFILE, ROOTS, OBSERVED = "plan.json", "profile.json", "roots", "observed"
WEIGHTS = "weights"
ROOT, LIVE, BEFORE = "root", "live", "before"  # in the folder of a killed run


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The runs of an evaluation.

    Args:
        factory: Of workloads, as ``workload.load_factory`` reads it.
        policy: The policy, as ``presets.policy_of`` reads it.
        steps: Training steps of every run.
        every: Steps between two checkpoints.
        kills: Number of kills of each killed seed, each in a process of its own.
        seeds: The number of seeds that are killed.
        noise_seeds: The number of seeds that run unkilled, at least ``seeds``. How far apart they
            end is the noise floor.
        first_seed: The others follow it.
        profile: A file with a profile for ``auto``; ``MEASURED``: the profile of the first unkilled
            run; empty: none.
    """

    factory: str
    policy: str
    steps: int
    every: int
    kills: int
    seeds: int
    noise_seeds: int
    first_seed: int = 1
    profile: str = ""

    @property
    def is_lossless(self) -> bool:
        """Return True if the policy promises every bit."""
        return policy_of(self.policy).hidden is None

    def checkpoints(self) -> tuple[int, ...]:
        """Return the steps that are saved, after each of which training steps are left."""
        return tuple(range(self.every, self.steps, self.every))

    def killed_seeds(self) -> tuple[int, ...]:
        """Return the seeds that are killed."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    def unkilled_seeds(self) -> tuple[int, ...]:
        """Return the seeds that also run without a kill."""
        return tuple(range(self.first_seed, self.first_seed + max(self.seeds, self.noise_seeds)))


@dataclass(frozen=True, slots=True)
class Kill:
    """The moment at which a process is killed.

    It is killed at the save of ``saving_step``, after a ``share`` of the time that this save takes
    (``mid_save``), or of the time until the next save.
    """

    seed: int
    number: int
    saving_step: int
    mid_save: bool
    share: float

    @property
    def name(self) -> str:
        """A description of the kill."""
        return f"seed {self.seed}, kill {self.number + 1}"


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The task of one worker process: the name of a function of ``worker.py`` and its arguments.

    ``kill``: for ``save_until_killed`` and ``resume``.
    """

    name: str
    kill: Kill | None = None


def folder_of(folder: Path, kill: Kill) -> Path:
    """Return the folder of one killed run: its live states, and the root."""
    return folder / ROOTS / f"{kill.seed}-{kill.number}"


# --- cost of saves --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredSave:
    """One save and its peer's: of the same state, in the same process, on the same disk.

    ``stored_bytes``: of all files that the save added. ``blocking_seconds``: of training, including
    the wait for the save before. ``durable_seconds``: from the call until the save survives a power
    cut. ``peer_seconds``: to write and sync the peer's file, which blocks training as long.
    """

    step: int
    raw_bytes: int
    stored_bytes: int
    peer_bytes: int
    blocking_seconds: float
    durable_seconds: float
    peer_seconds: float


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Leaves whose paths differ in numbers alone.

    ``key_bytes``: of their newest keyframes as stored. ``save_bytes``: mean of a save after the
    first.
    """

    name: str
    leaves: int
    raw_bytes: int
    key_bytes: float
    save_bytes: float


# --- recovery -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeafCheck:
    """The comparison of a restored leaf (or Python value) with the one that was saved.

    ``contract``: ``exact``, ``bounded`` or ``reused``. ``problem``: empty if the contract holds.
    ``measured`` and ``limit``: in the contract's norm; ``None`` if bits are compared. ``role``: of
    ``profile.record.ROLES``. ``age_steps``: of a reused leaf, in updates of the optimizer.
    ``rate``: of a leaf whose error is promised in learning rates, the one that its last update
    shows (``observed_rates``), 0 if it shows none.
    """

    path: str
    contract: str
    problem: str = ""
    measured: float | None = None
    limit: float | None = None
    role: str = "other"
    age_steps: float | None = None
    rate: float | None = None

    @property
    def exercise(self) -> str:
        """The contract that the comparison has tested, ``""`` for an exact one.

        A reused leaf of age 0 was stored by the restored step itself, so no reuse was tested.
        """
        if self.contract == "exact" or (self.contract == "reused" and not self.age_steps):
            return ""
        return f"{self.role} {self.contract}"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one run.

    ``losses``: of each trained step, by step. ``evaluation``: of the final model. ``digests``: of
    the last state, by path, with every path of a tie and every Python value.
    """

    seed: int
    losses: Mapping[int, float]
    evaluation: float
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One killed run, and its continuation in a fresh process.

    ``last_step``: the last step reported before the kill. ``acknowledged_step``: the newest save
    that was reported durable by then; 0: none. ``restored_step``: from which the fresh process
    continued. ``leaves``: the number of compared leaves. ``failed``: leaves that break their
    contract. ``inexact``: leaves whose contract is not exact, whether it holds or not.
    ``not_put_back``: paths that the workload's own ``load`` did not restore. ``stage``: of the
    policy at the restored step, empty for the exact one. ``missing_steps``: the progress that the
    training from the restored step to the next checkpoint lacks beside the unkilled run, in steps;
    ``None`` if it was not measured. ``error``: why the run did not recover;
    then there is no ``ending``, and the fields after ``acknowledged_step`` have no meaning.
    """

    kill: Kill
    last_step: int
    acknowledged_step: int
    restored_step: int = 0
    restore_seconds: float = 0.0
    leaves: int = 0
    failed: tuple[LeafCheck, ...] = ()
    inexact: tuple[LeafCheck, ...] = ()
    not_put_back: tuple[str, ...] = ()
    stage: str = ""
    ending: Ending | None = None
    error: str = ""
    missing_steps: float | None = None

    @property
    def name(self) -> str:
        """A description of the recovery."""
        return self.kill.name

    @property
    def lost_steps(self) -> int:
        """Training steps that the kill undid."""
        return self.last_step - self.restored_step


@dataclass(frozen=True, slots=True)
class Evidence:
    """All results of an evaluation.

    ``framework``: of the state's arrays. ``peer``: the way of saving that ours is compared with.
    ``unkilled``: one run per seed. ``repeat``: the first seed once more. ``saving``: the first seed
    once more, with checkpoints and the peer's files. ``contracts``: the contracts that these
    checkpoints have used (``LeafCheck.exercise``).
    """

    plan: EvaluationPlan
    framework: str
    peer: str
    unkilled: tuple[Ending, ...]
    repeat: Ending
    saving: Ending
    saves: tuple[MeasuredSave, ...]
    groups: tuple[LeafGroup, ...]
    recoveries: tuple[Recovery, ...]
    contracts: tuple[str, ...] = ()
