"""Sample JAX arrays for the profiler, and read the steps of a plain ``CheckpointManager``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.orbax.state.leaves import describe, expand, is_key, own_rules
from deltacheck.errors import Damaged, StepNotFound
from deltacheck.profile.sample import SamplePlan

__all__ = ["describe", "expand", "states", "steps", "take"]


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


def steps(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the step and folder of each step of a plain ``CheckpointManager``, ascending."""
    # Step folders may have a prefix, such as ``checkpoint_30``.
    names = [
        (path.name.rpartition("_")[2], path) for path in Path(folder).iterdir() if path.is_dir()
    ]
    return sorted((int(name), path) for name, path in names if name.isdecimal())


def item_of(step: int, place: Path, item: str | None) -> str:
    """Return the item of a step: the named one, or the only one.

    Raises:
        StepNotFound: There is no such item, or there are several. The message names them.
    """
    items = sorted(
        # Orbax writes this file for items that are trees, and deltacheck for its own.
        path.name
        for path in place.iterdir()
        if path.is_dir() and (path / "_METADATA").exists() and not (path / "zarr.json").exists()
    )
    if item is None and len(items) != 1:
        raise StepNotFound(
            f"step {step} in {place.parent} has the items {items}; name one with --item"
        )
    if item is not None and item not in items:
        raise StepNotFound(
            f"step {step} in {place.parent} has no item {item!r} that is a tree; it has {items}"
        )
    return item or items[0]


def states(folder: str | os.PathLike[str], item: str | None = None) -> Iterator[tuple[int, object]]:
    """Yield the step and state of each step of a plain ``CheckpointManager``, as NumPy arrays.

    One state is in memory at a time.

    Args:
        folder: The folder of the manager.
        item: The item of each step, needed only if there are several.

    Raises:
        StepNotFound: There is no such item.
        Damaged: Orbax cannot read a step; the message names it.
    """
    import orbax.checkpoint as ocp

    for step, place in steps(folder):
        item_path = place / item_of(step, place, item)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                metadata = checkpointer.metadata(item_path).item_metadata.tree
                # NumPy arrays, because the shardings of the run may not exist on this machine.
                as_numpy = jax.tree.map(
                    lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata
                )
                state = checkpointer.restore(
                    item_path, args=ocp.args.PyTreeRestore(restore_args=as_numpy)
                )
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise Damaged(
                f"step {step} in {folder} cannot be read by Orbax: {type(error).__name__}: {reason}"
            ) from error
        yield step, state
