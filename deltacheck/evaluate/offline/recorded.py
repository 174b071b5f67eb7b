"""Read the recorded checkpoints of a run, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltacheck import open as open_root
from deltacheck.errors import NotACheckpointRoot


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded checkpoint.

    Attributes:
        step: The training step.
        state: The nested state.
        metrics: The metrics of the save, empty for files of others.
    """

    step: int
    state: object
    metrics: Mapping[str, float] = field(default_factory=dict)

    def metric(self, *names: str) -> float | None:
        """Return the first metric that exists under one of these names."""
        return next((self.metrics[name] for name in names if name in self.metrics), None)


def steps_in(source: str, item: str | None = None) -> list[int]:
    """Return the steps of the recorded checkpoints, ascending, without reading any state.

    Raises:
        NotACheckpointRoot: There are no checkpoints.
        ValueError: Two files have the same step.
    """
    try:
        return list(open_root(source, item=item).steps())
    except NotACheckpointRoot as error:
        return [step for step, _ in _foreign(Path(source), error)[0]]


def recorded(
    source: str,
    item: str | None = None,
    *,
    as_torch: bool = False,
    step_set: Container[int] | None = None,
) -> Iterator[Recorded]:
    """Yield the checkpoints of a run in ascending order. One of them is in memory at a time.

    Args:
        source: A root, a folder of ``torch.save`` files, or the folder of an Orbax
            ``CheckpointManager``.
        item: The item of a manager's steps, if they have several.
        as_torch: If True, the leaves of a root are torch tensors; if False, NumPy arrays.
        step_set: The steps to yield, ``None`` for all.

    Raises:
        NotACheckpointRoot: There are no checkpoints.
        ContractNotMet: A step of a root is not exact. A reused moment would seem to be stable.
        ValueError: Two files have the same step.
        Damaged: A checkpoint cannot be read.
    """
    try:
        checkpoints = open_root(source, item=item)
    except NotACheckpointRoot as error:
        # A root is tried first. Only a folder that is certainly none is searched for files of
        # others.
        places, read = _foreign(Path(source), error)
        for step, path in places:
            if step_set is None or step in step_set:
                yield Recorded(step, read(step, path, item))
        return
    for step in checkpoints.steps():
        if step_set is not None and step not in step_set:
            continue
        metrics = checkpoints.manifest(step).metrics
        numbers = {name: float(value) for name, value in metrics.items()}
        if as_torch:
            from deltacheck.backends.torch import load

            state = load(source, step, item=item, contract="exact")
        else:
            state = checkpoints.restore(step, contract="exact")
        yield Recorded(step, state, numbers)


def _foreign(
    source: Path, error: Exception
) -> tuple[list[tuple[int, Path]], Callable[[int, Path, str | None], object]]:
    """Return the steps and places of files of torch.save or of Orbax, and the reader of one.

    Raises:
        Exception: ``error``, if there are none.
    """
    # Only the framework of the files is imported, as only one of them may be installed.
    if _holds_torch_files(source):
        from deltacheck.backends.torch.files import torch_import

        return torch_import.files(source), lambda step, path, item: torch_import.read(path)
    if _holds_orbax_steps(source):
        from deltacheck.backends.orbax.files import orbax_import

        return orbax_import.steps(source), orbax_import.state_of
    raise error


def _holds_torch_files(source: Path) -> bool:
    suffixes = (".pt", ".pth", ".bin", ".ckpt")
    return source.is_dir() and any(path.suffix in suffixes for path in source.iterdir())


def _holds_orbax_steps(source: Path) -> bool:
    return source.is_dir() and any(
        path.is_dir() and path.name.rpartition("_")[2].isdecimal() for path in source.iterdir()
    )
