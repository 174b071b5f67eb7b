"""Sample tensors for the profiler, and read the files of ``torch.save`` as a series of steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.state.classes import expand
from deltacheck.backends.torch.state.leaves import describe, flat_bytes
from deltacheck.errors import Damaged
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.profile.sample import SamplePlan

__all__ = ["describe", "expand", "files", "refusal", "states", "take"]

# The suffixes that are in use for files of ``torch.save``.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def take(arrays: Mapping[str, Any], plan: SamplePlan) -> dict[str, NDArray[np.generic]]:
    """Return sampled elements of tensors.

    They are gathered on their device, with one copy to the host for each device and dtype.
    """
    gathered: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    samples: dict[str, NDArray[np.generic]] = {}
    with torch.no_grad():
        for path, tensor in arrays.items():
            if not isinstance(tensor, torch.Tensor):
                samples[path] = np.asarray(tensor).reshape(-1)[plan.elements(path)]
                continue
            elements = plan.elements(path)
            plain = tensor.detach().resolve_conj().resolve_neg()
            if plain.is_contiguous():
                offsets = torch.from_numpy(elements.reshape(-1)).to(plain.device)
                sample = plain.reshape(-1)[offsets]
            else:  # a reshape would copy the whole tensor
                indices = (
                    torch.from_numpy(i.reshape(-1)).to(plain.device)
                    for i in np.unravel_index(elements, tuple(plain.shape))
                )
                sample = plain[tuple(indices)]
            gathered.setdefault((plain.device, plain.dtype), {})[path] = sample
        for group in gathered.values():
            # As bytes, because torch cannot give a bfloat16 tensor to NumPy. The copy is made
            # because the samples must have memory of their own.
            host = flat_bytes(torch.cat(list(group.values()))).cpu().numpy().copy()
            begin = 0
            for path, sample in group.items():
                end = begin + sample.numel() * sample.element_size()
                kind = dtype_named(plan.specs[path].dtype).numpy
                samples[path] = host[begin:end].view(kind).reshape(plan.elements(path).shape)
                begin = end
    return samples


def files(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the step and path of each file of a folder that ``torch.save`` may have written.

    The step is the last number in the name. The result is in ascending order.

    Raises:
        ValueError: Two files have the same number.
    """
    by_step: dict[int, Path] = {}
    for path in sorted(Path(folder).iterdir()):
        numbers = re.findall(r"\d+", path.stem)
        if path.suffix in SUFFIXES and numbers:
            step = int(numbers[-1])
            if step in by_step:
                raise ValueError(
                    f"{by_step[step].name} and {path.name} are both step {step}; leave one of them"
                    " in a folder of its own"
                )
            by_step[step] = path
    return sorted(by_step.items())


def refusal(error: Exception) -> str:
    """Return the reason why a file was not read, in one line, without torch's advice to run it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    blocked = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", text)
    if blocked:
        return f"it contains {blocked[1]}"
    reason = re.search(r"WeightsUnpickler error:\s*([^\n]+)", text)
    lines = [reason[1]] if reason else text.strip().split("\n")
    own_words = (line for line in lines if line and "weights_only" not in line)
    return next(own_words, "torch refuses it")


def states(folder: str | os.PathLike[str]) -> Iterator[tuple[int, object]]:
    """Yield the step and state of each file in a folder, one at a time in memory.

    The tensors are mapped if the file allows it. No code of a file is run.

    Raises:
        Damaged: A file cannot be read with ``weights_only=True``; the message names it.
    """
    for step, path in files(folder):
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        # torch raises many types of errors for files that are damaged or made by an attacker.
        except Exception as error:  # noqa: BLE001 - as the comment says
            raise Damaged(
                f"{path} cannot be read by torch.load(weights_only=True): {type(error).__name__}:"
                f" {refusal(error)}"
            ) from None  # its text advises to run the file
        yield step, state
