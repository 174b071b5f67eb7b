"""What the engine needs of an accelerator: its memory, a stream beside the training's, events. The
one
file that speaks ``torch.cuda``.

Everything is enqueued on one *side stream* a device. It waits for the work that the training has
enqueued before ``begin``, and the training waits for it (on the device, never on the host) in
``hold``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """One device."""

    name: str
    # The device encoder, as deltacheck/_native_cuda.pyi describes it; None where there is none
    native: Any

    def begin(self) -> None:
        """From the training thread: later work on the side stream comes after what the training has
        enqueued until now.
        """
        ...

    def hold(self) -> None:
        """From the training thread: what the training enqueues from now on comes after what the
        side stream has to read.
        """
        ...

    def aside(self) -> contextlib.AbstractContextManager[int]:
        """Work of this thread goes to the side stream, whose address is given."""
        ...

    def mark(self) -> Event:
        """The work enqueued on the side stream so far; ``hold`` waits for it, too."""
        ...

    def free_bytes(self) -> int:
        """Device memory that torch could still hand out."""
        ...

    def empty(self, size: int) -> torch.Tensor:
        """Device memory, uint8."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory, uint8, to and from which copies run by themselves."""
        ...


class Cuda:
    """A CUDA device of this process."""

    def __init__(self, device: torch.device, native: Any) -> None:
        self.name = str(device)
        self.native = native
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def hold(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            yield self._side.cuda_stream

    def mark(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        self._last = event
        return event

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return (
            free
            + torch.cuda.memory_reserved(self._device)
            - torch.cuda.memory_allocated(self._device)
        )

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(
            size, dtype=torch.uint8, pin_memory=True
        )  # torch keeps what is given back for the next
