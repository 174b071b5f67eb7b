"""Hash, group, sample and compare leaves in the memory of their accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_copies import Layout, copied, parts_of
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.backends.torch.capture.windows import chunk_table
from deltacheck.codec import adam_law, derivation
from deltacheck.codec.adam_law import Places
from deltacheck.codec.base import U8, U64
from deltacheck.leaf.spec import LeafSpec

# Elements that are compared at a time. Larger: fewer launches; smaller: less device memory.
_COMPARED = 4 << 20
_SIGN, _INFINITE, _NAN = -(1 << 31), 0x7F800000, 0x7FC00000


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of an accelerator, as ``LeafMemory`` describes it.

    A call that returns anything in host memory waits for the side stream, so the device has then
    read the content.
    """

    device: Accelerator

    def host(self, content: torch.Tensor) -> U8:
        return Staging({"": (self.device, content)}, content.numel()).take("")

    def held(self, content: torch.Tensor, *, is_own: bool) -> torch.Tensor:
        if is_own:
            return content
        layout = Layout.of([content.numel()])
        return parts_of(copied(self.device, [content], layout), layout)[0]

    def digests(self, content: torch.Tensor, spec: LeafSpec) -> U64:
        table = chunk_table(content.data_ptr(), spec.bounds(), spec.word_bytes)
        host_table = self.device.pinned(table.nbytes)
        host_table.numpy()[:] = table.view(np.uint8)
        with self.device.aside() as stream:
            device_table = self.device.empty(table.nbytes)
            device_table.copy_(host_table, non_blocking=True)
            digests = self.device.empty(table.size * 16)
            self.device.native.digest(
                table=device_table.data_ptr(),
                chunks=table.size,
                digests=digests.data_ptr(),
                stream=stream,
            )
        return self._fetched(digests).view(np.uint64).reshape(-1, 2)

    def picked(self, content: torch.Tensor, element: np.dtype[Any], places: Places) -> NDArray[Any]:
        with self.device.aside():
            numbers = torch.from_numpy(places.reshape(-1)).to(content.device)
            sample = content.view(-1, element.itemsize)[numbers].reshape(-1)
        values: NDArray[Any] = self._fetched(sample).view(element).reshape(places.shape)
        return values

    def grouped(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        values = [part.view(torch.float32) for part in parts]
        shape = adam_law.group_shape(values[0].numel())
        with self.device.aside():
            content = self.device.empty(math.prod(shape) * 4).zero_()
            adam_law.grouped(values, content.view(torch.float32).view(shape))
        return content

    def is_cast(self, narrow: torch.Tensor, wide: torch.Tensor, element: np.dtype[Any]) -> bool:
        if element.name != "bfloat16":
            # NumPy keeps the payload of a NaN.
            restored = derivation.cast(self.host(wide).view(np.float32), element)
            return np.array_equal(restored.view(np.uint8), self.host(narrow))
        with self.device.aside():
            pairs = zip(
                torch.split(narrow.view(torch.int16), _COMPARED),
                torch.split(wide.view(torch.int32), _COMPARED),
                strict=True,
            )
            are_equal = [(words == _bfloat16(masters)).all() for words, masters in pairs]
            is_equal = torch.stack(are_equal).all().view(torch.uint8).reshape(1)
        return bool(self._fetched(is_equal)[0])

    def _fetched(self, result: torch.Tensor) -> U8:
        """Return bytes that the side stream computes, when it has done so."""
        host = self.device.pinned(result.numel())
        with self.device.aside():
            host.copy_(result, non_blocking=True)
            computed = self.device.mark()
        computed.synchronize()
        data: U8 = host.numpy()
        return data


def _bfloat16(words: torch.Tensor) -> torch.Tensor:
    """Return float32 words, rounded to bfloat16, to nearest, ties to even, as int16.

    Computed with integers, because casts of torch give each NaN other bits on each device.
    """
    rounded = words + 0x7FFF + (words >> 16 & 1)
    is_nan = (words & ~_SIGN) > _INFINITE
    return (torch.where(is_nan, words & _SIGN | _NAN, rounded) >> 16).to(torch.int16)
