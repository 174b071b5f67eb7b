"""How a state's tensors are read for a save: when, from where, and where their shadows lie."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows as group
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.guard import Guarded, unchanged_check
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.tree import Flat
from deltacheck.save.saver import LeafSource

log = logging.getLogger("deltacheck")

Data = TypeVar("Data", torch.Tensor, NDArray[np.uint8])

# Of the memory that device shadows and windows need, before they are chosen: training must not run
# out of it
_SPARE = 1.1


class Capture:
    """Plans the reading of every leaf. ``shadow``, ``host_cache_bytes``: as ``Engine`` has them.
    ``in_order``: whether every leaf is read once, in the order of the sources; only then can leaves
    be copied from a device ahead of their turn.
    """

    def __init__(self, shadow: str, host_cache_bytes: int, in_order: bool) -> None:
        self._in_order = in_order
        self._shadow = shadow
        self._host_cache_bytes = host_cache_bytes
        self._on_device: dict[Accelerator, bool] = {}  # whether its shadows lie there, decided once

    def sources(self, flat: Flat, guarded: Guarded) -> dict[str, LeafSource]:
        """What to save. ``guarded``: what is read after ``save`` has returned.

        Leaves on an accelerator are read on its side stream. What nobody guards is copied there at
        once, in stream order.
        """
        specs = specs_of(flat)
        there = {
            path: device
            for path, value in flat.arrays.items()
            if isinstance(value, torch.Tensor)
            and (device := codec.accelerator_of(value)) is not None
        }
        for device in set(there.values()):
            if device not in self._on_device:
                self._on_device[device] = self._decide(
                    device, sum(specs[p].raw_bytes for p, d in there.items() if d is device)
                )
        watched = {path: guarded.watched(flat.arrays[path]) for path in specs}
        tensors = {path: _held(flat.arrays[path], bool(watched[path])) for path in there}
        staged = {
            path: (there[path], tensors[path])
            for path in specs
            if path in there and not self._on_device[there[path]]
        }
        staged = staged if self._in_order else {}
        staging = Staging(staged, self._host_cache_bytes)
        sources = {}
        for path, spec in specs.items():
            value = flat.arrays[path]
            alias, *others = watched[path] or (None,)
            check = None if alias is None else unchanged_check(path, alias, others)
            if path not in there:
                # What is read later is viewed now: torch then refuses to free or to move this
                # memory, whatever becomes of the tensor.
                current = (
                    partial(leaves.bytes_of, value)
                    if alias is None
                    else partial(_itself, leaves.viewed(alias).numpy())
                )
                sources[path] = LeafSource(spec, current, lazy=alias is not None, recheck=check)
            elif self._on_device[there[path]]:
                sources[path] = LeafSource(
                    spec, partial(_itself, tensors[path]), lazy=True, recheck=check
                )
            elif self._in_order:
                sources[path] = LeafSource(
                    spec, partial(staging.take, path), lazy=True, recheck=check
                )
            else:
                sources[path] = LeafSource(
                    spec, partial(_copied, there[path], tensors[path]), lazy=True, recheck=check
                )
        for device in set(there.values()):
            device.begin()
        return sources

    def hold(self) -> None:
        """What the training enqueues from now on waits, on the devices, until they have read what
        was saved.
        """
        for device in self._on_device:
            device.hold()

    def _decide(self, device: Accelerator, state_bytes: int) -> bool:
        if self._shadow in ("host", "none") or device.native is None:
            return False
        wanted = int(_SPARE * (state_bytes + group.device_bytes(codec.WINDOW_BYTES)))
        if self._shadow == "device" or device.free_bytes() >= wanted:
            return True
        log.warning(
            "%s: shadows go to host memory, since %.1f GiB of device memory are free and %.1f GiB would be needed. "
            "Every save copies the whole state to the host; Engine(shadow='device') takes the memory all the same",
            device.name, device.free_bytes() / 2**30, wanted / 2**30,
        )  # fmt: skip
        return False


def _held(value: object, guarded: bool) -> torch.Tensor:
    """A device leaf as it is now: itself where it is guarded, else a copy."""
    assert isinstance(value, torch.Tensor)
    flat = leaves.flat_bytes(value)
    if guarded or flat.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return flat
    return flat.clone()


def _copied(device: Accelerator, tensor: torch.Tensor) -> NDArray[np.uint8]:
    return Staging({"": (device, tensor)}, tensor.numel()).take("")


def _itself(data: Data) -> Data:
    return data
