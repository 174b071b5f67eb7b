"""Find the tensors that may be read after ``save`` returns.

These are the tensors that only an optimizer's step changes, because such a step can be delayed, and
those that nothing changes. torch calls the global optimizer pre-step hook once before every real
step, before any weight changes (also under ``torch.compile`` and DeepSpeed). Everything that the
optimizers seen so far own is *guarded*: the hook waits until the running captures have read it. A
parameter of a known module that needs no gradient is guarded too, if it did not change from one
save to the next. A tensor of unknown owner is copied eagerly.

An access to ``.data`` of a guarded parameter waits too, because it is the usual way to write to
weights outside an optimizer. Other writes are noticed after the capture: by the version counter, or
by a fingerprint of the content.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltacheck.backends.torch.capture import data_property
from deltacheck.backends.torch.state.classes import dense_parts
from deltacheck.backends.torch.state.leaves import is_plain, local_of
from deltacheck.backends.torch.state.repeated import Tensors
from deltacheck.codec.base import U64
from deltacheck.codec.object_loops import read_numbers
from deltacheck.errors import SnapshotTorn

# Tensors of these classes have storages of their own.
PLAIN = {torch.Tensor, torch.nn.Parameter}
_NUMBERS = {int, float, bool, type(None)}
# So many sets of addresses are kept apart until the saves have read them.
_MOST_SETS = 8


@dataclass(frozen=True, slots=True)
class Guarded:
    """The tensors that may be read after ``save`` has returned, by the addresses of storages.

    ``owned`` are storages that only an optimizer's step changes. ``frozen`` are storages that
    nothing changes, with an alias of every parameter in them.
    """

    owned: set[int] = field(default_factory=set)
    frozen: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)

    def watched(self, value: object) -> list[torch.Tensor]:
        """Return aliases of a guarded tensor, whose versions show writes to it.

        The first alias has the tensor's present memory. The result is empty for any other value.
        """
        # A tensor that is not plain is copied to read it. Inference tensors have no version
        # counter.
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return []
        address = value.untyped_storage().data_ptr()
        if address in self.owned:
            return [value.detach()]
        # A detached alias shares the version counter, so it shows later writes too.
        aliases = self.frozen.get(address, ())
        # Without an equal version the tensor has a counter of its own and may have changed.
        if any(value._version == alias._version for alias in aliases):
            return [value.detach(), *aliases]
        return []


class Guard:
    """Watches optimizer steps.

    Args:
        before_step: Called on the training thread before each step.
    """

    def __init__(self, before_step: Callable[[], None]) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # By id, because modules may define equality.
        self._modules: weakref.WeakValueDictionary[int, torch.nn.Module] = (
            weakref.WeakValueDictionary()
        )
        # Frozen parameters at the save before, by id: torch.utils.swap_tensors refuses tensors that
        # anything refers to weakly.
        self._frozen_before: dict[int, tuple[int, ...]] = {}
        # Storages beside those of the optimizers that change only after an optimizer's step began.
        self._weights: set[int] = set()
        self._before_step = before_step
        # The addresses of the storages that saves since the last ``announced`` may still read, in
        # several sets, because their union would take time at every save.
        self._read_later: list[Set[int]] = []
        # The storages of the optimizers at the last save.
        self._owned = _Owned(None, set())
        # A bound method is a new object at each access, and it is removed by identity.
        self._watcher = self._on_data
        data_property.add(self._watcher)
        _add(self)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer that is about to step, and wait for the saves that read it."""
        self._optimizers.add(optimizer)
        self._before_step()

    def _on_data(self, parameter: torch.Tensor) -> None:
        # The set is empty most of the time, and this runs at every access.
        if self._read_later and any(map(self._is_read_later, dense_parts(parameter))):
            self._before_step()

    def _is_read_later(self, tensor: torch.Tensor) -> bool:
        address = _memory(tensor)[0]
        return any(address in addresses for addresses in self._read_later)

    def announced(self) -> None:
        """Record that every save has read the state: writes need no announcement any more."""
        self._read_later = []

    def add(self, owner: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Register an optimizer before its first step, or a module."""
        if isinstance(owner, torch.nn.Module):
            self._modules[id(owner)] = owner
        else:
            self._optimizers.add(owner)

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register the tensors of the next save that change only after an optimizer's step began.

        They replace those of the call before.
        """
        self._weights = {
            tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()
        }

    def guarded(self, leaves: Tensors | None = None) -> Guarded:
        """Return the tensors that are guarded at this save.

        Call it at most once for each save, because frozen parameters are found by comparison with
        the last call.

        Args:
            leaves: The tensors of the state, if they are known.
        """
        owned = self.owned(leaves)
        guarded = Guarded(owned | self._weights if self._weights else owned, self._frozen())
        self._will_read(guarded.owned)
        if guarded.frozen:
            self._will_read(set(guarded.frozen))
        return guarded

    def _will_read(self, addresses: Set[int]) -> None:
        # Mostly the same set as at the last save.
        if not addresses or any(
            addresses is earlier or addresses == earlier for earlier in self._read_later
        ):
            return
        if len(self._read_later) == _MOST_SETS:
            self._read_later = [set().union(*self._read_later)]
        self._read_later.append(addresses)

    def owned(self, leaves: Tensors | None = None) -> set[int]:
        """Return the addresses of all storages of parameters and state of the known optimizers.

        The result is the set of the last call, unchanged, if the addresses are the same.

        Args:
            leaves: The tensors of the state that is saved, if they are known.
        """
        values: list[Any] = []
        for optimizer in list(self._optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # Announces accesses to ``.data`` of classes such as DTensor, too.
            data_property.cover(set(map(type, parameters)))
            values += parameters
            # The keys too: ZeRO-3 removes its parameters from the groups between the steps.
            keys = list(optimizer.state)
            if list(map(id, keys)) != list(map(id, parameters)):
                values += keys
            states = optimizer.state.values()
            if set(map(type, states)) <= {dict}:
                values += chain.from_iterable(map(dict.values, states))
            else:
                for state in states:
                    values += state.values() if type(state) is dict else [state]
        self._owned = self._owned.of(values, leaves)
        return self._owned.addresses

    def _frozen(self) -> dict[int, list[torch.Tensor]]:
        """Return storages whose parameters need no gradient and did not change since the last call.

        A parameter did not change if it has the same memory and the same version.
        """
        parameters = {
            id(parameter): parameter
            for module in list(self._modules.values())
            for parameter in module.parameters()
        }
        data_property.cover(set(map(type, parameters.values())))
        frozen: dict[int, tuple[int, ...]] = {}
        candidates: dict[int, list[torch.Tensor]] = {}
        moving = set()
        for number, parameter in parameters.items():
            local = local_of(parameter)
            assert isinstance(local, torch.Tensor)
            address, size = _memory(local)
            if not address:
                continue
            if not parameter.requires_grad:
                # A DTensor and its local part have separate version counters.
                counters = [parameter] if local is parameter else [parameter, local]
                frozen[number] = (address, size, *(tensor._version for tensor in counters))
                if frozen[number] == self._frozen_before.get(number):
                    candidates.setdefault(address, []).extend(
                        tensor.detach() for tensor in counters
                    )
                    continue
            # A storage is frozen only if all of its parameters are.
            moving.add(address)
        self._frozen_before = frozen
        return {
            address: aliases for address, aliases in candidates.items() if address not in moving
        }

    def close(self) -> None:
        """End. A thread may call this while another one trains."""
        _remove(self)
        data_property.remove(self._watcher)


_guards: tuple[Guard, ...] = ()
_lock = threading.Lock()


@functools.cache
def _register() -> None:
    # It stays for ever: torch walks through its table of hooks in every step, and a thread that
    # removed one then would fail the training.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for guard in _guards:
        guard.on_step(optimizer)


def _add(guard: Guard) -> None:
    global _guards
    _register()
    with _lock:
        _guards = (*_guards, guard)


def _remove(guard: Guard) -> None:
    global _guards
    with _lock:
        _guards = tuple(member for member in _guards if member is not guard)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The tensors of optimizers that were themselves leaves of a saved state.

    Args:
        pick: Return them of the tensors of the optimizers, in order.
        pick_leaves: Return them of the leaves.
        places: Their numbers among the leaves.
        addresses: Their addresses, uint64.
        rest: The numbers of the other tensors of the optimizers, ascending.
        tensors: The number of tensors of the optimizers.
    """

    pick: Callable[[Any], Any]
    pick_leaves: Callable[[Any], Any]
    places: NDArray[np.intp]
    addresses: U64
    rest: list[int]
    tensors: int

    @classmethod
    def of(cls, tensors: list[torch.Tensor], leaves: Tensors) -> _Shared | None:
        """Return those of a save; ``None`` if there are less than two."""
        numbers = {id(leaf): number for number, leaf in enumerate(leaves.values)}
        positions = [number for number, tensor in enumerate(tensors) if id(tensor) in numbers]
        if len(positions) < 2:
            return None
        places = [numbers[id(tensors[number])] for number in positions]
        is_own = set(positions)
        return cls(
            itemgetter(*positions),
            itemgetter(*places),
            np.array(places, np.intp),
            leaves.addresses[places],
            [number for number in range(len(tensors)) if number not in is_own],
            len(tensors),
        )

    def is_same(self, tensors: list[torch.Tensor], leaves: Tensors) -> bool:
        """Return true if the same tensors are leaves of another save, with the same addresses."""
        return (
            len(tensors) == self.tensors
            and int(self.places.max()) < len(leaves.values)
            and all(map(is_, self.pick(tensors), self.pick_leaves(leaves.values)))
            and np.array_equal(leaves.addresses[self.places], self.addresses)
        )


@dataclass(frozen=True, slots=True)
class _Owned:
    """The addresses of the storages of the optimizers: in the order of the tensors, and as a set.

    ``in_order`` is ``None`` if they were not read in one call.
    """

    in_order: U64 | None
    addresses: set[int]
    shared: _Shared | None = None

    def of(self, values: list[Any], leaves: Tensors | None) -> _Owned:
        """Return the addresses of all tensors in some values of an optimizer, at a later save.

        Args:
            values: The values.
            leaves: The tensors of the state that is saved, if they are known.
        """
        kinds = set(map(type, values))
        # The usual case, in calls that loop in C.
        if kinds <= PLAIN | _NUMBERS:
            tensors = values if kinds <= PLAIN else [v for v in values if type(v) in PLAIN]
            # A sparse tensor has no storage.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                return self._of_plain(tensors, leaves)
        # A DTensor has no storage of its own; saves read its local part.
        local = [
            part
            for value in values
            for tensor in _tensors(value)
            if isinstance(part := local_of(tensor), torch.Tensor)
        ]
        parts = [part for tensor in local for part in dense_parts(tensor)]
        return _Owned(None, {part.untyped_storage().data_ptr() for part in parts if is_plain(part)})

    def _of_plain(self, tensors: list[torch.Tensor], leaves: Tensors | None) -> _Owned:
        # A tensor of which the state has the address needs no second look: its storage is the
        # same as long as it is the same tensor at the same address.
        shared = self.shared
        if self.in_order is not None and shared is not None and leaves is not None:
            rest = shared.rest
            if shared.is_same(tensors, leaves) and np.array_equal(
                _storage_addresses([tensors[number] for number in rest]), self.in_order[rest]
            ):
                return self
        addresses = _storage_addresses(tensors)
        is_same = self.in_order is not None and np.array_equal(addresses, self.in_order)
        return _Owned(
            addresses,
            self.addresses if is_same else set(addresses.tolist()),
            None if leaves is None else _Shared.of(tensors, leaves),
        )


def _storage_addresses(tensors: list[torch.Tensor]) -> U64:
    addresses = np.empty(len(tensors), np.uint64)
    read_numbers(tensors, torch.Tensor.untyped_storage, addresses, torch.UntypedStorage.data_ptr)
    return addresses


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of the storage of a plain tensor; zeros for any other."""
    try:
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if is_plain(tensor) else (0, 0)
    except (RuntimeError, ValueError):  # sparse, wrapped and lazy tensors have no storage
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
    """Return a check for after the capture.

    The check raises ``SnapshotTorn`` if the tensor was written to since this call, or its memory
    was freed or moved. It sees every in-place operation of torch on the tensor and on ``others``,
    which share its memory. It does not see writes through ``.data``, NumPy or DLPack, for which
    ``content_check`` compares the content. All tensors must be aliases that only the caller holds:
    an assignment to ``p.data`` does not change the memory of an alias.
    """
    versions = [(alias, alias._version) for alias in (tensor, *others)]
    # The reference keeps the storage object alive, so that its address is not used again.
    storage = tensor.untyped_storage()
    memory = storage.data_ptr(), storage.nbytes()

    def check() -> None:
        if (storage.data_ptr(), storage.nbytes()) != memory:
            raise torn_by_memory(path)
        for alias, version in versions:
            if alias._version != version:
                raise torn_by_write(path, version, alias._version)

    return check


def torn_by_memory(path: str) -> SnapshotTorn:
    """Return the error for a leaf whose memory was freed or moved too early."""
    return SnapshotTorn(
        f"the memory of leaf {path!r} was freed or resized after save() and before its"
        " capture had finished. Call engine.before_update() before that, or use"
        " SaveOptions(capture='eager')"
    )


def torn_by_write(path: str, before: int, after: int) -> SnapshotTorn:
    """Return the error for a leaf whose version counter shows a write that came too early."""
    return SnapshotTorn(
        f"leaf {path!r} was written to after save() and before its capture had finished"
        f" (version {before}, now {after}). Call engine.before_update()"
        " before such a write, or use SaveOptions(capture='eager')"
    )
