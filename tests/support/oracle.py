"""TensorStore as the oracle of the native reader of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec

# What TensorStore raises of a file that is damaged.
REFUSED = (ValueError, RuntimeError, IndexError, OverflowError)


def read_by_tensorstore(path: Path, spec: ArraySpec) -> NDArray[Any]:
    """Return a whole array, whose files must be no larger than their content can be."""
    array = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": spec.metadata(),
        "fill_missing_data_reads": False,
    }
    # By threads and caches of its own: what a read that failed has begun may still hold chunks of
    # the file as it was then.
    opened = ts.open(array, open=True, assume_metadata=True, context=arrays.context()).result()
    return np.asarray(opened.read().result())
