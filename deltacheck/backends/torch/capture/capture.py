"""Plan the reads of a state's tensors for a save, and the places of their shadows."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows
from deltacheck.backends.torch.capture.batch import Placements, in_place, planned
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import copied, copy_bytes
from deltacheck.backends.torch.capture.guard import Guarded, unchanged_check
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import KnownFlat
from deltacheck.leaf import fingerprint
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.save.job.source import (
    MOST_COPIED_BYTES,
    LaterSources,
    content_check,
    itself,
)
from deltacheck.save.job.spare_memory import SpareMemory, while_claimed
from deltacheck.save.save_options import SaveOptions
from deltacheck.save.saver import LeafSource

log = logging.getLogger("deltacheck")


# Device shadows are chosen only if so much of the memory that they need is free, because training
# must not run out of memory.
_SPARE = 1.1


class _Held(NamedTuple):
    """A leaf on an accelerator, as it can be read later.

    Without ``aliases``, ``content`` is a copy. The ``claim`` is that of its memory.
    """

    device: Accelerator
    content: torch.Tensor  # uint8, 1-D
    aliases: Sequence[torch.Tensor]
    claim: object


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
        self._spare: SpareMemory[Accelerator] = SpareMemory(_unreserved_bytes)
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
        once, in stream order; all leaves are, if there is memory. The training then need not wait
        until they are read, and no check of their content is needed.

        Args:
            flat: The state.
            guarded: The tensors that may be read after ``save`` has returned.

        Returns:
            The source of each leaf, by path, in the order in which they must be read.
        """
        specs = specs_of(flat)
        on_devices = self._held(flat, specs, guarded)
        staged = {
            path: (held.device, held.content)
            for path, held in on_devices.items()
            if not self._on_device[held.device]
        }
        # Staging serves its leaves in one order only.
        staging = Staging(
            staged if self._in_order else {},
            self._options.cache_bytes(sum(spec.raw_bytes for spec in specs.values())),
        )
        # Other places at every save, so that a write that one save misses is met by another.
        seed = secrets.randbits(62)
        sources = self._on_host(
            {path: spec for path, spec in specs.items() if path not in on_devices},
            flat,
            guarded,
            seed,
            is_copied=bool(on_devices),
        )
        for path, held in on_devices.items():
            spec = specs[path]
            read: Callable[[], Any]
            if path not in staged:
                read = partial(itself, held.content)
            elif self._in_order:
                read = partial(staging.take, path)
            else:
                read = partial(_to_host, held.device, held.content)
            if held.aliases:
                alias, *more_aliases = held.aliases
                sources[path] = LeafSource(
                    spec,
                    read,
                    lazy=True,
                    recheck=unchanged_check(path, alias, more_aliases),
                    check_content=_content_check(path, alias, seed, held.device),
                )
            else:
                sources[path] = LeafSource(
                    spec, partial(while_claimed, held.claim, read), lazy=True, is_own=True
                )
        # After the samples of the checks, which are copied in the order of the training's work.
        for device in {held.device for held in on_devices.values()}:
            device.begin()
        return {path: sources[path] for path in specs}

    def _on_host(
        self,
        specs: Mapping[str, LeafSpec],
        flat: Flat,
        guarded: Guarded,
        seed: int,
        *,
        is_copied: bool,
    ) -> dict[str, LeafSource]:
        """Return the sources of the leaves in host memory.

        ``is_copied``: copy them if they are few, so that the training need not wait for them: a
        step counter of an optimizer lies on the host, and its moments on a device.
        """
        is_copied &= sum(spec.raw_bytes for spec in specs.values()) <= MOST_COPIED_BYTES
        sources = {}
        for path, spec in specs.items():
            value = flat.arrays[path]
            if is_copied:
                content = leaves.bytes_of(value).copy()
                sources[path] = LeafSource(spec, partial(itself, content), lazy=True, is_own=True)
            elif aliases := guarded.watched(value):
                sources[path] = in_place(spec, aliases, seed)
            else:
                sources[path] = LeafSource(spec, partial(leaves.bytes_of, value))
        return sources

    def _held(
        self, flat: Flat, specs: Mapping[str, LeafSpec], guarded: Guarded
    ) -> dict[str, _Held]:
        """Return the leaves on accelerators as they can be read later, by path."""
        by_device: dict[Accelerator, dict[str, torch.Tensor]] = {}
        for path in specs:
            value = flat.arrays[path]
            if isinstance(value, torch.Tensor):
                device = codec.accelerator_of(value)
                if device is not None:
                    by_device.setdefault(device, {})[path] = value
        contents = {
            device: {path: leaves.flat_bytes(value) for path, value in values.items()}
            for device, values in by_device.items()
        }
        for device, flat_values in contents.items():
            # Decided once, because later the shadows themselves take up the memory.
            if device not in self._on_device:
                self._on_device[device] = self._decide(
                    device, sum(content.numel() for content in flat_values.values())
                )
        claim = self._copied_as_a_whole(contents)
        result: dict[str, _Held] = {}
        for device, values in by_device.items():
            content = contents[device]
            aliases: dict[str, Sequence[torch.Tensor]] = dict.fromkeys(values, ())
            if claim is None:
                aliases = {path: guarded.watched(value) for path, value in values.items()}
                _copy(device, content, [path for path in values if not aliases[path]])
            for path in values:
                result[path] = _Held(device, content[path], aliases[path], claim)
        # In the order of the leaves, which is that of their reads.
        return {path: result[path] for path in specs if path in result}

    def _copied_as_a_whole(
        self, contents: Mapping[Accelerator, dict[str, torch.Tensor]]
    ) -> object | None:
        """Put copies in the place of all contents if there is memory.

        Args:
            contents: The bytes of the leaves of each device by path; updated.

        Returns:
            The claim to the memory of the copies; ``None``: there is not enough.
        """
        claim = self._spare.claim(
            {device: copy_bytes(content.values()) for device, content in contents.items()}
        )
        if claim is None:
            return None
        try:
            for device, content in contents.items():
                _copy(device, content, list(content))
        except torch.OutOfMemoryError as error:
            # Another process may have taken the memory.
            log.warning("training waits until this save has read the state: %s", str(error))
            return None
        return claim

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


def _copy(device: Accelerator, content: dict[str, torch.Tensor], paths: Sequence[str]) -> None:
    """Put copies in the place of some contents, in the order of the training's work."""
    if paths:
        device.begin()
        copies = copied(device, [content[path] for path in paths])
        content.update(zip(paths, copies, strict=True))
        # The training may write to these leaves as soon as ``save`` has returned.
        device.hold()


def _unreserved_bytes(device: Accelerator) -> int:
    return device.unreserved_bytes()


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


def _to_host(device: Accelerator, tensor: torch.Tensor) -> NDArray[np.uint8]:
    return Staging({"": (device, tensor)}, tensor.numel()).take("")
