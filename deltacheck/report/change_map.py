"""Count the changed elements of a leaf by cells of a small grid, for a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Cells of a map. Larger: finer pictures, and more to send and to draw.
MOST_ROWS, MOST_COLUMNS = 48, 96


@dataclass(frozen=True, slots=True)
class ChangeMap:
    """The share of changed elements in each cell of a leaf.

    The last axis of the leaf runs from left to right, all others from top to bottom.

    Attributes:
        height: Number of rows of the leaf: the product of all sizes except the last.
        width: Size of the last axis.
        rows: Number of rows of cells.
        columns: Number of columns of cells.
        changed: Number of changed elements.
        shares: Changed elements / elements of each cell, in C order.
    """

    height: int
    width: int
    rows: int
    columns: int
    changed: int
    shares: list[float]


def change_map(shape: Sequence[int], changed: Iterable[NDArray[np.int64]]) -> ChangeMap:
    """Return the map of a leaf.

    Args:
        shape: Shape of the leaf.
        changed: Positions of the changed elements in C order, each once.

    Returns:
        The map. That of an empty leaf has no cells.
    """
    width = shape[-1] if shape else 1
    height = math.prod(shape[:-1])
    row_edges, column_edges = _edges(height, MOST_ROWS), _edges(width, MOST_COLUMNS)
    rows, columns = row_edges.size - 1, column_edges.size - 1
    counts = np.zeros(rows * columns, np.int64)
    for positions in changed:
        row, column = np.divmod(positions, max(1, width))
        cells = _cell(row_edges, row) * columns + _cell(column_edges, column)
        counts += np.bincount(cells, minlength=counts.size)
    sizes = np.outer(np.diff(row_edges), np.diff(column_edges)).ravel()
    return ChangeMap(
        height, width, rows, columns, int(counts.sum()), (counts / np.maximum(1, sizes)).tolist()
    )


def _edges(size: int, most: int) -> NDArray[np.int64]:
    """Cut an axis into at most ``most`` cells of nearly equal size."""
    cells = min(size, most)
    return np.arange(cells + 1, dtype=np.int64) * size // max(1, cells)


def _cell(edges: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(edges, positions, "right") - 1
