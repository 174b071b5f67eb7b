"""Sample tensors for the profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.torch.state.classes import expand
from deltacheck.backends.torch.state.leaves import describe, flat_bytes
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.profile.sample import SamplePlan

__all__ = ["describe", "expand", "take"]


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
