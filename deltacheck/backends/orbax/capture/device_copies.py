"""Copy arrays on accelerators, on their devices.

Then ``save`` need not wait until the arrays are computed and encoded, and they may be donated.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import prod

import jax
from jax.sharding import Sharding

from deltacheck.backends.orbax.state import leaves
from deltacheck.save.job.source import itself
from deltacheck.save.job.spare_memory import SpareMemory, while_claimed

log = logging.getLogger("deltacheck")


class DeviceCopies:
    """Makes the copies of the saves of one item while device memory is free.

    It copies all arrays or none: a save that reads one array before it returns waits for all the
    work that the device has.
    """

    def __init__(self) -> None:
        self._spare: SpareMemory[jax.Device] = SpareMemory(_unused_bytes)

    def of(self, values: Mapping[str, object]) -> dict[str, Callable[[], jax.Array]]:
        """Enqueue copies of arrays, behind their computation and without a wait.

        Args:
            values: Leaves by path. Those in the memory of accelerators are copied.

        Returns:
            Functions by path that return the copies, for ``LeafSource.current``. None if there is
            not enough memory.
        """
        arrays = {path: value for path, value in values.items() if leaves.is_on_accelerators(value)}
        claim = self._spare.claim(_bytes_by_device(arrays.values()))
        if claim is None:
            return {}
        try:
            copies = _copied(arrays)
        except jax.errors.JaxRuntimeError as error:
            # Another framework may have taken the memory.
            log.warning("arrays are read before save() returns: %s", str(error))
            return {}
        return {
            path: partial(while_claimed, claim, partial(itself, copy))
            for path, copy in copies.items()
        }


def _unused_bytes(device: jax.Device) -> int | None:
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
        copies |= zip(paths, leaves.enqueued_copies([arrays[path] for path in paths]), strict=True)
    return copies
