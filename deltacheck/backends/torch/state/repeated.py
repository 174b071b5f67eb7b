"""Flatten the state of every save, and describe only what differs from the last one.

``Outline`` compares the structure of the state, and ``_Forms`` the tensors: class, element
type, shape, strides and device. Leaves of a state that is equal in both have the descriptions of
the last save. Their addresses and version counters are read at every save.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.state import leaves
from deltacheck.codec import fingerprints
from deltacheck.codec.base import U64
from deltacheck.codec.extension import native
from deltacheck.codec.object_loops import read_numbers
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.outline import Outline, chosen
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat

# Tensors are compared in blocks, so that several calls find them in the processor's cache.
_BLOCK = 512
# Bytes of a line of the processor's cache.
_LINE = 64
_NO_LINES = np.empty(0, np.uint64)
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
        addresses: The addresses of their first bytes, uint64; 0 without elements.
        sizes: Their bytes, uint64.
        versions: The version counters of those that a fingerprint covers by a sample, uint64; 0
            for the others, of which a fingerprint shows every change.
        storages: Their storages. A reference keeps the memory.
        may_move: True if the memory of a storage may be freed or moved while it is referred to.
    """

    paths: Sequence[str]
    values: Sequence[torch.Tensor]
    addresses: U64
    sizes: U64
    versions: U64
    storages: Sequence[torch.UntypedStorage]
    may_move: bool


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
        self._memory: _KnownStructure | None = None
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
            self._memory = _KnownStructure.of(state, flat_state, self._is_host)
        return flat_state


class _Seen(NamedTuple):
    """The tensors of a state, in the order of ``_KnownStructure.tensors``.

    ``addresses`` has those of the arrays after them. ``storages`` and ``may_move``: as in
    ``Tensors``, empty if a leaf is on a device.
    """

    addresses: U64
    versions: U64
    storages: list[torch.UntypedStorage]
    may_move: bool


@dataclass(frozen=True, slots=True)
class _PlainTensors:
    """The tensors of a state in host memory that are no tied ones and whose memory is their bytes.

    Args:
        numbers: Their numbers among the tensors.
        places: The same, to index arrays with.
        paths: Their paths.
        sizes: Their sizes in bytes, uint64.
    """

    numbers: list[int]
    places: slice | NDArray[np.intp]
    paths: list[str]
    sizes: U64

    @classmethod
    def of(
        cls,
        tensors: Sequence[torch.Tensor],
        paths: Sequence[str | None],
        specs: Mapping[str, LeafSpec],
    ) -> _PlainTensors:
        """Return those of all tensors of a state.

        Args:
            tensors: The tensors.
            paths: Their paths, ``None`` for tied ones.
            specs: The specs of leaves, by path.
        """
        plain = {
            number: path
            for number, (tensor, path) in enumerate(zip(tensors, paths, strict=True))
            if path is not None and leaves.is_plain(tensor)
        }
        numbers = list(plain)
        places = slice(None) if len(plain) == len(tensors) else np.array(numbers, np.intp)
        sizes = np.array([specs[path].raw_bytes for path in plain.values()], np.uint64)
        return cls(numbers, places, list(plain.values()), sizes)

    def read(self, tensors: list[Any], readings: _Seen) -> Tensors:
        """Return them as they are at a save, of all tensors of the state."""
        return Tensors(
            self.paths,
            chosen(tensors, self.numbers),
            readings.addresses[: len(tensors)][self.places],
            self.sizes,
            readings.versions[self.places],
            chosen(readings.storages, self.numbers),
            readings.may_move,
        )


