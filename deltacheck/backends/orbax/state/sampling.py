"""Sample JAX arrays for the profiler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.orbax.state.leaves import describe, expand, is_key, own_rules
from deltacheck.profile.sample import SamplePlan

__all__ = ["describe", "expand", "take"]


def take(arrays: Mapping[str, Any], plan: SamplePlan) -> dict[str, NDArray[np.generic]]:
    """Return sampled elements of arrays, shard by shard.

    Shards on the host are read in place. For each other device there is one gather.
    """
    samples: dict[str, NDArray[np.generic]] = {}
    remote: dict[Any, dict[str, tuple[Any, tuple[NDArray[np.int64], ...]]]] = {}
    holes: dict[str, list[NDArray[np.bool_]]] = {}
    with own_rules():
        for path, array in arrays.items():
            data = (
                jax.random.key_data(array)
                if isinstance(array, jax.Array) and is_key(array.dtype)
                else array
            )
            elements = plan.elements(path)
            indices = np.unravel_index(elements, data.shape) if data.shape else ()
            samples[path] = np.empty(elements.shape, data.dtype)
            for shard in data.addressable_shards if isinstance(data, jax.Array) else ():
                # Replicas hold the same elements.
                if shard.replica_id != 0:
                    continue
                lows = [
                    part.indices(size)[0]
                    for part, size in zip(shard.index, data.shape, strict=True)
                ]
                local = tuple(index - low for index, low in zip(indices, lows, strict=True))
                # Positions are relative to the shard here. Those outside of it belong to other
                # shards.
                in_shard = np.ones(elements.shape, np.bool_)
                for index, size in zip(local, shard.data.shape, strict=True):
                    in_shard &= (index >= 0) & (index < size)
                local = tuple(index[in_shard] for index in local)
                if _on_host(shard):
                    samples[path][in_shard] = np.asarray(shard.data)[local]
                elif in_shard.any():
                    # The number comes first, because a path may have a colon, too.
                    name = f"{len(holes.setdefault(path, []))}:{path}"
                    holes[path].append(in_shard)
                    remote.setdefault(shard.device, {})[name] = (shard.data, local)
            if not isinstance(data, jax.Array):
                samples[path][...] = np.asarray(data)[indices]
        # One transfer for each device: many small ones would each wait for the device.
        for requests in remote.values():
            for name, values in jax.device_get(_gather()(requests)).items():
                number, _, path = name.partition(":")
                samples[path][holes[path][int(number)]] = np.asarray(values).reshape(-1)
    return samples


def _on_host(shard: Any) -> bool:
    return bool(shard.device.platform == "cpu")


@cache
def _gather() -> Any:
    """Return the jitted gather, which is compiled once for each layout of a device's shards."""
    return jax.jit(lambda requests: {name: data[local] for name, (data, local) in requests.items()})
