"""Copy arrays on accelerators, on their devices.

Then ``save`` need not wait until the arrays are computed and encoded, and they may be donated.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import NamedTuple, cast

import jax
from jax.sharding import Sharding

from deltacheck.backends.orbax.state import leaves
from deltacheck.leaf.spec import LeafSpec
from deltacheck.save.job.source import itself
from deltacheck.save.job.spare_memory import SpareMemory, while_claimed

log = logging.getLogger("deltacheck")


class _Plan(NamedTuple):
    """The copies of one state: the arrays of each sharding by path, and their bytes by device."""

    groups: list[list[str]]
    sizes: Counter[jax.Device]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> _Plan:
        groups: dict[Sharding, list[str]] = {}
        sizes: Counter[jax.Device] = Counter()
        for path, value in values.items():
            if leaves.is_on_accelerators(value):
                groups.setdefault(value.sharding, []).append(path)
                shard = value.sharding.shard_shape(value.shape)
                for device in value.sharding.addressable_devices:
                    sizes[device] += prod(shard) * value.dtype.itemsize
        return cls(list(groups.values()), sizes)


class DeviceCopies:
    """Makes the copies of the saves of one item while device memory is free.

    It copies all arrays or none: a save that reads one array before it returns waits for all the
    work that the device has.
    """

    def __init__(self) -> None:
        self._spare: SpareMemory[jax.Device] = SpareMemory(_unused_bytes)
        self._last: tuple[object, _Plan] | None = None

    def of(
        self, values: Mapping[str, object], specs: Mapping[str, LeafSpec] | None = None
    ) -> dict[str, Callable[[], jax.Array]]:
        """Enqueue copies of arrays, behind their computation and without a wait.

        Args:
            values: Leaves by path. Those in the memory of accelerators are copied.
            specs: Their specs. States of known forms have the same ones at each save: this very
                mapping. ``None``: the forms are not known.

        Returns:
            Functions by path that return the copies, for ``LeafSource.current``. None if there is
            not enough memory.
        """
        if specs is None or self._last is None or self._last[0] is not specs:
            self._last = specs, _Plan.of(values)
        plan = self._last[1]
        claim = self._spare.claim(plan.sizes)
        if claim is None:
            return {}
        copies: dict[str, jax.Array] = {}
        try:
            for paths in plan.groups:  # one call for all arrays with one sharding
                arrays = [cast("jax.Array", values[path]) for path in paths]
                copies |= zip(paths, leaves.enqueued_copies(arrays), strict=True)
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
