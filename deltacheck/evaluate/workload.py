"""What an evaluation trains: a small protocol that a run of any framework can be put behind."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from deltacheck.errors import DeltacheckError

# In the environment of every process of an evaluation: a folder for what a factory makes once and
# finds again, such as pre-trained weights.
FOLDER = "DELTACHECK_EVAL_FOLDER"


class NoWorkload(DeltacheckError):
    """The factory that was named is not there, or does not give a workload."""


@runtime_checkable
class Workload(Protocol):
    """A training run. It is made by ``factory(seed)``, in a fresh process or beside others that are
    not used any more.

    The seed decides everything that is random: weights that are not given, data order, dropout,
    sampling. Two runs of one seed should be the same bit for bit on one machine; where they are
    not, the evaluation finds out, says so, and judges the rest of a resumed run by statistics
    alone.

    A run may have an attribute ``learning_rate``, a number: policies that are not exact need it
    where the state does not tell (optax).
    """

    def step(self) -> float:
        """Train one step; its loss."""

    def state(self) -> Any:
        """Everything that decides how the run goes on, as ``Engine.save`` or ``DeltaSaveArgs``
        takes
        it: weights, optimizer, scheduler, generators, place in the data, step. Only read; torch
        tensors may be the live ones.
        """

    def load(self, state: Any) -> None:
        """Go on from a state that was restored: nested as ``state()`` gave it."""

    def evaluate(self) -> float:
        """A held-out loss, lower is better: the same data for every seed. Called once, at the
        end.
        """


Factory: TypeAlias = Callable[[int], Workload]


def find(named: str) -> Factory:
    """The factory that ``FILE.py:NAME`` or ``MODULE:NAME`` names. Runs the file, or imports the
    module.

    Raises ``NoWorkload`` where there is none.
    """
    place, colon, name = named.rpartition(":")
    if not (colon and place and name):
        raise NoWorkload(f"{named!r} names no factory; write FILE.py:NAME or MODULE:NAME")
    if place.endswith(".py") or os.sep in place:
        path = Path(place).resolve()
        # Under its bare name it could stand in for a package that it imports
        own = f"_deltacheck_eval_{path.stem}"
        spec = importlib.util.spec_from_file_location(own, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise NoWorkload(f"there is no Python file {place!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[own] = module
        sys.path.insert(
            0, str(path.parent)
        )  # as where the file is run: what lies beside it can be imported
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # something that the module needs
            raise NoWorkload(
                f"there is no module {place!r} that can be imported from here"
            ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise NoWorkload(f"{place} has no function {name!r}")
    return cast(Factory, factory)


def made(factory: Factory, seed: int) -> Workload:
    """A run. Raises ``NoWorkload`` naming what it lacks."""
    run = factory(seed)
    lacking = [
        name
        for name in ("step", "state", "load", "evaluate")
        if not callable(getattr(run, name, None))
    ]
    if lacking:
        raise NoWorkload(
            f"the factory gave a {type(run).__name__} without {', '.join(lacking)}; see"
            " deltacheck.evaluate.Workload"
        )
    return run
