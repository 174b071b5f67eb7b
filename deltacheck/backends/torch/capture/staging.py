"""Copy tensors of an accelerator to pinned host memory ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.codec.base import U8


class Staging:
    """Returns the bytes of tensors in order, and copies further tensors ahead.

    Args:
        tensors: Name -> device and tensor, uint8, 1-D, contiguous, in the order of their use.
        budget: The bytes that may be copied ahead. Larger: the devices are read earlier; smaller:
            less pinned memory. A tensor that is larger than the budget is copied alone.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[Accelerator, torch.Tensor]], budget: int
    ) -> None:
        self._waiting = deque(tensors.items())
        self._budget = budget
        self._ahead: deque[tuple[str, torch.Tensor, torch.cuda.Event]] = deque()

    def take(self, name: str) -> U8:
        """Return the bytes of the next tensor, which must be ``name``.

        The caller should have dropped the bytes of the call before.
        """
        self._copy_ahead()
        next_name, host, copied = self._ahead.popleft()
        if next_name != name:
            raise RuntimeError(
                f"{name!r} was asked for when it was the turn of {next_name!r}; this is a defect,"
                " please report it"
            )
        # Waits for this copy only; the copies behind it go on.
        copied.synchronize()
        data: U8 = host.numpy()
        return data

    def _copy_ahead(self) -> None:
        size = sum(host.numel() for _, host, _ in self._ahead)
        while self._waiting and (
            # A tensor that is larger than the budget is copied when nothing else is ahead.
            not self._ahead or size + self._waiting[0][1][1].numel() <= self._budget
        ):
            name, (device, tensor) = self._waiting.popleft()
            host = device.pinned(tensor.numel())
            with device.aside():
                host.copy_(tensor, non_blocking=True)
                self._ahead.append((name, host, device.mark_read([tensor])))
            size += tensor.numel()
