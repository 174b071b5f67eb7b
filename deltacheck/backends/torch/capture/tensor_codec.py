"""Encode torch states: tensors on an accelerator in their place, all others in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.capture import self_test, windows
from deltacheck.backends.torch.capture.device import Accelerator
from deltacheck.backends.torch.capture.device_memory import DeviceMemory
from deltacheck.codec import default_codec
from deltacheck.codec.base import U8, U64, Encoded, EncodedGroup, GroupJob
from deltacheck.codec.leaf_memory import HostMemory, LeafMemory

log = logging.getLogger("deltacheck")

Base: TypeAlias = "torch.Tensor | NDArray[np.uint8]"

# Bytes of a call of the device encoder. A capture uses device memory for 4 of them.
WINDOW_BYTES = 256 << 20


class TorchCodec:
    """Encodes uint8 arrays, 1-D: NumPy arrays, and tensors on an accelerator.

    A base lies on the device of its leaf.
    """

    def __init__(self) -> None:
        self._host = default_codec()
        self._host_memory = HostMemory(self._host.host)
        self.run_bytes = self._host.run_bytes

    def copy(self, current: Base, out: Base | None) -> Base:
        """Return a base that holds ``current``, in the memory of ``out`` if that fits."""
        if isinstance(current, np.ndarray):
            base: U8 = self._host.copy(current, out if isinstance(out, np.ndarray) else None)
            return base
        device = device_of(current)
        with device.aside():
            if (
                not isinstance(out, torch.Tensor)
                or out.device != current.device
                or out.numel() != current.numel()
            ):
                out = device.empty(current.numel())
            out.copy_(current, non_blocking=True)
            # The next optimizer step waits until the leaf was read.
            device.mark_read([current])
        return out

    def host(self, base: Base) -> U8:
        """Return the base's bytes: a view, or a copy from an accelerator."""
        return base if isinstance(base, np.ndarray) else self.memory_of(base).host(base)

    def memory_of(self, content: Base) -> LeafMemory:
        """Return the memory that a leaf or a base lies in."""
        if isinstance(content, np.ndarray):
            return self._host_memory
        return DeviceMemory(device_of(content))

    def encode(
        self,
        current: Base,
        base: Base | None,
        bounds: U64,
        word_bytes: int,
        *,
        ordered: bool = False,
    ) -> tuple[Encoded, Base | None]:
        """Encode in host memory, as the protocol defines it."""
        return self._host.encode(
            self.host(current),
            None if base is None else self.host(base),
            bounds,
            word_bytes,
            ordered=ordered,
        )

    def grouped(self, current: Base, base: Base) -> bool:
        """Return ``True`` if the leaf lies on an accelerator."""
        return isinstance(current, torch.Tensor)

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """Encode device by device, as ``GroupCodec`` defines it.

        A base on the host (of a restored step, for example) moves to the device of its leaf.
        """
        by_device: dict[torch.device, list[int]] = {}
        for number, job in enumerate(jobs):
            by_device.setdefault(job.current.device, []).append(number)
        # The state is read only when the last of the devices has enqueued its reads.
        unread = len(by_device)

        def device_read() -> None:
            nonlocal unread
            unread -= 1
            if unread == 0:
                all_read()

        for numbers in by_device.values():
            device = device_of(jobs[numbers[0]].current)
            device_jobs = [
                jobs[number]._replace(base=_beside(device, jobs[number])) for number in numbers
            ]
            for group in windows.encode(device, device_jobs, WINDOW_BYTES, make_room, device_read):
                yield group._replace(
                    # The windows number the jobs of their device; the caller numbers those of all
                    # devices.
                    spans=[span._replace(job=numbers[span.job]) for span in group.spans],
                    bases={numbers[span.job]: device_jobs[span.job].base for span in group.spans},
                )


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """Return the accelerator that holds a tensor.

    Return ``None`` for the host and for kinds of devices that are not supported.
    """
    return _cuda(tensor.get_device()) if tensor.device.type == "cuda" else None


def is_host(tensor: torch.Tensor) -> bool:
    """Return true if a tensor lies in host memory."""
    return tensor.device.type == "cpu" and accelerator_of(tensor) is None


@cache
def _cuda(index: int) -> Accelerator:
    # One object for each device of the process: its side stream orders all saves.
    device = torch.device("cuda", index)
    try:
        from deltacheck import _native_cuda
    except ImportError as error:
        log.warning(
            "%s: its tensors are encoded in host memory, since this build has no CUDA encoder (%s)",
            device,
            str(error),
        )
        return Accelerator(device, None)
    accelerator = Accelerator(device, _native_cuda)
    problem = self_test.defect(accelerator)
    if problem:
        log.warning("%s: its tensors are encoded in host memory: %s", device, problem)
        # A device that fails the test encodes on the host, so that no save depends on wrong bits.
        accelerator.native = None
    return accelerator


def self_tests() -> dict[str, str]:
    """Return the result of the CUDA encoder's test on each device that torch sees.

    Returns:
        Name of the device -> the first difference from the host encoder; empty: none.

    Raises:
        ImportError: This build has no CUDA encoder.
    """
    from deltacheck import _native_cuda

    devices = [
        Accelerator(torch.device("cuda", index), _native_cuda)
        for index in range(torch.cuda.device_count())
    ]
    return {device.name: self_test.defect(device) for device in devices}


def device_of(tensor: torch.Tensor) -> Accelerator:
    """Return the accelerator of a tensor that a save has read on one."""
    accelerator = accelerator_of(tensor)
    assert accelerator is not None  # no other tensors reach the codec as tensors
    return accelerator


def _beside(device: Accelerator, job: GroupJob) -> torch.Tensor:
    """Return the base of a job on the device of its leaf."""
    if isinstance(job.base, torch.Tensor) and job.base.device == job.current.device:
        return job.base
    host = job.base if isinstance(job.base, np.ndarray) else job.base.cpu().numpy()
    with device.aside():
        return device.empty(host.size).copy_(torch.from_numpy(host))
