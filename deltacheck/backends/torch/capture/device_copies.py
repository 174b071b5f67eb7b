"""Copy tensors on an accelerator within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.state import leaves
from deltacheck.codec.base import U8, U64
from deltacheck.codec.object_loops import read_numbers

Memory = TypeVar("Memory", torch.Tensor, U8)

# Alignment in bytes, the same as that of CUDA's allocations.
ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of copies in one piece of memory.

    Attributes:
        sizes: Their sizes in bytes, uint64.
        offsets: Their offsets in bytes, uint64.
        total: The bytes of the memory.
    """

    sizes: U64
    offsets: U64
    total: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Return the layout of copies of so many bytes each."""
        exact = np.array(sizes, np.uint64)
        padded = -(-exact.astype(np.int64) // ALIGNED) * ALIGNED
        offsets = (np.cumsum(padded) - padded).astype(np.uint64)
        return cls(exact, offsets, int(padded.sum()))


def copied(device: Accelerator, sources: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Enqueue copies of tensors on the side stream; ``hold`` waits until they are made.

    Args:
        device: The accelerator.
        sources: Tensors on it whose memory is their bytes in C order.
        layout: The places of the copies.

    Returns:
        Memory that belongs to the side stream, uint8, with the copies.
    """
    memory = _enqueued(device, sources, layout)
    device.mark_read(sources)
    return memory


def copied_in_order(
    device: Accelerator, sources: Sequence[torch.Tensor], layout: Layout
) -> torch.Tensor:
    """Return the same copies, made in the order of the training's work.

    Call it on the training thread.
    """
    device.begin()
    memory = _enqueued(device, sources, layout)
    # The training may write to the sources, or drop them, as soon as ``save`` has returned. Its
    # stream waits for the copies, so they are like any work of that stream on these tensors: torch
    # hands out dropped memory for later work of the stream that it was allocated for, and whoever
    # uses tensors of another stream has to order that one after this one anyway. ``record_stream``
    # is for reads that the training does not wait for yet. It takes as long as the launch of a copy
    # for each tensor, and once more when the tensor is dropped.
    device.join()
    return memory


def _enqueued(device: Accelerator, sources: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
    with device.aside() as stream:
        memory = device.empty(layout.total)
        # Without a device encoder, torch copies.
        if device.native is None:
            for part, source in zip(parts_of(memory, layout), sources, strict=True):
                part.copy_(leaves.viewed(source.detach()), non_blocking=True)
            return memory
        addresses = np.empty(len(sources), np.uint64)
        read_numbers(list(sources), torch.Tensor.data_ptr, addresses)
        # One call for all of them: tensors of the bytes of each leaf and of its copy would take
        # several times as long as the launch of the copy.
        device.native.copy(
            sources=addresses.ctypes.data,
            sizes=layout.sizes.ctypes.data,
            offsets=layout.offsets.ctypes.data,
            count=len(sources),
            target=memory.data_ptr(),
            stream=stream,
        )
    return memory


def parts_of(memory: Memory, layout: Layout) -> list[Memory]:
    """Return the copies, as parts of their memory: of a tensor or an array, uint8, 1-D."""
    return [
        memory[offset : offset + size]
        for offset, size in zip(layout.offsets.tolist(), layout.sizes.tolist(), strict=True)
    ]
