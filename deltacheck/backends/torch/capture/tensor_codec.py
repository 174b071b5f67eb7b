"""The codec that a save of torch states goes through: tensors on an accelerator where they lie, the
rest in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.capture import windows
from deltacheck.backends.torch.capture.device import Accelerator, Cuda
from deltacheck.backends.torch.capture.staging import Staging
from deltacheck.codec import default_codec
from deltacheck.codec.base import U8, U64, Codec, Encoded, EncodedGroup, GroupJob

log = logging.getLogger("deltacheck")

Base: TypeAlias = "torch.Tensor | NDArray[np.uint8]"

WINDOW_BYTES = (
    256 << 20
)  # of a call of the device encoder; device memory for 4 of them is in use while a save is captured


class TorchCodec:
    """Takes uint8 arrays, 1-D: NumPy arrays, and tensors on an accelerator. A base lies where its
    leaf does.
    """

    name = "torch"

    def __init__(self) -> None:
        self._host: Codec[Any] = default_codec()
        self.run_bytes = self._host.run_bytes

    def copy(self, current: Base, out: Base | None) -> Base:
        """A base that holds ``current``, in the memory of ``out`` where that fits."""
        if isinstance(current, np.ndarray):
            base: U8 = self._host.copy(current, out if isinstance(out, np.ndarray) else None)
            return base
        device = _device(current)
        with device.aside():
            if (
                not isinstance(out, torch.Tensor)
                or out.device != current.device
                or out.numel() != current.numel()
            ):
                out = device.empty(current.numel())
            out.copy_(current, non_blocking=True)
            device.mark()
        return out

    def host(self, base: Base) -> U8:
        """The base's bytes: a view, or from an accelerator a copy."""
        return (
            base
            if isinstance(base, np.ndarray)
            else Staging({"base": (_device(base), base)}, base.numel()).take("base")
        )

    def encode(
        self, current: Base, base: Base | None, bounds: U64, word_bytes: int
    ) -> tuple[Encoded, Base | None]:
        """As the protocol has it, in host memory."""
        return self._host.encode(
            self.host(current), None if base is None else self.host(base), bounds, word_bytes
        )

    def apply(self, encoded: Encoded, base: U8, bounds: U64, word_bytes: int) -> None:
        """In host memory, as the protocol has it."""
        self._host.apply(encoded, base, bounds, word_bytes)

    def grouped(self, current: Base, base: Base) -> bool:
        """Whether the leaf lies on an accelerator."""
        return isinstance(current, torch.Tensor)

    def encode_group(
        self,
        jobs: Sequence[GroupJob],
        make_room: Callable[[int], None],
        all_read: Callable[[], None],
    ) -> Iterator[EncodedGroup]:
        """As ``GroupCodec`` has it, device by device. A base on the host (of a restored step, say)
        moves to the device of its leaf.
        """
        by_device: dict[torch.device, list[int]] = {}
        for number, job in enumerate(jobs):
            by_device.setdefault(job.current.device, []).append(number)
        left = len(by_device)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                all_read()

        for numbers in by_device.values():
            device = _device(jobs[numbers[0]].current)
            own = [jobs[number]._replace(base=_beside(device, jobs[number])) for number in numbers]
            for made in windows.encode(device, own, WINDOW_BYTES, make_room, one_less):
                yield made._replace(
                    spans=[span._replace(job=numbers[span.job]) for span in made.spans],
                    bases={numbers[span.job]: own[span.job].base for span in made.spans},
                )


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """The accelerator that holds a tensor; ``None`` for the host and for kinds that we cannot
    drive.
    """
    return _cuda(tensor.get_device()) if tensor.device.type == "cuda" else None


@cache
def _cuda(index: int) -> Accelerator:
    device = torch.device("cuda", index)
    try:
        from deltacheck import _native_cuda
    except ImportError as error:
        log.warning(
            "%s: its tensors are encoded in host memory, since this build has no CUDA encoder (%s)",
            device,
            error,
        )
        return Cuda(device, None)
    found = Cuda(device, _native_cuda)
    problem = windows.defect(found)
    if problem:
        log.warning("%s: its tensors are encoded in host memory: %s", device, problem)
        found.native = None
    return found


def _device(tensor: torch.Tensor) -> Accelerator:
    found = accelerator_of(tensor)
    assert found is not None  # no other tensors reach the codec as tensors
    return found


def _beside(device: Accelerator, job: GroupJob) -> torch.Tensor:
    """The base of a job where its leaf lies."""
    if isinstance(job.base, torch.Tensor) and job.base.device == job.current.device:
        return job.base
    host = job.base if isinstance(job.base, np.ndarray) else job.base.cpu().numpy()
    with device.aside():
        return device.empty(host.size).copy_(torch.from_numpy(host))
