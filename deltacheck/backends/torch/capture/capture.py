"""Plan the reads of a state's tensors for a save, and the places of their shadows."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows
from deltacheck.backends.torch.capture.batch import Placements, in_place, planned
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.guard import Guarded, unchanged_check
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import KnownFlat
from deltacheck.leaf import fingerprint
from deltacheck.leaf.tree import Flat
from deltacheck.save.job.source import LaterSources, content_check, itself
from deltacheck.save.save_options import SaveOptions
from deltacheck.save.saver import LeafSource

log = logging.getLogger("deltacheck")


# Device shadows are chosen only if so much of the memory that they need is free, because training
# must not run out of memory.
_SPARE = 1.1


class Capture:
    """Plans the reading of every leaf.

    Args:
        options: The options of the saves.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._options = options
        # An exact policy reads every leaf once, in the order of the sources. Only then can leaves
        # be copied from a device ahead of their turn.
        self._in_order = options.policy.is_exact
        self._placements = Placements()
        self._on_device: dict[Accelerator, bool] = {}  # its shadows lie on it; decided once

    def later(self, flat: Flat, guarded: Guarded) -> LaterSources | None:
        """Plan the reads of a state behind the training loop, with little work for each leaf.

        Args:
            flat: The state.
            guarded: The tensors that may be read after ``save`` has returned.

        Returns:
            The sources of the leaves by path, ascending; ``None``: ``sources`` must make them.
        """
        return planned(flat, guarded, self._placements) if isinstance(flat, KnownFlat) else None

    def sources(self, flat: Flat, guarded: Guarded) -> dict[str, LeafSource]:
        """Return the sources of the leaves of a state.

        Leaves on an accelerator are read on its side stream. Unguarded leaves are copied there at
        once, in stream order.

        Args:
            flat: The state.
            guarded: The tensors that may be read after ``save`` has returned.

        Returns:
            The source of each leaf, by path, in the order in which they must be read.
        """
        specs = specs_of(flat)
        devices = {
            path: device
            for path, value in flat.arrays.items()
            if isinstance(value, torch.Tensor)
            and (device := codec.accelerator_of(value)) is not None
        }
        for device in set(devices.values()):
            # Decided once, because later the shadows themselves take up the memory.
            if device not in self._on_device:
                self._on_device[device] = self._decide(
                    device, sum(specs[p].raw_bytes for p, d in devices.items() if d is device)
                )
        aliases = {path: guarded.watched(flat.arrays[path]) for path in specs}
        tensors = {path: _held(flat.arrays[path], bool(aliases[path])) for path in devices}
        staged = {
            path: (devices[path], tensors[path])
            for path in specs
            if path in devices and not self._on_device[devices[path]]
        }
        # Staging serves its leaves in one order only.
        staged = staged if self._in_order else {}
        staging = Staging(
            staged, self._options.cache_bytes(sum(specs[path].raw_bytes for path in specs))
        )
        sources = {}
        # Other places at every save, so that a write that one save misses is met by another.
        seed = secrets.randbits(62)
        for path, spec in specs.items():
            value = flat.arrays[path]
            device = devices.get(path)
            if device is None:
                sources[path] = (
                    LeafSource(spec, partial(leaves.bytes_of, value))
                    if aliases[path] == []
                    else in_place(spec, aliases[path], seed)
                )
                continue
            alias, *more_aliases = aliases[path] or (None,)
            check = content = None
            if alias is not None:
                check = unchanged_check(path, alias, more_aliases)
                content = _content_check(path, alias, seed, device)
            if self._on_device[device]:
                sources[path] = LeafSource(
                    spec, partial(itself, tensors[path]), True, check, check_content=content
                )
            elif self._in_order:
                sources[path] = LeafSource(
                    spec, partial(staging.take, path), True, check, check_content=content
                )
            else:
                sources[path] = LeafSource(
                    spec,
                    partial(_copied, device, tensors[path]),
                    True,
                    check,
                    check_content=content,
                )
        # After the copies of ``_held``: they run on the training's stream, which the side stream
        # follows.
        for device in set(devices.values()):
            device.begin()
        return sources

    def hold(self) -> None:
        """Make later work of the training wait, on the devices, until the state was read."""
        for device in self._on_device:
            device.hold()

    def _decide(self, device: Accelerator, state_bytes: int) -> bool:
        """Return ``True`` if the shadows of a device lie in its own memory."""
        # Without a device encoder every save would copy the shadow to the host.
        if self._options.shadow in ("host", "mapped", "none") or device.native is None:
            return False
        required = int(_SPARE * (state_bytes + windows.device_bytes(codec.WINDOW_BYTES)))
        if self._options.shadow == "device" or device.free_bytes() >= required:
            return True
        log.warning(
            "%s: shadows go to host memory, since %.1f GiB of device memory are free and %.1f GiB"
            " would be needed. Every save copies the whole state to the host;"
            " Engine(shadow='device') takes the memory all the same",
            device.name,
            device.free_bytes() / 2**30,
            required / 2**30,
        )
        return False


def _held(value: object, guarded: bool) -> torch.Tensor:
    """Return a device leaf as it is now: itself if it is guarded, else a copy."""
    assert isinstance(value, torch.Tensor)
    flat = leaves.flat_bytes(value)
    if guarded or flat.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        # ``flat_bytes`` has made a copy already if the tensor is not plain.
        return flat
    return flat.clone()


def _content_check(
    path: str, alias: torch.Tensor, seed: int, device: Accelerator
) -> Callable[[Any], None]:
    """Return a check that what was read of a leaf on a device is its content of now."""
    # The sample is copied in the order of the training's stream, without a wait.
    content = fingerprint.sampled(leaves.viewed(alias), seed).clone()
    return content_check(path, content, seed, partial(_on_host, device))


def _on_host(device: Accelerator, sample: Any) -> NDArray[np.uint8]:
    if isinstance(sample, np.ndarray):
        return sample
    # On the side stream, which follows both the copy of the sample and the encoding.
    with device.aside():
        host: NDArray[np.uint8] = sample.cpu().numpy()
    return host


def _copied(device: Accelerator, tensor: torch.Tensor) -> NDArray[np.uint8]:
    return Staging({"": (device, tensor)}, tensor.numel()).take("")
