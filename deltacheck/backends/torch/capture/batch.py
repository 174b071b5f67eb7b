"""Plan the reads of all tensors of a state in host memory together, if its forms are known.

``save`` takes what must be taken at once: addresses, version counters, fingerprints, and copies of
small leaves that may change at any time. The sources of the leaves are sources from it behind the
training loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
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
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import KnownFlat
from deltacheck.codec.fingerprints import Memory, fingerprints
from deltacheck.leaf.outline import chosen
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.source import (
    MOST_COPIED_BYTES,
    LaterSources,
    LeafSource,
    host_content_check,
    itself,
    require_fingerprint,
)


@dataclass(slots=True)
class _Leaf:
    """One tensor that is read in its place.

    Args:
        path: Its path.
        tensor: The tensor, whose counter shows writes to it.
        version: The counter at ``save``.
        address: The first byte.
        size: The number of bytes.
        storage: Its storage, which begins at ``address``. The reference keeps the memory alive,
            even if the tensor gets another.
        seed: The seed of its fingerprint.
        content: Its fingerprint at ``save``.
    """

    path: str
    tensor: torch.Tensor
    version: int
    address: int
    size: int
    storage: torch.UntypedStorage
    seed: int
    content: int

    def current(self) -> NDArray[np.uint8]:
        """Return the memory of the leaf, uint8, 1-D."""
        return np.asarray(Memory(self.address, self.size, self.storage))

    def recheck(self) -> None:
        """Raise ``SnapshotTorn`` if the tensor was written to, or its memory is another."""
        if self.storage.data_ptr() != self.address:
            raise torn_by_memory(self.path)
        version = self.tensor._version
        if version != self.version:
            raise torn_by_write(self.path, self.version, version)

    def check_content(self, content: NDArray[np.uint8]) -> None:
        """Raise ``SnapshotTorn`` if what was read is not the content at ``save``."""
        require_fingerprint(self.path, self.content, self.seed, content)


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


def planned(flat: KnownFlat, guarded: Guarded) -> LaterSources | None:
    """Plan the reads of a state.

    Args:
        flat: The state.
        guarded: The tensors that may be read after ``save`` has returned.

    Returns:
        The sources of all leaves, by path, ascending; ``None`` if one is on a device, or too much
        would have to be copied.
    """
    tensors = flat.tensors
    if tensors is None:
        return None
    # A tensor at the start of a guarded storage has its address. Others are looked at one by one.
    # So are those without memory, whose address 0 may be that of an empty parameter.
    is_owned = list(map((guarded.owned - {0}).__contains__, tensors.addresses))
    if all(is_owned) and len(tensors.paths) == len(flat.arrays):
        rest: Mapping[str, object] = {}
    else:
        owned_paths = {path for path, owned in zip(tensors.paths, is_owned, strict=True) if owned}
        rest = {path: value for path, value in flat.arrays.items() if path not in owned_paths}
    sources = _others(rest, flat.specs, guarded)
    if sources is None:
        return None
    places = [number for number, owned in enumerate(is_owned) if owned]
    storages = chosen(tensors.storages, places)
    # torch does not free or move memory that NumPy has viewed once, whatever happens to the tensor.
    for number, resizable in enumerate(map(torch.UntypedStorage.resizable, storages)):
        if resizable:
            leaves.viewed(tensors.values[places[number]].detach()).numpy()
    addresses = chosen(tensors.addresses, places)
    sizes = tensors.sizes if len(rest) == 0 else tensors.sizes[places]
    seed = secrets.randbits(62)
    contents = fingerprints(np.array(addresses, np.uint64), sizes, seed)
    paths, values = chosen(tensors.paths, places), chosen(tensors.values, places)
    versions = chosen(tensors.versions, places)

    def make() -> dict[str, LeafSource]:
        columns = (paths, values, versions, addresses, sizes.tolist(), storages, contents.tolist())
        for path, tensor, version, address, size, storage, content in zip(*columns, strict=True):
            leaf = _Leaf(path, tensor, version, address, size, storage, seed, content)
            sources[path] = LeafSource(
                flat.specs[path],
                leaf.current,
                True,
                leaf.recheck,
                check_content=leaf.check_content,
                is_view=True,
            )
        return {path: sources[path] for path in flat.arrays}

    return LaterSources(flat.specs, make)


def _others(
    values: Mapping[str, object], specs: Mapping[str, LeafSpec], guarded: Guarded
) -> dict[str, LeafSource] | None:
    """Return the sources of leaves that are looked at one by one.

    Args:
        values: The leaves by path.
        specs: The specs of all leaves.
        guarded: As in ``planned``.

    Returns:
        The sources; ``None`` if more than ``MOST_COPIED_BYTES`` would have to be copied.
    """
    aliases = {path: guarded.watched(value) for path, value in values.items()}
    if sum(specs[path].raw_bytes for path in values if not aliases[path]) > MOST_COPIED_BYTES:
        return None
    seed = secrets.randbits(62)
    sources = {}
    for path, value in values.items():
        if aliases[path]:
            sources[path] = in_place(specs[path], aliases[path], seed)
        else:
            copy = leaves.bytes_of(value).copy()
            sources[path] = LeafSource(specs[path], partial(itself, copy), True, is_view=True)
    return sources
