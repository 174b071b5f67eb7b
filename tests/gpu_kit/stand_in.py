"""The device of a step: the first CUDA device, or in a rehearsal the processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.gpu_kit.steps import Context, Skipped


@contextmanager
def accelerator(context: Context) -> Iterator[Any]:
    """Yield the accelerator that the engine uses in this block.

    In a rehearsal this is the emulator, which runs the kernels on the processor.
    """
    import torch

    from deltacheck.backends.torch.capture import tensor_codec

    if not context.rehearse:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        yield tensor_codec.accelerator_of(torch.empty(1, device="cuda"))
        return
    try:
        from tests.support.accelerators import Emulated

        device = Emulated()
    except ImportError as error:
        raise Skipped(f"this build has no emulator ({error})") from error
    with patch.object(
        tensor_codec, "accelerator_of", lambda tensor: device if device.holds(tensor) else None
    ):
        yield device


def require_device(context: Context) -> None:
    """Raise if saves would fall back to the host encoder: their figures are not a device's."""
    with accelerator(context) as device:
        if device.native is None:
            raise RuntimeError("the device fails its test, so saves would be encoded on the host")
