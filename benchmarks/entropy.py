"""The order-0 entropy of a lossless save: a bound for codes of one symbol at a time.

Tables and files are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # unsigned, 1-D


def bound_bytes(before: Mapping[str, Words], now: Mapping[str, Words]) -> float:
    """Return the bytes of all leaves, each by the better code of ``leaf_bytes``."""
    return sum(leaf_bytes(before[path], words) for path, words in now.items())


def leaf_bytes(before: Words, now: Words) -> float:
    """Return the bytes of one leaf, as differences or as values, whichever is smaller.

    Words of up to 16 bits are symbols. Wider words are split into bytes, each position with a
    distribution of its own. A difference is taken modulo the word, its sign folded into the lowest
    bit.
    """
    signed = (now - before).view(f"i{now.itemsize}")
    folded = ((signed << 1) ^ (signed >> (8 * now.itemsize - 1))).view(now.dtype)
    return min(value_bytes(folded), value_bytes(now))


def value_bytes(words: Words) -> float:
    """Return the bytes of one leaf as values."""
    return sum(map(_symbols_bytes, _symbols(words)))


def words_of(array: Any) -> Words:
    """Copy the bits of a NumPy, JAX or torch array as unsigned words of its element size."""
    if hasattr(array, "detach"):
        import torch

        tensor: torch.Tensor = array.detach().contiguous().reshape(-1)
        return tensor.view(torch.uint8).cpu().numpy().view(f"u{tensor.element_size()}").copy()
    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1)
    return flat.view(np.uint8).view(f"u{flat.itemsize}").copy()  # type: ignore[no-any-return]


def _symbols(words: Words) -> list[Words]:
    if words.itemsize <= 2:
        return [words]
    planes = words.view(np.uint8).reshape(-1, words.itemsize)
    return [planes[:, place] for place in range(words.itemsize)]


def _symbols_bytes(symbols: Words) -> float:
    counts = np.bincount(symbols)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / len(symbols))).sum() / 8)
