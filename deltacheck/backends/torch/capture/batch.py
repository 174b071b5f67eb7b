"""Plan the reads of all tensors of a state in host memory together, if its forms are known.

``save`` takes what must be taken at once: addresses, version counters, fingerprints, and copies of
leaves that may change at any time. The leaves are read from it behind the training loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.capture.guard import (
    Guarded,
    torn_by_memory,
    torn_by_write,
    unchanged_check,
)
from deltacheck.backends.torch.capture.residents import Residents
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import KnownFlat, Tensors
from deltacheck.codec.base import U64
from deltacheck.codec.fingerprints import WHOLE_BYTES, Memory, fingerprints
from deltacheck.leaf.outline import chosen
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.source import (
    LaterSources,
    LeafSource,
    host_content_check,
    itself,
    require_fingerprint,
)
from deltacheck.save.save_options import SaveOptions, cache_bytes_of


@dataclass(slots=True)
class _CapturedLeaf:
    """One tensor that is read in its place.

    Args:
        path: Its path.
        tensor: The tensor, whose counter shows writes to it.
        version: The counter at ``save``, if the fingerprint is of a sample.
        address: The first byte.
        size: The number of bytes.
        storage: Its storage, which begins at ``address``. The reference keeps the memory alive,
            even if the tensor gets another.
    """

    path: str
    tensor: torch.Tensor
    version: int
    address: int
    size: int
    storage: torch.UntypedStorage

    def current(self) -> NDArray[np.uint8]:
        """Return the memory of the leaf, uint8, 1-D."""
        return np.asarray(Memory(self.address, self.size, self.storage))

    def recheck(self) -> None:
        """Raise ``SnapshotTorn`` if the tensor was written to, or its memory is another."""
        if self.storage.data_ptr() != self.address:
            raise torn_by_memory(self.path)
        # The fingerprint of a smaller leaf shows every change of its content.
        if self.size <= WHOLE_BYTES:
            return
        version = self.tensor._version
        if version != self.version:
            raise torn_by_write(self.path, self.version, version)


def in_place(spec: LeafSpec, aliases: Sequence[torch.Tensor], seed: int) -> LeafSource:
    """Return the source of one guarded tensor in host memory, which is read later.

    Args:
        spec: The leaf.
        aliases: As ``Guarded.watched`` returns them.
        seed: The seed of its fingerprint.
    """
    alias, *more_aliases = aliases
    # It is viewed now, because torch does not free or move memory that NumPy has viewed, whatever
    # happens to the tensor.
    view = leaves.viewed(alias).numpy()
    check = unchanged_check(spec.path, alias, more_aliases)
    content = host_content_check(spec.path, view, seed)
    return LeafSource(spec, partial(itself, view), True, check, check_content=content, is_view=True)


@dataclass(frozen=True, slots=True)
class _Placement:
    """The tensors of a state whose storages are owned.

    Args:
        owned: The addresses of the owned storages.
        addresses: The addresses of the tensors, uint64.
        places: The numbers of the tensors at the start of an owned storage, ascending.
        owned_paths: Their paths.
    """

    owned: Set[int]
    addresses: U64
    places: Sequence[int]
    owned_paths: Set[str]

    @property
    def is_whole(self) -> bool:
        """True if all tensors are owned."""
        return len(self.places) == self.addresses.size


class Placements:
    """The owned tensors of the last save, which are mostly those of the next one."""

    def __init__(self) -> None:
        self._last: _Placement | None = None
        self._paths: Sequence[str] = ()

    def of(self, tensors: Tensors, owned: Set[int]) -> _Placement:
        """Return the tensors of a state that are owned.

        Args:
            tensors: The tensors.
            owned: The addresses of the owned storages. A set that was passed before must not have
                changed since.
        """
        last = self._last
        if (
            last is not None
            and last.owned is owned
            and self._paths is tensors.paths
            and np.array_equal(last.addresses, tensors.addresses)
        ):
            return last
        # A tensor at the start of an owned storage has its address. Others are looked at one by
        # one. So are those without memory, whose address 0 may be that of an empty parameter.
        places = [
            number
            for number, address in enumerate(tensors.addresses.tolist())
            if address and address in owned
        ]
        owned_paths = frozenset(chosen(tensors.paths, places))
        self._last = _Placement(owned, tensors.addresses, places, owned_paths)
        self._paths = tensors.paths
        return self._last


def planned(
    flat: KnownFlat, tensors: Tensors, guarded: Guarded, memo: Placements, options: SaveOptions
) -> LaterSources | None:
    """Plan the reads of a state.

    Args:
        flat: The state, in host memory.
        tensors: Its tensors.
        guarded: The tensors that may be read after ``save`` has returned.
        memo: The placements of the saves of this engine.
        options: Tell how many bytes may be copied of leaves that may change at any time.

    Returns:
        The sources of all leaves, by path, ascending; ``None`` if too much would have to be copied.
    """
    placement = memo.of(tensors, guarded.owned)
    if placement.is_whole and len(tensors.paths) == len(flat.arrays):
        rest: Mapping[str, object] = {}
    else:
        paths = [path for path in flat.arrays if path not in placement.owned_paths]
        rest = {path: flat.arrays[path] for path in paths}
    most_bytes = cache_bytes_of(int(tensors.sizes.sum()), options)
    sources = one_by_one(rest, flat.specs, guarded, most_bytes)
    if not all(source.lazy for source in sources.values()):
        return None
    places = placement.places
    storages = chosen(tensors.storages, places)
    # torch does not free or move memory that NumPy has viewed once, whatever happens to the tensor.
    if tensors.may_move:
        for number, resizable in enumerate(map(torch.UntypedStorage.resizable, storages)):
            if resizable:
                leaves.viewed(tensors.values[places[number]].detach()).numpy()
    addresses, sizes, versions = tensors.addresses, tensors.sizes, tensors.versions
    if not placement.is_whole:
        addresses, sizes, versions = addresses[places], sizes[places], versions[places]
    seed = secrets.randbits(62)
    contents = fingerprints(addresses, sizes, seed)

    def make() -> dict[str, LeafSource]:
        columns = (
            chosen(tensors.paths, places),
            chosen(tensors.values, places),
            versions.tolist(),
            addresses.tolist(),
            sizes.tolist(),
            storages,
            contents.tolist(),
        )
        for path, tensor, version, address, size, storage, content in zip(*columns, strict=True):
            leaf = _CapturedLeaf(path, tensor, version, address, size, storage)
            sources[path] = LeafSource(
                flat.specs[path],
                leaf.current,
                True,
                leaf.recheck,
                check_content=partial(require_fingerprint, path, content, seed),
                is_view=True,
            )
        return {path: sources[path] for path in flat.arrays}

    return LaterSources(flat.specs, make)


def one_by_one(
    values: Mapping[str, object], specs: Mapping[str, LeafSpec], guarded: Guarded, most_bytes: int
) -> dict[str, LeafSource]:
    """Return the sources of leaves of the host that are looked at one by one.

    Guarded leaves are read in their place, later. The others are copied. If that takes too much,
    they are read before ``save`` returns.

    Args:
        values: The leaves by path.
        specs: The specs of all leaves.
        guarded: As in ``planned``.
        most_bytes: The most bytes of copies.
    """
    aliases = {path: guarded.watched(value) for path, value in values.items()}
    unguarded = {path: value for path, value in values.items() if not aliases[path]}
    seed = secrets.randbits(62)
    sources = {path: in_place(specs[path], aliases[path], seed) for path in values if aliases[path]}
    copied = Residents.of(unguarded, specs, list(range(len(unguarded))), None)
    if copied.size > most_bytes:
        return sources | {
            path: LeafSource(specs[path], partial(leaves.bytes_of, value))
            for path, value in unguarded.items()
        }
    for path, copy in zip(copied.paths, copied.copied_on_host(unguarded)(), strict=True):
        sources[path] = LeafSource(specs[path], partial(itself, copy), True, is_view=True)
    return sources
