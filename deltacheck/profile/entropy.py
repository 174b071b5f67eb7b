"""The bytes that an exact code of a change takes, estimated by order-0 entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def exact_bytes(
    leaves: Mapping[str, tuple[str, NDArray[np.generic], NDArray[np.generic]]],
) -> dict[str, float]:
    """Return the bytes per element of the best of three exact codes, for each leaf.

    The codes are: the changed elements alone with their places, the byte planes of the difference,
    and the byte planes of the value.

    Args:
        leaves: For each path: the role, the older and the newer sample of the leaf.
    """
    # The sample of one leaf is too small for an entropy, so it is that of the whole class (role and
    # type). The density is that of the leaf itself.
    classes: dict[tuple[str, str], list[str]] = {}
    for path, (role, _, after) in leaves.items():
        classes.setdefault((role, str(after.dtype)), []).append(path)
    result = {}
    for paths in classes.values():
        old = np.concatenate([words_of(leaves[path][1]).reshape(-1) for path in paths])
        new = np.concatenate([words_of(leaves[path][2]).reshape(-1) for path in paths])
        changed = old != new
        dense = min(_planes(new - old), _planes(new))
        value = _planes((new - old)[changed]) if changed.any() else 0.0
        for path in paths:
            density = float((words_of(leaves[path][1]) != words_of(leaves[path][2])).mean())
            result[path] = min(dense, _binary(density) / 8 + density * value) if density else 0.0
    return result


def _planes(words: NDArray[np.unsignedinteger]) -> float:
    """Return the entropy of all byte planes in bytes per element."""
    # Byte planes are compressed separately, so the entropy is the sum over planes.
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(words.size, -1)
    return (
        sum(_entropy(np.bincount(planes[:, i], minlength=256)) for i in range(planes.shape[1])) / 8
    )


def _entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of a byte in bits, from the counts of its values.

    The last term corrects the bias of small samples (G. Miller, "Note on the bias of information
    estimates", 1955).
    """
    nonzero = counts[counts > 0]
    share = nonzero / nonzero.sum()
    return min(
        8.0,
        float(-(share * np.log2(share)).sum())
        + (nonzero.size - 1) / (2 * math.log(2) * float(nonzero.sum())),
    )


def _binary(density: float) -> float:
    """Return the bits per element that tell the changed elements from the others."""
    return (
        0.0
        if density in (0, 1)
        else -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    )


def words_of(sample: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
    """Return the bit patterns of a sample, as unsigned words of at most 8 bytes."""
    size = sample.dtype.itemsize
    contiguous = np.ascontiguousarray(sample)
    return (
        contiguous.view(f"u{size}")
        if size <= 8
        else contiguous.view(np.uint64).reshape(*sample.shape[:-1], -1)
    )
