"""What an evaluation found, as frozen records: the processes bring them back, the judges read them,
the report shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

POLICIES = ("exact", "model_exact", "post_training")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. ``factory``: of workloads, as ``workload.find`` takes it. ``steps``: of every
    run,
    a checkpoint after every ``every``-th.

    ``seeds`` runs are killed ``kills`` times each, one kill a process; ``noise_seeds`` (at least as
    many) run unkilled, and how far apart they end is the noise floor. ``policy``: of ``POLICIES``.
    ``profile``: a file for ``post_training``; empty: of the first unkilled run.
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

    def checkpoints(self) -> tuple[int, ...]:
        """The steps that are saved. Not the last one: what is restored must have something left to
        do.
        """
        return tuple(range(self.every, self.steps, self.every))

    def killed_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.first_seed, self.first_seed + self.seeds))

    def unkilled_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.first_seed, self.first_seed + max(self.seeds, self.noise_seeds)))


@dataclass(frozen=True, slots=True)
class Kill:
    """When a process is to die: at the save of ``saving_step``, within ``share`` of the time that
    this
    save takes (``mid_save``), or of the time until the next one.
    """

    seed: int
    number: int
    saving_step: int
    mid_save: bool
    share: float

    @property
    def name(self) -> str:
        return f"seed {self.seed}, kill {self.number + 1}"


# --- what saves cost ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saved:
    """One save and its peer's, of the same state, in the same process, on the same disk, one after
    the
    other.

    ``stored_bytes``: of all files that the save added. ``blocking_seconds``: that training waits,
    the wait for the save before included. ``durable_seconds``: from the call until it survives a
    power cut. ``peer_seconds``: the peer's file written and synced; it blocks as long.
    """

    step: int
    raw_bytes: int
    stored_bytes: int
    peer_bytes: int
    blocking_seconds: float
    durable_seconds: float
    peer_seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """Leaves that differ in numbers alone. ``key_bytes``: of their newest keyframes as stored;
    ``save_bytes``: mean of a save after the first.
    """

    name: str
    leaves: int
    raw_bytes: int
    key_bytes: float
    save_bytes: float


# --- whether a run comes back ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeafCheck:
    """One leaf (or Python value) after a restore, against what was live when it was saved.
    ``problem``: empty where what was promised holds.

    ``contract``: ``exact``, ``bounded`` or ``reused``. ``measured`` of ``limit``: in the contract's
    norm, ``None`` where bits are compared.
    """

    path: str
    contract: str
    problem: str = ""
    measured: float | None = None
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How one run ended. ``losses``: step -> loss of each step that it trained. ``evaluation``: at
    the
    end. ``digests``: of its last state, by leaf, places of a tie and Python values included.
    """

    seed: int
    losses: Mapping[int, float]
    evaluation: float
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One killed run and what became of it in a fresh process.

    ``last_step``: the last one it told of before it died. ``acknowledged_step``: the newest save
    that was reported durable by then, 0: none. ``restored_step``: where the fresh process went on.
    ``leaves``: how many were compared; ``failed``: those that do not hold; ``inexact``: those whose
    contract is not exact, whether they hold or not. ``not_put_back``: what the run's own ``load``
    left otherwise than the restore gave it. ``stage``: of the policy at the restored step, empty
    under the exact one. ``error``: why the run did not come back at all; then there is no
    ``ending``, and what follows the acknowledged step means nothing.
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

    @property
    def lost_steps(self) -> int:
        return self.last_step - self.restored_step


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was measured. ``unkilled``: one run a seed. ``repeat``: the first seed once more.
    ``saving``: once more, with checkpoints and peers.

    ``framework``: that the state comes from. ``peer``: what our saves are compared with.
    """

    plan: Plan
    framework: str
    peer: str
    unkilled: tuple[Ending, ...]
    repeat: Ending
    saving: Ending
    saves: tuple[Saved, ...]
    groups: tuple[Group, ...]
    recoveries: tuple[Recovery, ...]
