"""Hold the leaves on accelerators as they are at a save, until they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture import windows
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import Layout, copied_in_order, parts_of
from deltacheck.backends.torch.capture.guard import Guarded
from deltacheck.backends.torch.capture.residents import Residents, StateResidents
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


class HeldLeaves(NamedTuple):
    """The leaves on accelerators in one save.

    Attributes:
        make: Return them by path. The tensors of copies are made in it.
        is_own: True if all of them are copies.
    """

    make: Callable[[], dict[str, HeldLeaf]]
    is_own: bool


class DeviceLeaves:
    """The leaves on accelerators in the saves of one engine.

    Args:
        shadow: The option of the same name.
        most_bytes: The option ``device_cache_bytes``.
    """

    def __init__(self, shadow: str, most_bytes: int | None) -> None:
        self._shadow = shadow
        self._spare: SpareMemory[Accelerator] = SpareMemory(
            lambda device: device.unreserved_bytes(), most_bytes
        )
        self._has_shadows: dict[Accelerator, bool] = {}

    def held(
        self, flat: Flat, residents: StateResidents, guarded: Callable[[], Guarded]
    ) -> HeldLeaves:
        """Return the leaves on accelerators.

        Unguarded leaves are copied at once, in stream order. If there is memory, all leaves are:
        the training then need not wait until they are read, and their content needs no check.

        Args:
            flat: The state.
            residents: Its leaves, by the memory that they lie in.
            guarded: Return the tensors that may be read after ``save`` has returned.
        """
        for device, group in residents.on_devices.items():
            # Decided once, because later the shadows themselves take up the memory.
            if device not in self._has_shadows:
                self._has_shadows[device] = self._decide(device, group.size)
        copies = self._copied_as_a_whole(flat, residents)
        if copies is not None:
            return copies
        held: dict[str, HeldLeaf] = {}
        for device, group in residents.on_devices.items():
            values = dict(zip(group.paths, group.values_in(flat.arrays), strict=True))
            contents = {path: leaves.flat_bytes(value) for path, value in values.items()}
            aliases = {path: guarded().watched(value) for path, value in values.items()}
            if unguarded := [path for path in values if not aliases[path]]:
                sources = [contents[path] for path in unguarded]
                layout = Layout.of([source.numel() for source in sources])
                copies_of = parts_of(copied_in_order(device, sources, layout), layout)
                contents |= zip(unguarded, copies_of, strict=True)
            held |= {path: HeldLeaf(device, contents[path], aliases[path], None) for path in values}
        return HeldLeaves(lambda: held, not any(leaf.aliases for leaf in held.values()))

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

    def _copied_as_a_whole(self, flat: Flat, residents: StateResidents) -> HeldLeaves | None:
        """Return copies of all leaves; ``None`` if there is not enough memory."""
        groups = residents.on_devices
        claim = self._spare.claim({device: group.layout.total for device, group in groups.items()})
        if claim is None:
            return None
        memory = {}
        try:
            for device, group in groups.items():
                sources = group.memory_in(flat.arrays, leaves.flat_bytes)
                memory[device] = copied_in_order(device, sources, group.layout)
        except torch.OutOfMemoryError as error:
            # Another process may have taken the memory.
            log.warning("training waits until this save has read the state: %s", str(error))
            return None
        return HeldLeaves(partial(_of_copies, groups, memory, claim), is_own=True)

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


def _of_copies(
    groups: Mapping[Accelerator, Residents],
    memory: Mapping[Accelerator, torch.Tensor],
    claim: object,
) -> dict[str, HeldLeaf]:
    """Return leaves of whose copies the memory of each accelerator consists."""
    return {
        path: HeldLeaf(device, content, (), claim)
        for device, group in groups.items()
        for path, content in zip(group.paths, parts_of(memory[device], group.layout), strict=True)
    }
