"""The inputs of a policy's decisions in a save that DCP coordinates.

DCP shows a value only when it is written, and pickles everything that is not a tensor. So each rank
takes rates, betas and step counts from its own state, in which they are the same as on the other
ranks. What a save has measured is exchanged with its results, and counts for the next save.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from deltacheck.backends.torch.dcp import names
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.tree import Node
from deltacheck.save.ranks.joint import RankTiles, cuts_of
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import Agreed, HeldState, Signals, combined


def tree_of_numbers(items: Iterable[WriteItem], planner_data: object, planner: SavePlanner) -> Node:
    """Return the tree of parameter groups and step counts that this rank saves as objects.

    Args:
        items: The items of this rank.
        planner_data: The planner data of its plan.
        planner: Resolves the items.
    """
    nested: dict[str | int, Any] = {}
    for item in items:
        fqn = item.index.fqn
        # Other objects may be large.
        if item.type is not WriteItemType.BYTE_IO or not (
            "param_groups" in fqn or fqn.endswith(".step")
        ):
            continue
        data = planner.resolve_data(item)
        # An object that only its pickle program can create has no numbers that a policy knows.
        with contextlib.suppress(pickle.UnpicklingError):
            content = data.getvalue() if isinstance(data, io.BytesIO) else b""
            value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            *parents, last = names.keys_of(fqn, planner_data)
            inner = nested
            for key in parents:
                inner = inner.setdefault(key, {})
            inner[last] = _numbers(value)
    return leaves.flatten(nested).skeleton


def _numbers(value: object) -> object:
    """Return a value with numbers, names and containers only; ``None`` in place of all others."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, bool | int | float | str) else None


def agreement(
    saver: Saver, step: int, state: HeldState, shared: Signals | None, tiles: RankTiles
) -> Agreed:
    """Return the agreement of the ranks on a save.

    Args:
        saver: The saver of this rank.
        step: The training step.
        state: The state of which this rank holds a part.
        shared: What all ranks have measured at the save before; ``None``: nothing.
        tiles: The tiles that this rank writes.
    """
    signals = saver.signals(step, state)
    if signals is not None:
        of_all = shared or Signals()
        signals = msgspec.structs.replace(
            signals,
            drifts=of_all.drifts,
            events=tuple(dict.fromkeys((*signals.events, *of_all.events))),
            scales=of_all.scales,
        )
    return Agreed(state, signals, cuts_of(tiles))


def shared_signals(signals: Sequence[Signals | None]) -> Signals | None:
    """Return what all ranks have measured, from the reports of a save; ``None``: nothing."""
    reported = [of_rank for of_rank in signals if of_rank is not None]
    if not reported:
        return None
    of_all = combined(reported)
    # A master that begins as zeros has no scale yet.
    scales = {path: scale for path, scale in of_all.scales.items() if scale[0] > 0}
    return msgspec.structs.replace(of_all, scales=scales)
