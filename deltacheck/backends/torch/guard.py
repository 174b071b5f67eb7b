"""Which tensors may be read after ``save`` returns: those that only an optimizer's step changes, because we can hold that step back.

torch calls the global optimizer pre-step hook once before every real step, before any weight changes (also under
``torch.compile`` and DeepSpeed). Everything that the optimizers seen so far own is *guarded*: the hook waits until the captures
under way have read it. A tensor of unknown owner is copied eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltacheck.backends.torch.leaves import is_plain, local_of
from deltacheck.errors import SnapshotTorn


class Guard:
    """Watches optimizer steps. ``before_step`` is called on the training thread before each of them."""

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._before_step = before_step
        self._hook = register_optimizer_step_pre_hook(self._on_step)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizers.add(optimizer)
        self._before_step()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Know an optimizer before its first step."""
        self._optimizers.add(optimizer)

    def owned(self) -> set[int]:
        """Addresses of all storages that the known optimizers own: parameters and state."""
        found = set()
        for optimizer in list(self._optimizers):
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            for key, state in optimizer.state.items():  # ZeRO-3 takes its parameters out of the groups between the steps
                tensors += [key, *_tensors(state)]
            local = [tensor for one in tensors if isinstance(tensor := local_of(one), torch.Tensor)]
            found |= {tensor.untyped_storage().data_ptr() for tensor in local if is_plain(tensor)}
        return found

    def close(self) -> None:
        self._hook.remove()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def unchanged_check(path: str, tensor: torch.Tensor) -> Callable[[], None]:
    """A check for after the capture: raises ``SnapshotTorn`` where the tensor was written to since now, or its memory freed or moved.

    Sees every in-place torch operation; not writes through ``.data``, NumPy or DLPack, which leave no trace. REQUIRES: the tensor is the
    caller's alone, an alias: what others make of theirs (``p.data = ...``) does not change which memory it has.
    """
    version, storage = tensor._version, tensor.untyped_storage()
    memory = storage.data_ptr(), storage.nbytes()

    def check() -> None:
        if (storage.data_ptr(), storage.nbytes()) != memory:
            raise SnapshotTorn(
                f"the memory of leaf {path!r} was freed or resized after save() and before its capture had finished. "
                "Call engine.before_update() before that, or use Engine(capture='eager')"
            )
        if tensor._version != version:
            raise SnapshotTorn(
                f"leaf {path!r} was written to after save() and before its capture had finished (version {version}, now {tensor._version}). "
                "Call engine.before_update() before such a write, or use Engine(capture='eager')"
            )

    return check
