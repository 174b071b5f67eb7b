"""Hold the leaves on accelerators as they are at a save, until they are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import copied, copy_bytes
from deltacheck.backends.torch.capture.guard import Guarded
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.tree import Flat
from deltacheck.save.job.spare_memory import SpareMemory

log = logging.getLogger("deltacheck")

# Device shadows are chosen only if so much of the memory that they need is free, because training
# must not run out of memory.
_SPARE = 1.1


class HeldLeaf(NamedTuple):
    """A leaf on an accelerator.

    Attributes:
        device: The accelerator.
        content: Its bytes, uint8, 1-D.
        aliases: As ``Guarded.watched`` returns them. Empty: ``content`` is a copy.
        claim: The claim to the memory of the copies of this save, if there is one.
    """

    device: Accelerator
    content: torch.Tensor
    aliases: Sequence[torch.Tensor]
    claim: object


class DeviceLeaves:
    """The leaves on accelerators in the saves of one engine.

    Args:
        shadow: The option of the same name.
        most_bytes: The option ``device_cache_bytes``.
    """

    def __init__(self, shadow: str, most_bytes: int | None) -> None:
        self._shadow = shadow
        self._spare: SpareMemory[Accelerator] = SpareMemory(_unreserved_bytes, most_bytes)
        self._has_shadows: dict[Accelerator, bool] = {}

    def held(self, flat: Flat, guarded: Guarded) -> dict[str, HeldLeaf]:
        """Return the leaves on accelerators, by path, in the order of ``flat``.

        Unguarded leaves are copied at once, in stream order. If there is memory, all leaves are:
        the training then need not wait until they are read, and their content needs no check.

        Args:
            flat: The state.
            guarded: The tensors that may be read after ``save`` has returned.
        """
        devices: dict[str, Accelerator] = {}
        contents: dict[Accelerator, dict[str, torch.Tensor]] = {}
        for path, value in flat.arrays.items():
            if isinstance(value, torch.Tensor):
                device = codec.accelerator_of(value)
                if device is not None:
                    devices[path] = device
                    contents.setdefault(device, {})[path] = leaves.flat_bytes(value)
        for device, content in contents.items():
            # Decided once, because later the shadows themselves take up the memory.
            if device not in self._has_shadows:
                self._has_shadows[device] = self._decide(
                    device, sum(tensor.numel() for tensor in content.values())
                )
        claim = self._copied_as_a_whole(contents)
        aliases: dict[str, Sequence[torch.Tensor]] = dict.fromkeys(devices, ())
        if claim is None:
            aliases = {path: guarded.watched(flat.arrays[path]) for path in devices}
            for device, content in contents.items():
                _copy(device, content, [path for path in content if not aliases[path]])
        return {
            path: HeldLeaf(device, contents[device][path], aliases[path], claim)
            for path, device in devices.items()
        }

    def has_shadows(self, device: Accelerator) -> bool:
        """Return true if the shadows of a device's leaves lie in its own memory."""
        return self._has_shadows[device]

    def begin(self) -> None:
        """Order later reads after the work that the training has enqueued."""
        for device in self._has_shadows:
            device.begin()

    def hold(self) -> None:
        """Make later work of the training wait, on the devices, until the state was read."""
        for device in self._has_shadows:
            device.hold()

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

    def _decide(self, device: Accelerator, state_bytes: int) -> bool:
        # Without a device encoder every save would copy the shadow to the host.
        if self._shadow in ("host", "mapped", "none") or device.native is None:
            return False
        required = int(_SPARE * (state_bytes + windows.device_bytes(codec.WINDOW_BYTES)))
        if self._shadow == "device" or device.free_bytes() >= required:
            return True
        log.warning(
            "%s: shadows go to host memory, since %.1f GiB of device memory are free and %.1f GiB"
            " would be needed. Every save copies the whole state to the host;"
            " SaveOptions(shadow='device') takes the memory all the same",
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
