"""Copies of tensors of an accelerator in pinned host memory, made ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from deltacheck.backends.torch.capture.device import Accelerator, Event
from deltacheck.codec.base import U8


class Staging:
    """Gives the bytes of tensors in the order of the mapping, and copies as far ahead as ``budget``
    bytes allow.

    ``tensors``: by name; uint8, 1-D, contiguous, each with its device. A larger budget: the devices
    are read earlier; smaller: less pinned memory. One tensor larger than it is copied all the same,
    alone.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[Accelerator, torch.Tensor]], budget: int
    ) -> None:
        self._waiting = deque(tensors.items())
        self._budget = budget
        self._ahead: deque[tuple[str, torch.Tensor, Event]] = deque()

    def take(self, name: str) -> U8:
        """The bytes of the next tensor, which must be this one. What the call before gave should be
        let go of by now.
        """
        self._copy_ahead()
        found, host, copied = self._ahead.popleft()
        if found != name:
            raise RuntimeError(
                f"{name!r} was asked for when it was the turn of {found!r}; this is a defect,"
                " please report it"
            )
        copied.synchronize()
        data: U8 = host.numpy()
        return data

    def _copy_ahead(self) -> None:
        size = sum(host.numel() for _, host, _ in self._ahead)
        while self._waiting and (
            not self._ahead or size + self._waiting[0][1][1].numel() <= self._budget
        ):
            name, (device, tensor) = self._waiting.popleft()
            host = device.pinned(tensor.numel())
            with device.aside():
                host.copy_(tensor, non_blocking=True)
                self._ahead.append((name, host, device.mark()))
            size += tensor.numel()
