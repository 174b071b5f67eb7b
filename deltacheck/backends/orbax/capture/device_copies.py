"""Copy arrays on accelerators, on their devices.

Then ``save`` need not wait until the arrays are computed and encoded, and they may be donated.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeGuard

import jax
from jax.sharding import Sharding

from deltacheck.backends.orbax.state.leaves import enqueued_copies

log = logging.getLogger("deltacheck")


class DeviceCopies:
    """Makes the copies of the saves of one item while device memory is free.

    It copies all arrays or none: a save that reads one array before it returns waits for all the
    work that the device has.
    """

    def __init__(self) -> None:
        # Of earlier saves, which may still read them.
        self._copies: list[weakref.ref[jax.Array]] = []
        # The most bytes of copies that existed at once: a device counts them as used since then.
        self._kept: Counter[jax.Device] = Counter()

    def of(self, leaves: Mapping[str, object]) -> dict[str, jax.Array]:
        """Enqueue copies of arrays, behind their computation and without a wait.

        Args:
            leaves: Leaves by path. Those in the memory of accelerators are copied.

        Returns:
            The copies by path. Empty if they would take more than half of the memory that was
            never in use on one of their devices: the training may need the other half, and the
            shadows of a first save are as large.
        """
        arrays = {path: leaf for path, leaf in leaves.items() if _is_on_accelerators(leaf)}
        if not arrays:
            return {}
        earlier = [copy for ref in self._copies if (copy := ref()) is not None]
        needed = _bytes_by_device([*arrays.values(), *earlier])
        for device, size in needed.items():
            unused = unused_bytes(device)
            if unused is None or size > (unused + self._kept[device]) // 2:
                return {}
        try:
            copies = _copied(arrays)
        except jax.errors.JaxRuntimeError as error:
            log.warning("arrays are read before save() returns: %s", str(error))
            return {}
        self._copies = [weakref.ref(copy) for copy in (*earlier, *copies.values())]
        self._kept |= needed
        return copies


def _is_on_accelerators(value: object) -> TypeGuard[jax.Array]:
    if not isinstance(value, jax.Array) or value.sharding.memory_kind not in (None, "device"):
        return False
    devices: Iterable[jax.Device] = value.sharding.device_set
    return all(device.platform != "cpu" for device in devices)


def unused_bytes(device: jax.Device) -> int | None:
    """Return the memory of a device that was never in use; ``None`` if it does not say."""
    statistics = device.memory_stats() or {}
    limit, peak = statistics.get("bytes_limit"), statistics.get("peak_bytes_in_use")
    return None if not limit or peak is None else int(limit - peak)


def _bytes_by_device(arrays: Iterable[jax.Array]) -> Counter[jax.Device]:
    """Return the bytes that arrays take on each device of this process."""
    size: Counter[jax.Device] = Counter()
    for array in arrays:
        shard = array.sharding.shard_shape(array.shape)
        for device in array.sharding.addressable_devices:
            size[device] += prod(shard) * array.dtype.itemsize
    return size


def _copied(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return copies, made in one call for all arrays with one sharding."""
    groups: dict[Sharding, list[str]] = {}
    for path, array in arrays.items():
        groups.setdefault(array.sharding, []).append(path)
    copies: dict[str, jax.Array] = {}
    for paths in groups.values():
        copies |= zip(paths, enqueued_copies([arrays[path] for path in paths]), strict=True)
    return copies
