"""Saves between the pauses in which torch_memory_saver takes the memory of a training.

The library unmaps memory under its addresses: torch sees nothing of it, and neither does an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from benchmarks.record import Cell, Result, Table
from tests.gpu_kit.device_checks import require_equal
from tests.gpu_kit.stand_in import accelerator
from tests.gpu_kit.steps import Context, Skipped

_PACKAGE = "torch_memory_saver"
_TAG = "training"
_SAVES = 4
# Of the memory of a training that a pause must free. The library unmaps whole blocks of 2 MiB.
_FREED_AT_LEAST = 0.9


class _Saver(Protocol):
    """The calls of torch_memory_saver that the step makes."""

    def region(self, tag: str, enable_cpu_backup: bool) -> AbstractContextManager[None]: ...
    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...


class StandIn:
    """Takes the content of tensors in host memory away, unseen by torch, and brings it back.

    Args:
        tensors: Return the tensors that were allocated in the region.
    """

    def __init__(self, tensors: Callable[[], Sequence[Any]]) -> None:
        self._tensors = tensors
        self._contents: list[Any] = []

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        """Return a context without effect."""
        yield

    def pause(self, tag: str) -> None:
        """Overwrite the tensors. NumPy does so, because torch would count the writes."""
        arrays = [tensor.detach().numpy() for tensor in self._tensors()]
        self._contents = [(array, array.copy()) for array in arrays]
        for array in arrays:
            array.fill(-1)

    def resume(self, tag: str) -> None:
        """Write the content of before the pause."""
        for array, content in self._contents:
            array[...] = content


class Training:
    """Linear layers and their AdamW, whose state is allocated in a region of a saver.

    Args:
        context: The resources of the step.
        saver: The saver; ``None``: the stand-in.
    """

    def __init__(self, context: Context, saver: _Saver | None) -> None:
        import torch

        self.saver: _Saver = StandIn(self.tensors) if saver is None else saver
        width = 64 if saver is None else 4096
        with self.saver.region(tag=_TAG, enable_cpu_backup=True):
            layers = [torch.nn.Linear(width, width, device=context.device) for _ in range(4)]
            self._model = torch.nn.Sequential(*layers)
            self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
            self._inputs = torch.ones(4, width, device=context.device)
            # The optimizer allocates its state in its first step.
            self.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Train one step."""
        self._model(self._inputs).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Any]:
        """Return the tensors that a pause takes away."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor for tensor in (*self._model.parameters(), *moments) if tensor.dim()]

    def content(self) -> dict[str, Any]:
        """Return a copy of the state in host memory, by path."""
        from benchmarks.states import leaves_of

        leaves = leaves_of(self.state())
        return {path: leaf.detach().cpu().clone() for path, leaf in leaves.items()}


def save_between_pauses(context: Context) -> Result:
    """Train, save, let the memory be taken and come back, and compare every step bit for bit."""
    rows = []
    saver = None if context.rehearse else _torch_memory_saver()
    with accelerator(context) as device:
        # The state is copied in ``save``, or read in its place until ``offload`` has waited for it.
        for name, copy_bytes in (("copied in save", None), ("read in its place", 0)):
            training = Training(context, saver)
            rows.append(_save(context, device, training, name, copy_bytes))
            # Its memory, and that of the copies, are free for the next one.
            del training
    units: Any = {
        "state": "text",
        "bytes": "bytes",
        "freed by a pause": "bytes",
        "equal steps": "count",
    }
    about = (
        "save, offload of the engine, pause, an allocation of as much, resume, a training step;"
        f" {'a stand-in' if context.rehearse else 'hook_mode torch'}, with a backup in host memory"
    )
    return Result(f"saves between pauses of {_PACKAGE}", about, [Table("pauses", units, rows)])


def _save(
    context: Context, device: Any, training: Training, name: str, copy_bytes: int | None
) -> list[Cell]:
    """Save a training between pauses, and return its row."""
    import torch

    from benchmarks.states import leaves_of
    from deltacheck import SaveOptions
    from deltacheck.backends.torch import Engine

    state_bytes = sum(tensor.nbytes for tensor in training.tensors())
    root, expected, freed = context.folder / name, {}, state_bytes
    with Engine(root, options=SaveOptions(device_cache_bytes=copy_bytes)) as engine:
        engine.guard(training.optimizer)
        for step in range(_SAVES):
            expected[step] = training.content()
            handle = engine.save(step, training.state())
            engine.offload()
            # A save that still reads the state would read memory that is gone.
            if handle.state in ("started", "captured"):
                raise AssertionError(f"offload returned while save {step} reads the state")
            if not context.rehearse:
                torch.cuda.synchronize()
            before = device.unreserved_bytes()
            training.saver.pause(_TAG)
            if not context.rehearse:
                freed = min(freed, device.unreserved_bytes() - before)
            others = torch.ones(state_bytes // 4, device=context.device)
            handle.result()
            del others
            training.saver.resume(_TAG)
            require_equal(f"{name}, after resume {step}", expected[step], training.content())
            training.step()
            training.optimizer.zero_grad()
    if freed < _FREED_AT_LEAST * state_bytes:
        raise AssertionError(f"a pause has freed {freed} of {state_bytes} bytes")
    with Engine(root) as engine:
        for step, leaves in expected.items():
            require_equal(f"{name}, step {step}", leaves, leaves_of(engine.restore(step)))
    return [name, state_bytes, freed, len(expected)]


def _torch_memory_saver() -> _Saver:
    """Return the library's saver, with the hook that needs no LD_PRELOAD."""
    if find_spec(_PACKAGE) is None:
        raise Skipped(f"{_PACKAGE} is not installed")
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"
    try:
        with torch_memory_saver.region(tag=_TAG, enable_cpu_backup=True):
            pass
    except (RuntimeError, OSError) as error:
        # Expandable segments, or a library for another release of CUDA.
        raise Skipped(f"{_PACKAGE} cannot start: {error}") from error
    saver: _Saver = torch_memory_saver
    return saver
