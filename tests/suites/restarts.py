"""Restarts within a process: a root is opened again and again, as a notebook cell or a retry loop
does it, while the engine before was closed, dropped, left by an exception, or is part of a cycle.

No restart may be refused or lose a step, and threads, open files and memory must not grow. Prints
what it found; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deltacheck import Keep, SaveOptions
from deltacheck.backends.torch import Engine
from tests.suites.endurance import Count, grown

ELEMENTS = 1 << 18  # 1 MiB: a leak of every hundredth engine shows
COUNT_EVERY = 20
WAYS = ("closed", "dropped", "dropped after the save", "in a cycle", "interrupted")


@dataclass(slots=True)
class Found:
    """``failed``: restarts that were refused, or restored something else."""

    restarts: int = 0
    failed: int = 0
    counts: list[Count] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Cycle:
    """An engine that only the collector of cycles gives up."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.itself = engine, self


def life(root: Path, number: int, way: str) -> None:
    """Open the root, compare what the life before has saved, save, and end in a way of ``WAYS``.

    Raises:
        AssertionError: The newest step is not that of the life before, or has other values.
    """
    engine: Any = Engine(root, keep=Keep(last=2), options=SaveOptions(durability="process"))
    if number:
        found = engine.restore()
        assert found["step"] == number - 1, f"step {found['step']} instead of {number - 1}"
        expected = torch.full((ELEMENTS,), float(number - 1))
        assert torch.equal(found["weights"], expected), f"step {number - 1} has other values"
    state = {"weights": torch.full((ELEMENTS,), float(number)), "step": number}
    handle = engine.save(number, state)
    match way:
        case "closed":
            engine.close()
        case "dropped after the save":
            handle.wait()
        case "in a cycle":
            Cycle(engine)
        case "interrupted":
            raise KeyboardInterrupt


def restart(root: Path, times: int, seed: int) -> Found:
    """Live so often in this process."""
    rng, before, found = random.Random(seed), set(threading.enumerate()), Found()
    for number in range(times):
        found.restarts += 1
        try:
            life(root, number, rng.choice(WAYS))
        except KeyboardInterrupt:
            pass
        except Exception as error:  # noqa: BLE001 - each is a failure of this restart
            found.failed += 1
            found.failures.append(f"restart {number}: {type(error).__name__}: {error}")
        if number % COUNT_EVERY == COUNT_EVERY - 1:
            found.counts.append(count(root, number, before))
    found.failures += grown(found.counts)
    return found


def count(root: Path, number: int, before: set[threading.Thread]) -> Count:
    """Count the resources of this process once the last engine has ended."""
    gc.collect()
    # The last thread of each ends after it has given the root back. Those that read stay.
    for thread in set(threading.enumerate()) - before:
        if thread.name != "deltacheck-reader":
            thread.join(240)
    gc.collect()
    return Count.now(float(number), root)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deltacheck-restarts-") as folder:
        found = restart(Path(folder) / "root", asked.restarts, asked.seed)
    print(*found.failures, sep="\n", end="\n" if found.failures else "")
    print(f"S17, restarts within a process, seed {asked.seed}")
    for name, counted in (("first", found.counts[:1]), ("last", found.counts[-1:])):
        for c in counted:
            print(
                f"  {name} count: {c.files} files open, {c.threads} threads,"
                f" {c.memory / (1 << 20):.0f} MiB resident, {c.disk / (1 << 20):.1f} MiB on disk"
            )
    print(f"  all {found.restarts} tried {found.failed or len(found.failures)} failed")
    return bool(found.failures)


if __name__ == "__main__":
    sys.exit(main())
