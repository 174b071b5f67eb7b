"""Which tensors may be read after ``save`` returns: those that only an optimizer's step changes,
because we can hold that step back, and those that nothing changes.

torch calls the global optimizer pre-step hook once before every real step, before any weight
changes (also under ``torch.compile`` and DeepSpeed). Everything that the optimizers seen so far own
is *guarded*: the hook waits until the captures under way have read it. So is a parameter of a known
module that needs no gradient, once it was left alone from one save to the next. A tensor of unknown
owner is copied eagerly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltacheck.backends.torch.state.leaves import is_plain, local_of
from deltacheck.errors import SnapshotTorn


@dataclass(frozen=True, slots=True)
class Guarded:
    """What may be read after ``save`` has returned, by the addresses of storages. ``owned``: what
    only
    an optimizer's step changes; ``frozen``: what is left alone, with an alias of every parameter
    that lies there.
    """

    owned: set[int] = field(default_factory=set)
    frozen: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)

    def watched(self, value: object) -> list[torch.Tensor]:
        """Aliases of a guarded tensor, whose versions tell of writes to it; the first has its
        memory as it is now. None of any other value.
        """
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return []
        address = value.untyped_storage().data_ptr()
        if address in self.owned:
            return [value.detach()]
        there = self.frozen.get(address, ())
        if any(
            value._version == one._version for one in there
        ):  # else it is counted apart, and was written to
            return [value.detach(), *there]
        return []


class Guard:
    """Watches optimizer steps. ``before_step`` is called on the training thread before each of
    them.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )  # by id
        # Frozen parameters at the save before, by id: torch.utils.swap_tensors refuses tensors that
        # anything refers to weakly.
        self._left: dict[int, tuple[int, ...]] = {}
        self._before_step = before_step
        self._hook = register_optimizer_step_pre_hook(self._on_step)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizers.add(optimizer)
        self._before_step()

    def add(self, owner: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Know an optimizer before its first step, or a module."""
        if isinstance(owner, torch.nn.Module):
            self._modules[id(owner)] = owner
        else:
            self._optimizers.add(owner)

    def guarded(self) -> Guarded:
        """What is guarded at this save. Call it once a save: what is frozen goes by the call
        before.
        """
        return Guarded(self.owned(), self._frozen())

    def owned(self) -> set[int]:
        """Addresses of all storages that the known optimizers own: parameters and state."""
        found = set()
        for optimizer in list(self._optimizers):
            tensors = [p for group in optimizer.param_groups for p in group["params"]]
            for (
                key,
                state,
            ) in (
                optimizer.state.items()
            ):  # ZeRO-3 takes its parameters out of the groups between the steps
                tensors += [key, *_tensors(state)]
            local = [tensor for one in tensors if isinstance(tensor := local_of(one), torch.Tensor)]
            found |= {tensor.untyped_storage().data_ptr() for tensor in local if is_plain(tensor)}
        return found

    def _frozen(self) -> dict[int, list[torch.Tensor]]:
        """What lies in storages whose parameters all need no gradient, and have had this memory and
        these versions at the call before, too.
        """
        parameters = {
            id(one): one for module in list(self._modules.values()) for one in module.parameters()
        }
        left: dict[int, tuple[int, ...]] = {}
        found: dict[int, list[torch.Tensor]] = {}
        moving = set()
        for number, parameter in parameters.items():
            local = local_of(parameter)
            assert isinstance(local, torch.Tensor)
            address, size = _memory(local)
            if not address:
                continue
            if not parameter.requires_grad:
                counted = (
                    [parameter] if local is parameter else [parameter, local]
                )  # a DTensor and its part count apart
                left[number] = (address, size, *(one._version for one in counted))
                if left[number] == self._left.get(number):
                    found.setdefault(address, []).extend(one.detach() for one in counted)
                    continue
            moving.add(address)
        self._left = left
        return {address: aliases for address, aliases in found.items() if address not in moving}

    def close(self) -> None:
        self._hook.remove()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the storage of a plain tensor; zeros of any other."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if is_plain(tensor) else (0, 0)
    except (RuntimeError, ValueError):  # a sparse or wrapped one has none, a lazy one not yet
        return 0, 0


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def unchanged_check(
    path: str, tensor: torch.Tensor, others: Iterable[torch.Tensor] = ()
) -> Callable[[], None]:
    """A check for after the capture: raises ``SnapshotTorn`` where the tensor was written to since
    now, or its memory freed or moved.

    Sees every in-place torch operation on it and on ``others``, which lie in the same memory; not
    writes through ``.data``, NumPy or DLPack, which leave no trace. REQUIRES: all of them are the
    caller's alone, aliases: what others make of theirs (``p.data = ...``) does not change which
    memory these have.
    """
    versions, storage = [(one, one._version) for one in (tensor, *others)], tensor.untyped_storage()
    memory = storage.data_ptr(), storage.nbytes()

    def check() -> None:
        if (storage.data_ptr(), storage.nbytes()) != memory:
            raise SnapshotTorn(
                f"the memory of leaf {path!r} was freed or resized after save() and before its"
                " capture had finished. Call engine.before_update() before that, or use"
                " Engine(capture='eager')"
            )
        for one, version in versions:
            if one._version != version:
                raise SnapshotTorn(
                    f"leaf {path!r} was written to after save() and before its capture had finished"
                    f" (version {version}, now {one._version}). Call engine.before_update() before"
                    " such a write, or use Engine(capture='eager')"
                )

    return check
