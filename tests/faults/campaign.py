"""Campaigns of trials: roots made ready once for each scenario, a copy of one for each trial, and
what is wrong with it afterwards.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.faults.scenarios import ORBAX, acknowledged_in
from tests.faults.shim import Fault, Op, read_trace
from tests.faults.zygote import Outcome, Zygote
from tests.support.memory import memory_folder


def scratch() -> Path:
    """A new directory for trials: in memory where there is room for it, since a killed process
    loses nothing of what it has written.
    """
    return Path(tempfile.mkdtemp(prefix="deltacheck-faults-", dir=memory_folder()))


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial's places. ``area`` is what the shim watches: it holds the root, so that calls on
    the root's own name count.
    """

    scenario: str
    area: Path
    acknowledgements: Path
    trace: Path

    @property
    def root(self) -> Path:
        return self.area / "root"

    def arguments(self) -> tuple[str, str, str]:
        """Return the arguments of the tasks in ``trials.py``."""
        return self.scenario, str(self.root), str(self.acknowledgements)

    def acknowledged(self) -> set[int]:
        return acknowledged_in(self.acknowledgements)

    def ops(self) -> list[Op]:
        return read_trace(self.trace)


class Campaign:
    """Zygotes and prepared roots, made when they are first wanted; all gone at the end, but for
    what ``keep`` has set aside.
    """

    def __init__(self) -> None:
        self.folder = scratch()
        self._zygotes: dict[str, Zygote] = {}
        self._prepared: dict[str, Path] = {}
        self._counts: dict[str, tuple[int, int, float]] = {}

    def zygote(self, scenario: str) -> Zygote:
        """The zygote that has what the scenario needs."""
        backend = "orbax" if scenario in ORBAX else "torch"
        if backend not in self._zygotes:
            self._zygotes[backend] = Zygote(backend)
        return self._zygotes[backend]

    @contextlib.contextmanager
    def trial(self, scenario: str) -> Iterator[Trial]:
        """The scenario's root, ready for its fault."""
        if scenario not in self._prepared:
            prepared = self.folder / f"prepared-{scenario}"
            prepared.mkdir()
            outcome = self.zygote(scenario).run(
                "tests.faults.trials:prepare", scenario, str(prepared / "root")
            )
            assert not outcome.error, outcome.error
            self._prepared[scenario] = prepared
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            area = Path(folder) / "area"
            shutil.copytree(self._prepared[scenario], area)
            yield Trial(scenario, area, Path(folder) / "acknowledgements", Path(folder) / "trace")

    def run(
        self,
        task: str,
        trial: Trial,
        *more: object,
        fault: Fault | None = None,
        trace: bool = False,
        **how: float | None,
    ) -> Outcome:
        """Run a task of ``trials.py`` on a trial's root; ``more``: its arguments beside the usual
        ones.
        """
        traced = trial.trace if trace or fault is not None else None
        zygote = self.zygote(trial.scenario)
        return zygote.run(
            f"tests.faults.trials:{task}",
            *trial.arguments(),
            *more,
            area=trial.area,
            fault=fault,
            trace=traced,
            **how,
        )

    def counts(self, scenario: str) -> tuple[int, int, float]:
        """Calls of a whole ``act``, of a recovery after it, and the seconds that ``act`` takes."""
        if scenario not in self._counts:
            with self.trial(scenario) as trial:
                acted = self.run("act", trial, fault=Fault())
                assert not acted.error, acted.error
                recovered = self.run("recover", trial, fault=Fault())
                assert not recovered.error, recovered.error
            self._counts[scenario] = acted.count, recovered.count, acted.seconds
        return self._counts[scenario]

    def keep(self, trial: Trial) -> Path:
        """Set a trial aside, for a person to look at."""
        kept = Path(tempfile.mkdtemp(prefix="deltacheck-kept-"))
        shutil.copytree(trial.area.parent, kept, dirs_exist_ok=True)
        return kept

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Tally:
    """Counts trials, and says what zero failures among them mean."""

    def __init__(self, what: str, seed: int) -> None:
        self.what, self.seed = what, seed
        self.tried: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._begin = time.perf_counter()

    def add(self, name: str, failed: bool) -> None:
        self.tried[name] += 1
        self.failed[name] += failed

    def __str__(self) -> str:
        lines = [f"{self.what}, seed {self.seed}:"]
        lines += [
            f"  {name:36} {self.tried[name]:6} tried {self.failed[name]:4} failed"
            for name in sorted(self.tried)
        ]
        tried, failed = self.tried.total(), self.failed.total()
        bound = (
            f"; the rate is below {3 / tried:.2g} with 95 % confidence (3/n)"
            if tried and not failed
            else ""
        )
        lines.append(
            f"  {'all':36} {tried:6} tried {failed:4} failed in"
            f" {time.perf_counter() - self._begin:.0f} s{bound}"
        )
        return "\n".join(lines)


def shares(total: int, weights: dict[str, float]) -> dict[str, int]:
    """``total`` divided in proportion, at least one each."""
    whole = math.fsum(weights.values())
    return {name: max(1, round(total * weight / whole)) for name, weight in weights.items()}
