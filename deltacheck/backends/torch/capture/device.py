"""Access an accelerator: its memory, a side stream, events.

This is the only module that uses ``torch.cuda``. Everything is enqueued on one *side stream* for
each device. It waits for the work that the training has enqueued before ``begin``. The training
waits for it in ``hold``, on the device and never on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Accelerator:
    """A CUDA device of this process.

    Args:
        device: The device.
        native: The device encoder, as ``deltacheck/_native_cuda.pyi`` describes it; ``None``: there
            is none.
    """

    def __init__(self, device: torch.device, native: Any) -> None:
        self.name = str(device)
        self.native = native
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_read: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Order later work on the side stream after the training's work until now.

        Call it on the training thread.
        """
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def hold(self) -> None:
        """Order the training's work from now on after the reads of the side stream.

        Call it on the training thread.
        """
        # One event is enough: the work of a stream completes in its order.
        if self._last_read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_read)

    def join(self) -> None:
        """Order the training's work from now on after all work of the side stream until now.

        Call it on the training thread.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        """Send the work of this thread to the side stream, and yield the stream's address."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield self._side.cuda_stream

    def mark(self) -> torch.cuda.Event:
        """Return an event after the work on the side stream so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def mark_read(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Return the same after reads of tensors, for which ``hold`` waits.

        Their memory is not used again before, even if the training drops them.
        """
        for tensor in tensors:
            tensor.record_stream(self._side)
        self._last_read = event = self.mark()
        return event

    def free_bytes(self) -> int:
        """Return the device memory that torch could still allocate."""
        # Blocks that torch's allocator has reserved but not handed out count as free.
        return (
            self.unreserved_bytes()
            + torch.cuda.memory_reserved(self._device)
            - torch.cuda.memory_allocated(self._device)
        )

    def unreserved_bytes(self) -> int:
        """Return the device memory that nobody has reserved."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def empty(self, size: int) -> torch.Tensor:
        """Return device memory, uint8."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned host memory, uint8, so that copies run asynchronously."""
        # torch caches pinned memory, so that repeated calls are cheap.
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def finish(self) -> None:
        """Wait until the device has done all work of all streams."""
        torch.cuda.synchronize(self._device)

    def trim(self) -> None:
        """Give memory that nothing uses back to the driver, for other programs and libraries."""
        torch.cuda.empty_cache()
