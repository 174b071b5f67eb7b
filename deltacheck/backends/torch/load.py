"""Read any root as torch tensors, without the right to write to it."""

from __future__ import annotations

import os
from typing import Any

from deltacheck import restore
from deltacheck.backends.torch import leaves
from deltacheck.store.root import open_root


def load(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    item: str | None = None,
    contract: str | None = None,
    max_bytes: int | None = None,
    expected_digest: str | None = None,
) -> Any:
    """Read a step (by default the newest) of an ``Engine`` root or of an Orbax ``CheckpointManager``'s, verified bit for bit.

    Returns the nested state with tensors on the host, tied leaves as one tensor; JAX's typed PRNG keys as their uint32 data.
    ``item``: of a manager's steps, needed only where they have more than one. ``contract``: refuse a step with a leaf that was saved under
    a weaker one than ``"exact"`` or ``"bounded"``; by default each comes as it was saved. ``max_bytes``: refuse before allocating more
    than this. ``expected_digest``: refuse a step whose manifest has another digest than this, which the save's report and ``deltacheck show`` give.

    Raises ``NotACheckpointRoot``, ``StepNotFound``, ``ContractNotMet`` (naming the leaves),
    ``Damaged`` or ``ChainBroken`` (naming leaf, segment and way out),
    ``BudgetExceeded``, and ``UnsupportedLeaf`` for an element type that torch does not have.
    """
    opened = open_root(root, item)
    manifest = opened.manifest(step)
    opened.require_digest(manifest, expected_digest)
    restore.require(manifest, contract)
    loaded = restore.load(restore.resolve(opened, manifest, max_bytes=max_bytes), max_bytes=max_bytes)
    return leaves.tree_of(manifest.tree, loaded)
