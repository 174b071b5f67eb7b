"""The shardings of arrays in manifests: records of named shardings, and shardings from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from deltacheck.errors import TreeMismatch
from deltacheck.leaf import tree
from deltacheck.store.manifest import Manifest, SavedSharding

log = logging.getLogger("deltacheck")


def records_of(arrays: Mapping[str, object]) -> tuple[SavedSharding, ...]:
    """Return records of the named shardings of arrays, each with the paths that have it.

    Other arrays lie on one device, which says nothing about the next run.
    """
    paths: dict[NamedSharding, list[str]] = {}
    for path, array in arrays.items():
        if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding):
            paths.setdefault(array.sharding, []).append(path)
    return tuple(_record(sharding, sorted(names)) for sharding, names in paths.items())


def _record(sharding: NamedSharding, paths: list[str]) -> SavedSharding:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)  # that of an array with content has devices
    kind = sharding.memory_kind
    return SavedSharding(
        axes=tuple(mesh.axis_names),
        shape=tuple(mesh.shape.values()),
        types=tuple(axis_type.name for axis_type in mesh.axis_types),
        devices=tuple(device.id for device in mesh.devices.flat),
        spec=tuple(sharding.spec),
        # The default has another name on each platform.
        memory="" if kind in (None, _default_memory(mesh)) else kind,
        leaves=tuple(paths),
    )


def _default_memory(mesh: Mesh) -> str:
    return str(mesh.devices.flat[0].default_memory().kind)


def sharding_of(record: SavedSharding) -> NamedSharding | None:
    """Return the sharding of a record; ``None`` if the devices of this run do not permit it."""
    present = {device.id: device for device in jax.devices()}
    if present.keys() >= set(record.devices):
        devices = [present[number] for number in record.devices]
    elif len(present) == len(record.devices):
        devices = jax.devices()
    else:
        return None
    mesh = Mesh(
        np.array(devices).reshape(record.shape),
        record.axes,
        axis_types=tuple(AxisType[name] for name in record.types),
    )
    if record.memory and record.memory not in {
        memory.kind for memory in devices[0].addressable_memories()
    }:
        return None
    spec = PartitionSpec(*record.spec)  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec, memory_kind=record.memory or _default_memory(mesh))


def saved_shardings(manifest: Manifest, paths: Iterable[str]) -> dict[str, Sharding]:
    """Return the saved shardings of leaves, and log the leaves that the devices do not permit.

    Args:
        manifest: The step.
        paths: The leaves for which the caller has given no sharding.
    """
    requested = set(paths)
    shardings: dict[str, Sharding] = {}
    owned: dict[str, list[str]] = {}  # tied arrays are saved once
    if manifest.shardings:
        for path, owner in tree.array_paths(manifest.tree).items():
            owned.setdefault(owner, []).append(path)
    for record in manifest.shardings:
        names = requested.intersection(path for leaf in record.leaves for path in owned[leaf])
        sharding = sharding_of(record) if names else None
        if sharding is not None:
            shardings |= dict.fromkeys(names, sharding)
        elif names:
            log.warning(
                "%d arrays of step %d, such as %r, were saved on a mesh of %d devices (%s%s), which"
                " this run of %d devices does not have: they come back whole, on the default"
                " device. Pass shardings=..., or a target whose arrays have a sharding",
                len(names),
                manifest.step,
                min(names),
                math.prod(record.shape),
                ", ".join(f"{a}={n}" for a, n in zip(record.axes, record.shape, strict=True)),
                f", memory {record.memory}" if record.memory else "",
                jax.device_count(),
            )
    return shardings


def concrete(sharding: Any, path: str) -> Sharding | None:
    """Return the sharding that a caller gives to a leaf, on the devices of the current mesh.

    JAX ends the process if it is asked for the devices of a mesh that has none. In Orbax's v1
    interface, that is what an ``AbstractMesh`` becomes if no mesh is set.

    Args:
        sharding: The sharding; one of an ``AbstractMesh`` is of the mesh of ``jax.set_mesh``.
        path: The path of the leaf, for error messages.

    Raises:
        TreeMismatch: No mesh is set, or another one.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding  # type: ignore[no-any-return]
    requested = sharding.mesh
    if not isinstance(requested, AbstractMesh) and not requested.empty:
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.abstract_mesh.shape != requested.shape:
        raise TreeMismatch(
            f"leaf {path!r} is to get a sharding of {requested}, which has no devices, and the mesh"
            f" that is set is {mesh}. Restore in `with jax.set_mesh(mesh)`, or give shardings of"
            " a mesh with devices"
        )
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
