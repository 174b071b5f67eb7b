"""The protocol that a training run implements to be evaluated."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from deltacheck.errors import DeltacheckError

# Environment variable of every process of an evaluation: a folder for what a factory creates once
# and reads again, such as pre-trained weights.
FOLDER = "DELTACHECK_EVAL_FOLDER"


class NoWorkload(DeltacheckError):
    """The named factory does not exist or does not return a workload."""


@runtime_checkable
class Workload(Protocol):
    """A training run.

    ``factory(seed)`` creates it, in a fresh process or beside others that are not used any more.
    The seed decides everything that is random: new weights, data order, dropout, sampling. Two runs
    of one seed should be the same bit for bit on one machine. If they are not, the evaluation says
    so and judges the rest of a resumed run by statistics alone.

    A run may have an attribute ``learning_rate``, a number. Policies that are not exact need it if
    the state does not contain the rate (optax). It may have a method ``reorder(seed)``, which
    continues with other data and other random draws. The trials of ``deltacheck profile
    --sensitivity`` need it: other data show the noise.
    """

    def step(self) -> float:
        """Train one step.

        Returns:
            Its loss.
        """

    def state(self) -> Any:
        """Return everything that decides how the run continues.

        Returns:
            A nested state as ``Engine.save`` or ``DeltaSaveArgs`` takes it: weights, optimizer,
            scheduler, generators, position in the data, step. It is only read, so torch tensors may
            be the live ones.
        """

    def load(self, state: Any) -> None:
        """Continue from a restored state.

        Args:
            state: Nested as ``state()`` returned it.
        """

    def evaluate(self) -> float:
        """Measure the final model. Called once, at the end.

        Returns:
            A held-out loss, lower is better, on the same data for every seed.
        """


class TorchRun:
    """A PyTorch training loop as a ``Workload``, for `deltacheck eval`.

    Its state is that of the model, the optimizer and ``parts``, and of torch's generator on the
    CPU. A run that draws from other generators needs a ``Workload`` of its own.

    Args:
        model: The ``torch.nn.Module``.
        optimizer: Its ``torch.optim.Optimizer``.
        train_step: Trains one step and returns its loss.
        evaluate: Returns a held-out loss. ``None``: the loss of the last step, which
            shows great harm only.
        **parts: Further objects with ``state_dict`` and ``load_state_dict``, such as a scheduler,
            a gradient scaler or a data loader.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        train_step: Callable[[], float],
        evaluate: Callable[[], float] | None = None,
        **parts: Any,
    ) -> None:
        self._parts = {"model": model, "optimizer": optimizer, **parts}
        self._train_step, self._evaluate = train_step, evaluate
        self._loss = float("nan")

    def step(self) -> float:
        """Train one step.

        Returns:
            Its loss.
        """
        self._loss = float(self._train_step())
        return self._loss

    def state(self) -> dict[str, Any]:
        """Return the state of all parts and of the generator.

        Returns:
            A dict of state dicts, by the name of the part, and ``"rng"``.
        """
        import torch

        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {**parts, "rng": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a restored state.

        Args:
            state: Nested as ``state()`` returned it.
        """
        import torch

        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])

    def evaluate(self) -> float:
        """Measure the final model.

        Returns:
            The result of ``evaluate``, or the loss of the last step.
        """
        return self._loss if self._evaluate is None else float(self._evaluate())


Factory: TypeAlias = Callable[[int], Workload]


def load_factory(reference: str) -> Factory:
    """Run a file or import a module, and return the factory in it.

    Args:
        reference: ``FILE.py:NAME`` or ``MODULE:NAME``.

    Raises:
        NoWorkload: There is no such file, module or function.
    """
    source, colon, name = reference.rpartition(":")
    if not (colon and source and name):
        raise NoWorkload(f"{reference!r} names no factory; write FILE.py:NAME or MODULE:NAME")
    if source.endswith(".py") or os.sep in source:
        path = Path(source).resolve()
        # Under its bare name it could hide a package that it imports.
        module_name = f"_deltacheck_eval_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise NoWorkload(f"there is no Python file {source!r}")
        module = importlib.util.module_from_spec(spec)
        # Pickle and dataclasses look up a class through ``sys.modules``.
        sys.modules[module_name] = module
        sys.path.insert(0, str(path.parent))  # as if the file were run: it may import its siblings
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise  # the module exists, but one that it imports does not
            raise NoWorkload(
                f"there is no module {source!r} that can be imported from here"
            ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise NoWorkload(f"{source} has no function {name!r}")
    return cast(Factory, factory)


def saving_module(backend: str | None) -> Any:
    """Return the module with which a backend takes part in evaluations.

    ``None``: that of torch or JAX, whichever is installed.
    """
    if backend is None:
        backend = "torch" if importlib.util.find_spec("torch") is not None else "orbax"
    return importlib.import_module(f"deltacheck.backends.{backend}.files.evaluation")


@contextmanager
def workload_folder() -> Iterator[None]:
    """Provide a temporary folder that factories may write to, unless an evaluation provides one."""
    if FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="deltacheck-factory-") as name:
        os.environ[FOLDER] = name
        try:
            yield
        finally:
            del os.environ[FOLDER]


def create_workload(factory: Factory, seed: int) -> Workload:
    """Create a run.

    Raises:
        NoWorkload: The run lacks methods of ``Workload``; the message names them.
    """
    run = factory(seed)
    # The protocol cannot be checked by a type here, because users need not inherit from it.
    missing = [
        name
        for name in ("step", "state", "load", "evaluate")
        if not callable(getattr(run, name, None))
    ]
    if missing:
        raise NoWorkload(
            f"the factory returned type {type(run).__name__} without {', '.join(missing)}; see"
            " deltacheck.evaluate.Workload"
        )
    return run