class _KnownStructure:
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
        self._order = _order(outline, self._paths)
        self._leaves = {
            path: leaf._replace(identity=None) for path, leaf in flat_state.leaves.items()
        }
        self._specs = specs_of(flat_state)
        values = list(map(arrays.__getitem__, self._order))
        paths = [outline.owners[number][1] for number in self._order]
        self._in_order = itemgetter(*self._order) if len(self._order) > 1 else None
        self._tensors = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        self._arrays = {
            n: _array_form(value)[1]
            for n, value in enumerate(values)
            if not isinstance(value, torch.Tensor)
        }
        tensors = chosen(values, self._tensors)
        blocks = _blocks(tensors)
        self._forms, self._lines = list(map(_Forms, blocks)), list(map(_lines_of, blocks))
        tensor_paths = [self._paths[n] if n < len(self._paths) else None for n in self._tensors]
        self._plain = (
            _PlainTensors.of(tensors, tensor_paths, self._specs)
            if all(map(is_host, tensors))
            else None
        )
        # Of all tensors, those that a fingerprint covers by a sample.
        self._sampled = [
            k
            for k, n in enumerate(self._tensors)
            if self._specs[paths[n]].raw_bytes > fingerprints.WHOLE_BYTES
        ]
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
    ) -> _KnownStructure | None:
        """Return what is known after a save; ``None`` if no later state can be compared with it.

        Args:
            state: The state.
            flat_state: The same state, flattened.
            is_host: As in ``Flattener``.
        """
        outline = Outline.of(state, flat_state.skeleton, native.matching_children)
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
        values = list(
            outlined.leaves if self._in_order is None else self._in_order(outlined.leaves)
        )
        try:
            readings = self._look(values)
            if readings is None or not self._keeps_ties(readings.addresses):
                return None
            # Memory that lies where it did was large enough then.
            moved = np.flatnonzero(readings.addresses != self._addresses).tolist()
            for number in moved:
                if number < len(self._tensors):
                    leaves.require_memory(values[self._tensors[number]])
        except _REFUSALS:
            return None
        self._addresses = readings.addresses
        # After those of the paths, the values are those of tied leaves.
        arrays = dict(zip(self._paths, values, strict=False))
        flat = KnownFlat(outlined.skeleton, arrays, self._leaves)
        flat.specs = self._specs
        flat.tensors = None
        if self._plain is not None:
            flat.tensors = self._plain.read(chosen(values, self._tensors), readings)
        return flat

    def _look(self, values: list[Any]) -> _Seen | None:
        """Return what changes between saves; ``None`` if the form of a leaf has changed."""
        tensors = chosen(values, self._tensors)
        addresses = np.empty(len(tensors) + len(self._arrays), np.uint64)
        versions = np.zeros(len(tensors), np.uint64)
        storages: list[torch.UntypedStorage] = []
        may_move, begin = False, 0
        # While a block is read, the records of the next one are loaded.
        for lines in self._lines[:1]:
            native.load_ahead(lines)
        next_lines = [*self._lines[1:], _NO_LINES]
        for block, forms, lines in zip(_blocks(tensors), self._forms, next_lines, strict=False):
            native.load_ahead(lines)
            if not forms.match(block):
                return None
            end = begin + len(block)
            read_numbers(list(block), torch.Tensor.data_ptr, addresses[begin:end])
            # Beside leaves on devices none is read in its place.
            if self._plain is not None:
                of_block = list(map(torch.Tensor.untyped_storage, block))
                may_move = may_move or any(map(torch.UntypedStorage.resizable, of_block))
                storages += of_block
            begin = end
        if self._sampled:
            of_sampled = np.empty(len(self._sampled), np.uint64)
            read_numbers(chosen(tensors, self._sampled), _version_of, of_sampled)
            versions[self._sampled] = of_sampled
        for number, form in self._arrays.items():
            address, now = _array_form(values[number])
            if now != form:
                return None
            addresses[begin] = address
            begin += 1
        return _Seen(addresses, versions, storages, may_move)

    def _keeps_ties(self, now: U64) -> bool:
        """Return true if the same leaves are tied as at the last save."""
        changed: set[int] = set(np.flatnonzero(now != self._addresses).tolist())
        if not changed:
            return True
        addresses: list[int] = now.tolist()
        if changed & self._tied:
            return False
        # A new address must not be that of another leaf.
        changed -= self._empty
        kept_addresses = {address for k, address in enumerate(addresses) if k not in changed}
        new = {addresses[k] for k in changed}
        return len(new) == len(changed) and not new & kept_addresses


def _order(outline: Outline, paths: Sequence[str]) -> list[int]:
    """Return the numbers of the leaves of an outline: owners by path, then the tied ones."""
    numbers = {path: number for number, (path, _) in enumerate(outline.owners)}
    tied = [number for number, (path, owner) in enumerate(outline.owners) if path != owner]
    return [*map(numbers.__getitem__, paths), *tied]


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


def _lines_of(tensors: Sequence[torch.Tensor]) -> U64:
    """Return the addresses of torch's records of some tensors and their storages.

    The next save reads them in the order of the tensors, and each of them would wait for the
    memory. Most of these records stay where they are from save to save.
    """
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    lines = [np.array(list(map(id, storages)), np.uint64)]
    for attribute, count in ((tensors, 3), (storages, 2)):
        # The attribute is not documented, and nothing depends on it but time.
        records = np.array([getattr(item, "_cdata", 0) for item in attribute], np.uint64)
        lines += [records + np.uint64(_LINE * number) for number in range(count)]
    return np.concatenate(lines)


def _blocks(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [tensors[begin : begin + _BLOCK] for begin in range(0, len(tensors), _BLOCK)]
