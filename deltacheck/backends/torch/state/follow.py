"""Bring torch tensors to the step of an update, in place: for inference workers that follow a
training.
"""

from __future__ import annotations

import numpy as np
import torch

from deltacheck.backends.matching import changes_of
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf import tree
from deltacheck.restore.follower import LeafChange, Update


def apply(update: Update, state: object, *, check: bool = False) -> None:
    """Put the changes of ``update`` into the tensors (or NumPy arrays) of ``state``, wherever they
    live.

    ``state``: the followed part of the tree as it was saved, such as ``{"model":
    model.state_dict()}``; it must have had every update before this one. ``check``: compare each
    changed leaf with the digest of the step afterwards: sees a missed update or a foreign write,
    and takes a copy to the host and a pass over it.

    Raises ``TreeMismatch`` (naming leaf and both values), before anything is changed, where
    ``state`` is not the followed tree; ``Damaged`` where a check fails. REQUIRES: no forward pass
    reads the tensors meanwhile.
    """
    flat = tree.flatten(state, leaves.describe)
    changes = changes_of(update, flat)
    for path, change in changes.items():
        _put(flat.arrays[path], change)
    for path, change in changes.items() if check else ():
        change.check(leaves.bytes_of(flat.arrays[path]))


def _put(value: object, change: LeafChange) -> None:
    if not isinstance(value, torch.Tensor):
        assert isinstance(value, np.ndarray)  # changes_of refuses NumPy scalars
        change.apply(value)
        return
    plain = (
        value.detach()
        if leaves.is_plain(value)
        else value.detach().resolve_conj().resolve_neg().contiguous().clone()
    )
    width = change.spec.element.item_bytes
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(
        width, torch.int64
    )  # bits: NaNs and float8 as they are
    target = leaves.flat_bytes(plain).view(word).reshape(-1, max(1, width // 8))
    fresh = (
        torch.from_numpy(change.values.copy().view(np.uint8))
        .view(word)
        .reshape(-1, max(1, width // 8))
        .to(value.device)
    )
    if change.positions is None:
        target.copy_(fresh)
    else:
        target[torch.from_numpy(change.positions).to(value.device)] = fresh
    if plain.data_ptr() != value.data_ptr():
        with torch.no_grad():
            value.copy_(plain)
