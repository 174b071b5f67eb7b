"""Access an accelerator: its memory, a side stream, events.

This is the only module that uses ``torch.cuda``. Everything is enqueued on one *side stream* for
each device. It waits for the work that the training has enqueued before ``begin``. The training
waits for it in ``hold``, on the device and never on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch


class StreamEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """An accelerator, as a capture uses it."""

    name: str
    # The device encoder, as deltacheck/_native_cuda.pyi describes it; None if there is none.
    native: Any

    def begin(self) -> None:
        """Order later work on the side stream after the training's work until now.

        Call it on the training thread.
        """
        ...

    def hold(self) -> None:
        """Order the training's work from now on after the reads of the side stream.

        Call it on the training thread.
        """
        ...

    def aside(self) -> contextlib.AbstractContextManager[int]:
        """Send the work of this thread to the side stream, and yield the stream's address."""
        ...

    def mark(self) -> StreamEvent:
        """Return an event after the work on the side stream so far."""
        ...

    def mark_read(self, tensors: Sequence[torch.Tensor]) -> StreamEvent:
        """Return the same after reads of tensors, for which ``hold`` waits.

        Their memory is not used again before, even if the training drops them.
        """
        ...

    def free_bytes(self) -> int:
        """Return the device memory that torch could still allocate."""
        ...

    def unreserved_bytes(self) -> int:
        """Return the device memory that nobody has reserved."""
        ...

    def empty(self, size: int) -> torch.Tensor:
        """Return device memory, uint8."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Return pinned host memory, uint8, so that copies run asynchronously."""
        ...

    def finish(self) -> None:
        """Wait until the device has done all work of all streams."""
        ...

    def trim(self) -> None:
        """Give memory that nothing uses back to the driver, for other programs and libraries."""
        ...


class Cuda:
    """A CUDA device of this process."""

    def __init__(self, device: torch.device, native: Any) -> None:
        self.name = str(device)
        self.native = native
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last_read: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def hold(self) -> None:
        # One event is enough: the work of a stream completes in its order.
        if self._last_read is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last_read)

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield self._side.cuda_stream

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def mark_read(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Event:
        for tensor in tensors:
            tensor.record_stream(self._side)
        self._last_read = event = self.mark()
        return event

    def free_bytes(self) -> int:
        # Blocks that torch's allocator has reserved but not handed out count as free.
        return (
            self.unreserved_bytes()
            + torch.cuda.memory_reserved(self._device)
            - torch.cuda.memory_allocated(self._device)
        )

    def unreserved_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        # torch caches pinned memory, so that repeated calls are cheap.
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def trim(self) -> None:
        torch.cuda.empty_cache()
