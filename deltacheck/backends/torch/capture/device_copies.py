"""Copy tensors on an accelerator within its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from deltacheck.backends.torch.capture.device import Accelerator

# Alignment in bytes, the same as that of CUDA's allocations.
ALIGNED = 256


def copy_bytes(sources: Iterable[torch.Tensor]) -> int:
    """Return the device memory that ``copied`` takes."""
    return sum(map(_aligned, sources))


def copied(device: Accelerator, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Enqueue copies of tensors on the side stream; ``hold`` waits until they are made.

    Args:
        device: The accelerator.
        sources: Tensors on it, uint8, 1-D.

    Returns:
        The copies, parts of one piece of memory that belongs to the side stream.
    """
    sizes = [_aligned(source) for source in sources]
    with device.aside():
        memory = device.empty(sum(sizes))
        copies = [
            memory[end - size : end - size + source.numel()]
            for source, size, end in zip(sources, sizes, accumulate(sizes), strict=True)
        ]
        # One call for all of them, because each launch costs more than a small leaf.
        torch._foreach_copy_(copies, list(sources), non_blocking=True)
        device.mark_read(sources)
    return copies


def _aligned(source: torch.Tensor) -> int:
    return -(-source.numel() // ALIGNED) * ALIGNED
