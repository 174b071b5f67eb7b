"""Save recorded checkpoints again under several policies, and compare what was written.

The saver is the real one, and the figures are read from the roots that it wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from deltacheck.backends import profiler
from deltacheck.errors import StepNotFound
from deltacheck.evaluate.offline.recorded import Recorded
from deltacheck.evaluate.workload import saving_module
from deltacheck.policy import Policy
from deltacheck.policy.causes import CAUSES, MERGED, REST
from deltacheck.policy.stage import STABLE, WARM, stable_start
from deltacheck.report.data import HeldLeaves, StepRecord, collect


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes that a policy wrote for the recorded checkpoints.

    Attributes:
        saves: The number of saves.
        raw_bytes: The size of the state.
        first_bytes: The size of the first save, which writes every leaf whole.
        mean_bytes: The mean of all saves.
        steady_bytes: The mean of the steady saves (``steady_steps``), ``None`` if there were none.
        most_bytes: The largest of these.
        steady_saves: The number of these.
        causes: Cause (``policy.causes``) -> bytes of these saves, in the mean.
    """

    saves: int
    raw_bytes: int
    first_bytes: int
    mean_bytes: float
    steady_bytes: float | None
    most_bytes: int
    steady_saves: int
    causes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PolicyReplay:
    """The recorded checkpoints under one policy.

    Attributes:
        policy: The description of the policy.
        root: The scratch root.
        stable_from: The first step in the stable stage, ``None`` without one.
        sizes: The bytes.
        steps: The steps, oldest first.
        contracts: Contracts that were not exact: of each class, kind and norm the leaf that came
            nearest to its limit in any step.
    """

    policy: str
    root: Path
    stable_from: int | None
    sizes: Sizes
    steps: tuple[StepRecord, ...]
    contracts: tuple[HeldLeaves, ...]


def replay(
    checkpoints: Iterable[Recorded], policies: Mapping[str, Policy], folder: Path
) -> tuple[PolicyReplay, ...]:
    """Save recorded checkpoints under several policies.

    Args:
        checkpoints: The checkpoints, ascending. Each is saved under every policy before the next
            one is taken.
        policies: The policies by description.
        folder: An empty folder for a root of each policy.

    Raises:
        StepNotFound: There are fewer than two checkpoints.
        DeltacheckError: As a save raises it.
    """
    roots = {text: folder / str(number) for number, text in enumerate(policies)}
    savers: dict[str, Any] = {}
    steps = 0
    try:
        for checkpoint in checkpoints:
            if not savers:
                backend = saving_module(profiler.backend_of(checkpoint.state))
                for text, policy in policies.items():
                    savers[text] = backend.Saver(roots[text], policy)
            for saver in savers.values():
                saver.save(checkpoint.step, checkpoint.state, checkpoint.metrics)
                # Here, and not behind the next policy's save: it may read the same mapped file.
                saver.finish()
            steps += 1
    finally:
        for saver in savers.values():
            saver.close()
    if steps < 2:
        raise StepNotFound(f"a replay needs at least two checkpoints, not {steps}")
    return tuple(replayed(text, root) for text, root in roots.items())


def replayed(text: str, root: Path) -> PolicyReplay:
    """Return what a policy wrote to a root."""
    steps = collect(root).steps
    start = stable_start((step.step, step.stage) for step in steps)
    return PolicyReplay(text, root, start, sizes_of(steps), steps, _worst_of(steps))


def steady_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the saves that show the steady state of a policy.

    Under an exact policy these are all but the first one. Under any other they are in the stable
    stage, or in the warm one if moments are never reused, and as many bytes as ever are under a
    contract that is not exact, as already at the save before: a save that follows an event stores
    everything anew, once.
    """
    if not any(step.stage for step in steps):
        return list(steps[1:])
    stage = STABLE if any(step.stage == STABLE for step in steps) else WARM
    promised = [step.bounded_bytes + step.reused_bytes for step in steps]
    most_promised = max(promised)
    return [
        step
        for step, before, now in zip(steps[1:], promised, promised[1:], strict=False)
        if step.stage == stage and 0 < most_promised == before == now
    ]


def sizes_of(steps: Sequence[StepRecord]) -> Sizes:
    """Return the bytes of at least one save."""
    steady = steady_steps(steps)
    sizes = [step.written_bytes for step in steady]
    causes = {
        cause: fmean(step.causes.get(cause, 0) for step in steady) if steady else 0.0
        for cause in (*CAUSES, MERGED, REST)
    }
    return Sizes(
        len(steps),
        steps[-1].raw_bytes,
        steps[0].written_bytes,
        fmean(step.written_bytes for step in steps),
        fmean(sizes) if sizes else None,
        max(sizes, default=0),
        len(sizes),
        causes,
    )


def bytes_of_run(result: PolicyReplay, saves: int) -> float:
    """Return the bytes that a policy writes in a run, the first saves included.

    Args:
        result: The replay of the beginning of the run.
        saves: The number of saves of the run. Those beyond the replay are like its steady ones, or
            like all but the first if there are none.
    """
    sizes = [step.written_bytes for step in result.steps[:saves]]
    steady_bytes = result.sizes.steady_bytes
    if steady_bytes is None:
        steady_bytes = fmean(step.written_bytes for step in result.steps[1:])
    return sum(sizes) + (saves - len(sizes)) * steady_bytes


def _worst_of(steps: Sequence[StepRecord]) -> tuple[HeldLeaves, ...]:
    worst: dict[tuple[str, str, str], HeldLeaves] = {}
    for contract in (contract for step in steps for contract in step.held):
        key = (contract.of, contract.contract, contract.norm)
        if key not in worst or contract.used > worst[key].used:
            worst[key] = contract
    return tuple(worst.values())
