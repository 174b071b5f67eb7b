"""Find the leaves of a state that lie in one memory, so that they can be copied together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltacheck.backends.torch.capture import tensor_codec as codec
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import Layout, parts_of
from deltacheck.backends.torch.capture.guard import PLAIN
from deltacheck.backends.torch.state import leaves
from deltacheck.codec import host_memory
from deltacheck.codec.base import U8
from deltacheck.codec.extension import native
from deltacheck.codec.object_loops import read_numbers
from deltacheck.leaf.outline import chosen
from deltacheck.leaf.spec import LeafSpec


@dataclass(frozen=True, slots=True)
class Residents:
    """The leaves of a state in one memory: of an accelerator or of the host.

    States of a known structure have the same ones at every save.

    Attributes:
        paths: Their paths, in the order of the state.
        places: Their numbers among the leaves of the state.
        converted: Positions in ``paths`` of those whose memory is not their bytes in C order.
        large: Positions of those whose copies in host memory are apart, so that each of them is
            freed as soon as it was read.
        layout: The places of the other copies.
        size: The bytes of all of them.
    """

    paths: list[str]
    places: list[int]
    converted: list[int]
    large: list[int]
    layout: Layout
    size: int

    @classmethod
    def of(
        cls,
        values: Mapping[str, object],
        specs: Mapping[str, LeafSpec],
        places: list[int],
        device: Accelerator | None,
    ) -> Residents:
        """Return those of a state.

        Args:
            values: The leaves of the state by path.
            specs: Their specs by path.
            places: The numbers of the residents among them.
            device: The accelerator; ``None``: there is none.
        """
        paths, members = chosen(list(values), places), chosen(list(values.values()), places)
        converted = [
            position
            for position, value in enumerate(members)
            if type(value) not in PLAIN
            or not leaves.is_plain(value)
            # The memory of other kinds of devices cannot be read in its place.
            or (device is None and value.device.type != "cpu")
        ]
        sizes = [specs[path].raw_bytes for path in paths]
        large = [
            position
            for position, size in enumerate(sizes)
            if device is None and size >= host_memory.LEAST_MAPPED_BYTES
        ]
        apart = set(large)
        layout = Layout.of([0 if k in apart else size for k, size in enumerate(sizes)])
        return cls(paths, places, converted, large, layout, sum(sizes))

    def values_in(self, values: Mapping[str, object]) -> list[Any]:
        """Return the leaves as they are in a state, in a new list."""
        return chosen(list(values.values()), self.places)

    def memory_in(self, values: Mapping[str, object], convert: Callable[[Any], Any]) -> list[Any]:
        """Return objects whose memory is the bytes of the leaves as they are in a state.

        Args:
            values: The leaves of the state by path.
            convert: Return such an object for any leaf that is none.
        """
        memory = self.values_in(values)
        for position in self.converted:
            memory[position] = convert(memory[position])
        return memory

    def copied_on_host(self, values: Mapping[str, object]) -> Callable[[], list[U8]]:
        """Copy the leaves, which lie in host memory.

        Args:
            values: The leaves of the state by path.

        Returns:
            A function that returns the copies. The arrays are made in it, because that takes longer
            than the copies of small leaves.
        """
        sources = self.memory_in(values, leaves.bytes_of)
        addresses = np.empty(len(sources), np.uint64)
        # A method of torch's takes a fraction of the time of a function of ours.
        read_numbers(sources, _address_of if self.converted else torch.Tensor.data_ptr, addresses)
        layout = self.layout
        memory = host_memory.empty(layout.total)
        native.copy_leaves(addresses, layout.sizes, layout.offsets, memory)
        large = [host_memory.copied(leaves.bytes_of(sources[position])) for position in self.large]

        def copies() -> list[U8]:
            parts = parts_of(memory, layout)
            for position, copy in zip(self.large, large, strict=True):
                parts[position] = copy
            return parts

        return copies


@dataclass(frozen=True, slots=True)
class StateResidents:
    """The leaves of a state, by the memory that they lie in.

    Attributes:
        on_devices: Those on each accelerator.
        on_host: All others.
        total: The bytes of all leaves.
    """

    on_devices: Mapping[Accelerator, Residents]
    on_host: Residents
    total: int

    @classmethod
    def of(cls, values: Mapping[str, object], specs: Mapping[str, LeafSpec]) -> StateResidents:
        """Return those of a state.

        Args:
            values: The leaves by path.
            specs: Their specs by path.
        """
        on_devices: dict[Accelerator, list[int]] = {}
        on_host: list[int] = []
        for number, value in enumerate(values.values()):
            device = codec.accelerator_of(value) if isinstance(value, torch.Tensor) else None
            (on_host if device is None else on_devices.setdefault(device, [])).append(number)
        residents = {
            device: Residents.of(values, specs, places, device)
            for device, places in on_devices.items()
        }
        return cls(
            residents,
            Residents.of(values, specs, on_host, None),
            sum(spec.raw_bytes for spec in specs.values()),
        )


def _address_of(memory: Any) -> int:
    is_tensor = isinstance(memory, torch.Tensor)
    address: int = memory.data_ptr() if is_tensor else memory.ctypes.data
    return address
