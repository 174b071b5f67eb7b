"""Published tensors as torch tensors, and the reverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacheck.backends.hugging_face.publish.version_folder import Tensor
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.spec import LeafSpec
from deltacheck.restore.content import Loaded


def published(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Return copies of tensors in host memory, one at a time.

    Raises:
        UnsupportedLeaf: A tensor is not dense, or has an element type that only torch has.
    """
    for name, value in weights:
        try:
            description = leaves.describe(value)
        except UnsupportedLeaf as error:
            raise UnsupportedLeaf(f"tensor {name!r}: {error}") from None
        if description is None or description.tag is not None:
            raise UnsupportedLeaf(
                f"tensor {name!r} is a {type(value).__name__} of {value.dtype}, which files of"
                " safetensors do not have; send plain tensors"
            )
        data = leaves.bytes_of(value)
        # The bytes of a tensor on the host are its own memory, which training changes.
        if value.device.type == "cpu":
            data = data.copy()
        yield name, Tensor(description.dtype, description.shape, data)


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return an array of NumPy or ml_dtypes as a tensor of its own memory."""
    data = np.array(array, order="C", copy=True).reshape(-1).view(np.uint8)
    return leaves.tensor_of(Loaded(LeafSpec.of("", array.shape, array.dtype.name), [], data))
