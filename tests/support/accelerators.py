"""Accelerators for tests: the processor under the emulator of the CUDA encoder, and a real device.

Both count what a capture asks of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from deltacheck.backends.torch.capture.device import Accelerator


class Emulated(Accelerator):
    """An accelerator whose memory is the host's, and which has done everything at once."""

    name = "emulated"

    def __init__(self, native: Any = None) -> None:
        from deltacheck import _native_emulated

        self.native = native or _native_emulated
        self._placed: list[torch.Tensor] = []
        self.free = self.unreserved = 1 << 40
        self.begun = self.held = self.trimmed = 0
        self.copied = 0  # bytes given out as pinned memory: what may have crossed

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self._placed.append(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        # AdamW counts its steps on the host, in tensors without a dimension.
        if tensor.device.type != "cpu":
            return False
        return tensor.dim() > 0 or any(
            tensor.data_ptr() == placed.data_ptr() for placed in self._placed
        )

    def begin(self) -> None:
        self.begun += 1

    def hold(self) -> None:
        self.held += 1

    def join(self) -> None:
        pass

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        yield 0

    def mark(self) -> Any:
        return self

    def mark_read(self, tensors: Any) -> Any:
        return self

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free

    def unreserved_bytes(self) -> int:
        return self.unreserved

    def empty(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xA5, dtype=torch.uint8)

    def pinned(self, size: int) -> torch.Tensor:
        self.copied += size
        return torch.full((size,), 0x5A, dtype=torch.uint8)

    def finish(self) -> None:
        pass

    def trim(self) -> None:
        self.trimmed += 1


class Real(Accelerator):
    """The first CUDA device, with the counters of the emulated one."""

    def __init__(self) -> None:
        from deltacheck import _native_cuda

        super().__init__(torch.device("cuda", 0), _native_cuda)
        self.free = self.unreserved = 1 << 40
        self.begun = self.held = self.trimmed = 0
        self.copied = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def begin(self) -> None:
        self.begun += 1
        super().begin()

    def hold(self) -> None:
        self.held += 1
        super().hold()

    def free_bytes(self) -> int:
        return min(self.free, super().free_bytes())

    def unreserved_bytes(self) -> int:
        return min(self.unreserved, super().unreserved_bytes())

    def pinned(self, size: int) -> torch.Tensor:
        self.copied += size
        return super().pinned(size)

    def trim(self) -> None:
        self.trimmed += 1
        super().trim()


Device: TypeAlias = Emulated | Real
