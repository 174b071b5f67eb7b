"""Flatten the state of every save, and describe only what differs from the last one.

``Outline`` compares the structure of the state, and ``_Forms`` the tensors: class, element
type, shape, strides and device. Leaves of a state that is equal in both have the descriptions of
the last save. Their addresses and version counters are read at every save.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.state import leaves
from deltacheck.codec.base import U64
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.outline import Outline, chosen
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat

# Tensors are compared in blocks, so that several calls find them in the processor's cache.
_BLOCK = 512
# After so many saves in a row that had another structure, outlines are made less often.
_MISSES = 4

_version_of = attrgetter("_version")
# The types of leaves that can be compared, and the errors of tensors that have no memory or no
# version counter. ``leaves.flatten`` names the leaf that cannot be kept.
_KINDS = {torch.Tensor, torch.nn.Parameter, np.ndarray}
_REFUSALS = (RuntimeError, ValueError, NotImplementedError, UnsupportedLeaf)


class Tensors(NamedTuple):
    """The leaves of a state that are plain tensors in host memory.

    Attributes:
        paths: Their paths, ascending.
        values: The tensors.
        addresses: The addresses of their first bytes; 0 without elements.
        sizes: Their bytes, uint64.
        versions: Their version counters.
        storages: Their storages. A reference keeps the memory.
    """

    paths: Sequence[str]
    values: Sequence[torch.Tensor]
    addresses: Sequence[int]
    sizes: U64
    versions: Sequence[int]
    storages: Sequence[torch.UntypedStorage]


class KnownFlat(Flat):
    """A flattened state with the structure of the last save. Its leaves have no identities.

    Attributes:
        tensors: The leaves that may be read in place; ``None`` if any leaf is on a device.
        specs: The specs of all leaves by path, ascending.
    """

    tensors: Tensors | None
    specs: Mapping[str, LeafSpec]


class Flattener:
    """Flattens the states of one engine.

    Args:
        is_host: Return true if the memory of a tensor is encoded in its place, in host memory.
    """

    def __init__(self, is_host: Callable[[torch.Tensor], bool]) -> None:
        self._is_host = is_host
        self._memory: _Known | None = None
        self._misses = 0

    def __call__(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state.

        Raises:
            UnsupportedLeaf, DuplicatePath: As ``leaves.flatten`` raises them.
        """
        flat = None if self._memory is None else self._memory.flatten(state)
        if flat is not None:
            self._misses = 0
            return flat
        flat_state = leaves.flatten(state)
        self._misses += 1
        # What is known of a state that changes at every save would be of no use.
        if self._misses <= _MISSES or self._misses % _MISSES == 0:
            self._memory = _Known.of(state, flat_state, self._is_host)
        return flat_state


class _Seen(NamedTuple):
    """The tensors of a state, in the order of ``_Known.tensors``, and their arrays' addresses."""

    addresses: list[int]
    versions: list[int]
    storages: list[torch.UntypedStorage]


