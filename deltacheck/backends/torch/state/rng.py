"""The global random generators of a process as a state that can be kept exactly: Python's, NumPy's
and torch's, those of CUDA devices too.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """Where the generators are. Generators that a program made for itself are its own to save."""
    version, words, spare = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    found: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "spare": spare},
        "numpy": {
            "kind": str(kind),
            "keys": keys,
            "position": position,
            "has_gauss": has_gauss,
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def restore(saved: dict[str, Any]) -> None:
    """Put the generators where they were. CUDA's only where this process sees as many devices as
    there were.
    """
    python, numpy = saved["python"], saved["numpy"]
    random.setstate(
        (int(python["version"]), tuple(int(word) for word in python["words"]), python["spare"])
    )
    np.random.set_state(
        (numpy["kind"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["gauss"])
    )
    torch.set_rng_state(saved["torch"])
    cuda = saved.get("cuda")
    if cuda is not None and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
