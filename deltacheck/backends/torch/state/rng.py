"""Save and restore the global random generators of Python, NumPy, torch and its CUDA devices."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger("deltacheck")


def rank_key(rank: int) -> str:
    """Return the key of a rank in a dict of the states of several."""
    return f"rank {rank}"


def states() -> dict[str, Any]:
    """Return the states of the global generators as plain values and arrays.

    A program must save the generators that it has created itself.
    """
    version, words, spare = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    saved: dict[str, Any] = {
        # Words as an array: as integers they would be hundreds of nodes of the skeleton.
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
        saved["cuda"] = torch.cuda.get_rng_state_all()
    return saved


def restore(saved: dict[str, Any]) -> None:
    """Set the global generators to saved states.

    CUDA's are set only if this process sees as many devices as the saving one did.
    """
    python, numpy = saved["python"], saved["numpy"]
    # Python accepts only a tuple of its own integers.
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


def restore_rank(saved: dict[str, Any], rank: int) -> None:
    """Set the global generators to the saved states of a rank; leave them if it has none.

    Args:
        saved: The states of one process, or those of several by ``rank_key``.
        rank: The rank of this process.
    """
    of_ranks = {rank_key(0): saved} if "python" in saved else saved
    if (own := of_ranks.get(rank_key(rank))) is None:
        log.info("no random states were saved for rank %d", rank)
    else:
        restore(own)
