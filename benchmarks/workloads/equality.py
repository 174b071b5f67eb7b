"""Comparison of states bit for bit, whichever framework holds them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EqualityVerdict:
    """The result of one comparison; ``detail`` is its extent or the first differences."""

    claim: str
    holds: bool
    detail: str


def compare(claim: str, expected: Any, actual: Any) -> EqualityVerdict:
    """Compare the paths of two nested states and, leaf by leaf, shape, dtype and bits."""
    expected_leaves, actual_leaves = dict(_leaves(expected)), dict(_leaves(actual))
    # A path that only one side has is a difference too, so both sides are listed.
    paths = {**expected_leaves, **actual_leaves}
    wrong = [path for path in paths if expected_leaves.get(path) != actual_leaves.get(path)]
    if wrong:
        return EqualityVerdict(
            claim,
            False,
            f"{len(wrong)} of {len(expected_leaves)} leaves differ, first {', '.join(wrong[:3])}",
        )
    size = sum(len(leaf[-1]) for leaf in expected_leaves.values())
    return EqualityVerdict(
        claim, True, f"{len(expected_leaves)} leaves, {size / 1e6:.1f} MB, equal"
    )


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
    """Yield path, then kind, shape and bytes, of every leaf.

    The kind of a dtype is the same in all frameworks.
    """
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield from _leaves(child, f"{path}/{key}")
    elif isinstance(node, list | tuple):
        for position, child in enumerate(node):
            yield from _leaves(child, f"{path}/{position}")
    elif hasattr(node, "dtype"):
        array = _bits(node)
        yield path, (str(node.dtype).removeprefix("torch."), tuple(node.shape), array.tobytes())
    else:  # a Python scalar; a float by its bits
        bits = struct.pack("<d", node) if isinstance(node, float) else repr(node).encode()
        yield path, (type(node).__name__, (), bits)


def _bits(array: Any) -> NDArray[np.uint8]:
    if hasattr(array, "detach"):  # torch
        import torch

        tensor: torch.Tensor = array.detach().contiguous().reshape(-1)
        return tensor.view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
