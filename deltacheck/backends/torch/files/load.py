"""Read any root as torch tensors, without the right to write to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.state import leaves
from deltacheck.restore import damage
from deltacheck.restore.fill import StepReader
from deltacheck.restore.resolve import require_contract
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.root import open_root

MapLocation: TypeAlias = (
    "torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any]"
)


def load(
    root: str | os.PathLike[str],
    step: int | MapLocation | None = None,
    *,
    map_location: MapLocation | None = None,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    item: str | None = None,
    contract: str | None = None,
    max_bytes: int | None = None,
    expected_digest: str | None = None,
    storage: ObjectStore | None = None,
) -> Any:
    """Read a step (by default the newest) of an ``Engine`` root or of an Orbax
    ``CheckpointManager``'s, verified bit for bit.

    Returns the nested state with tensors on the host, tied leaves as one tensor; JAX's typed PRNG
    keys as their uint32 data. ``root``: such a root, or a file that ``save`` or ``DeltaCheckIO``
    made, which is one step. ``map_location``: where the tensors go (default: the host), in all
    forms that ``torch.load`` knows, where it may be the second argument, too; what was on a device
    when it was saved comes to the host first. ``weights_only``, ``mmap``: taken for the sake of
    ``torch.load``'s signature: no code of a checkpoint is ever run, and decoded leaves cannot be
    mapped. ``item``: of a manager's steps, needed only where they have more than one. ``contract``:
    refuse a step with a leaf that was saved under a weaker one than ``"exact"`` or ``"bounded"``;
    by default each comes as it was saved. ``max_bytes``: refuse before allocating more than this.
    ``expected_digest``: refuse a step whose manifest has another digest than this, which the save's
    report and ``deltacheck show`` give. ``storage``: how an object store is reached, where ``root``
    is an address.

    Raises ``NotACheckpointRoot``, ``StepNotFound``, ``ContractNotMet`` (naming the leaves),
    ``Damaged`` or ``ChainBroken`` (naming step, leaf, file and the steps that still restore),
    ``BudgetExceeded``, and ``UnsupportedLeaf`` for an element type that torch does not have.
    """
    if step is not None and not isinstance(step, int):
        if map_location is not None:
            raise ValueError(f"step must be an integer, not {step!r}")
        step, map_location = None, step
    if not isinstance(root, str | os.PathLike):
        raise TypeError(f"deltacheck reads from a path, not from a {type(root).__name__}")
    path = Path(root)
    if path.is_file():
        opened, manifest = pointer.opened(path)
        if step not in (None, manifest.step):
            raise ValueError(
                f"{path} is step {manifest.step}, not {step}; for others read the root"
                f" {opened.path}"
            )
    else:
        opened = open_root(root, item, storage=storage)
        manifest = opened.manifest(step)
    opened.require_digest(manifest, expected_digest)
    require_contract(manifest, contract)
    with damage.named(opened, manifest):
        loaded = StepReader(opened, manifest, max_bytes=max_bytes, keep=False).whole()
    return leaves.tree_of(manifest.tree, loaded, lambda tensor: moved(tensor, map_location))


def moved(tensor: torch.Tensor, where: MapLocation | None) -> torch.Tensor:
    """A host tensor where ``torch.load`` would put it."""
    if where is None:
        return tensor
    if isinstance(where, Mapping):
        return tensor.to(where.get("cpu", "cpu"))
    if callable(where):
        storage = where(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    return tensor.to(where)
