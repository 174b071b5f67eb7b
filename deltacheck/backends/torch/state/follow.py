"""Apply the updates of a run to torch tensors in place, for inference workers that follow it."""

from __future__ import annotations

import numpy as np
import torch

from deltacheck.backends.matching import changes_of
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.external_errors import typed
from deltacheck.restore.follow.follower import LeafChange, Update


@typed
def apply(update: Update, state: object, *, check: bool = False) -> None:
    """Apply the changes of ``update`` to the tensors or NumPy arrays of ``state``, on any device.

    No forward pass may read the tensors at the same time.

    Args:
        update: An update from ``Follower``.
        state: The followed part of the tree as it was saved, such as
            ``{"model": model.state_dict()}``. It must have had every earlier update.
        check: ``True``: compare each changed leaf with the digest of the step afterwards. This
            finds a missed update or a foreign write, and takes a copy to the host and a pass over
            it. ``False``: faster.

    Raises:
        TreeMismatch: ``state`` is not the followed tree. Nothing was changed. The message names the
            leaf and both values.
        Damaged: A check failed.
    """
    flat = leaves.flatten(state)
    # Everything is compared before the first write, so that a mismatch changes nothing.
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
    # Writes go to a copy if the memory of the tensor is not its bytes in C order.
    plain = (
        value.detach()
        if leaves.is_plain(value)
        else leaves.copyable(value.detach()).resolve_conj().resolve_neg().contiguous().clone()
    )
    width = change.spec.element.item_bytes
    # As integers, so that NaNs and float8 keep their bits.
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    # An element of 16 bytes is two words of 8.
    target = leaves.flat_bytes(plain).view(word).reshape(-1, max(1, width // 8))
    fresh = (
        # A copy, because torch needs writable memory.
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
            leaves.copyable(value).copy_(leaves.copyable(plain))