class _Known:
    """The structure and the forms of the leaves of the last save. ``of`` makes one."""

    def __init__(
        self,
        outline: Outline,
        flat_state: Flat,
        arrays: Sequence[object],
        is_host: Callable[[torch.Tensor], bool],
    ) -> None:
        self._outline = outline
        self._paths = list(flat_state.arrays)
        numbers = {path: number for number, (path, _) in enumerate(outline.owners)}
        tied = [number for number, (path, owner) in enumerate(outline.owners) if path != owner]
        # Owners in the order of their paths, then the tied ones.
        self._order = [*(numbers[path] for path in self._paths), *tied]
        self._leaves = {
            path: leaf._replace(identity=None) for path, leaf in flat_state.leaves.items()
        }
        self._specs = specs_of(flat_state)
        values = [arrays[number] for number in self._order]
        paths = [outline.owners[number][1] for number in self._order]
        self._tensors = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._arrays = {
            n: _array_form(value)[1]
            for n, value in enumerate(values)
            if not isinstance(value, torch.Tensor)
        }
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._forms = [_Forms(block) for block in _blocks(tensors)]
        self._is_host = all(map(is_host, tensors))
        # Of the tensors that are no tied ones, those whose memory is their bytes.
        self._plain = [
            k
            for k, (n, tensor) in enumerate(zip(self._tensors, tensors, strict=True))
            if n < len(self._paths) and leaves.is_plain(tensor)
        ]
        self._plain_paths = [self._paths[self._tensors[k]] for k in self._plain]
        self._sizes = np.array(
            [self._specs[path].raw_bytes for path in self._plain_paths], np.uint64
        )
        owners = {owner for path, owner in outline.owners if path != owner}
        places = [*self._tensors, *self._arrays]
        # Positions among the addresses of leaves that are tied, and of those without elements.
        self._tied = {k for k, n in enumerate(places) if paths[n] in owners}
        self._empty = {k for k, n in enumerate(places) if not self._specs[paths[n]].raw_bytes}
        readings = self._look(values)
        if readings is None:
            raise ValueError("the forms of tensors cannot be compared")
        self._addresses = readings.addresses

    @classmethod
    def of(
        cls, state: object, flat_state: Flat, is_host: Callable[[torch.Tensor], bool]
    ) -> _Known | None:
        """Return what is known after a save; ``None`` if no later state can be compared with it.

        Args:
            state: The state.
            flat_state: The same state, flattened.
            is_host: As in ``Flattener``.
        """
        outline = Outline.of(state, flat_state.skeleton)
        outlined = None if outline is None else outline.match(state)
        if outline is None or outlined is None:
            return None
        if not all(
            kind in _KINDS or issubclass(kind, np.generic)
            for kind in set(map(type, outlined.leaves))
        ):
            return None
        try:
            return cls(outline, flat_state, outlined.leaves, is_host)
        except _REFUSALS:
            return None

    def flatten(self, state: object) -> KnownFlat | None:
        """Flatten a state of the same structure and forms; ``None`` for any other.

        Args:
            state: The state.
        """
        outlined = self._outline.match(state)
        if outlined is None:
            return None
        values = [outlined.leaves[number] for number in self._order]
        try:
            readings = self._look(values)
        except _REFUSALS:
            return None
        if readings is None or not self._keeps_ties(readings.addresses):
            return None
        self._addresses = readings.addresses
        arrays = dict(zip(self._paths, values, strict=False))
        flat = KnownFlat(outlined.skeleton, arrays, self._leaves)
        flat.specs = self._specs
        flat.tensors = None
        if self._is_host:
            flat.tensors = Tensors(
                self._plain_paths,
                chosen(chosen(values, self._tensors), self._plain),
                chosen(readings.addresses, self._plain),
                self._sizes,
                chosen(readings.versions, self._plain),
                chosen(readings.storages, self._plain),
            )
        return flat

    def _look(self, values: list[Any]) -> _Seen | None:
        """Return what changes between saves; ``None`` if the form of a leaf has changed."""
        readings = _Seen([], [], [])
        tensors = chosen(values, self._tensors)
        for block, forms in zip(_blocks(tensors), self._forms, strict=True):
            if not forms.match(block):
                return None
            readings.addresses.extend(map(torch.Tensor.data_ptr, block))
            readings.versions.extend(map(_version_of, block))
            readings.storages.extend(map(torch.Tensor.untyped_storage, block))
        for number, form in self._arrays.items():
            address, now = _array_form(values[number])
            if now != form:
                return None
            readings.addresses.append(address)
        return readings

    def _keeps_ties(self, addresses: list[int]) -> bool:
        """Return true if the same leaves are tied as at the last save."""
        if addresses == self._addresses:
            return True
        changed = {
            k
            for k, (address, before) in enumerate(zip(addresses, self._addresses, strict=True))
            if address != before
        }
        if changed & self._tied:
            return False
        # A new address must not be that of another leaf.
        changed -= self._empty
        kept_addresses = {address for k, address in enumerate(addresses) if k not in changed}
        new = {addresses[k] for k in changed}
        return len(new) == len(changed) and not new & kept_addresses


def _array_form(value: object) -> tuple[int, Hashable]:
    """Return the address of a NumPy array, and what must be equal for an equal description.

    The address of a scalar, or of an array without elements, is 0.
    """
    leaf = leaves.describe(value)
    assert leaf is not None
    # The strides belong to the identity: a transposed view of the same memory is not tied.
    address, *strides = cast("tuple[int, Hashable] | None", leaf.identity) or (0,)
    return address, (leaf._replace(identity=None), *strides)


class _Forms:
    """The forms of some tensors: class, element type, shape, strides, device and lazy bits.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._guards = _guards_of(tensors) if _has_guards() else None
        self._attributes = None if self._guards is not None else _attributes_of(tensors)

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return true if other tensors have the same forms."""
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return _attributes_of(tensors) == self._attributes


def _attributes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    return [
        (type(t), t.dtype, t.shape, t.stride(), t.device, t.layout, t.is_conj(), t.is_neg())
        for t in tensors
    ]


def _guards_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Return torch's comparison of tensors, which torch.compile uses: one call for all of them.

    It compares ``requires_grad``, too.
    """
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


@cache
def _has_guards() -> bool:
    """Return true if this torch has the comparison, and it sees every difference of form.

    It is no public interface, so it is tried before it is used.
    """
    tensor = torch.zeros(2, 3)
    variants = [
        torch.zeros(3, 2),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, device="meta"),
        torch.nn.Parameter(tensor, requires_grad=False),
        torch._neg_view(tensor),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(6),
    ]
    try:
        guards = _guards_of([tensor])
        return bool(guards.check(torch.ones(2, 3))) and not any(map(guards.check, variants))
    except Exception:  # noqa: BLE001 - an interface of another version may raise anything
        return False


def _blocks(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [tensors[begin : begin + _BLOCK] for begin in range(0, len(tensors), _BLOCK)]
