"""The memory tier of ranks: one step of all in memory, then copied by rank 0.

Every rank writes its segments to the memory root. Rank 0 commits there, and its drain copies the
steps of all ranks.
"""

from __future__ import annotations

from typing import Any

from deltacheck.backends.torch.group.run_roots import MemoryFirst
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.maintain.memory_tier import MemoryTier, Tier, most_bytes
from deltacheck.save.ranks.group import Group
from deltacheck.save.ranks.rank_setup import RankSetup
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.save_options import SaveOptions
from deltacheck.save.saver import Saver
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root

_REMEDY = (
    "The ranks of a memory tier share one directory in memory, so they are processes of one"
    " machine, and of one container if /dev/shm is its own. On several machines, save without"
    " memory="
)


# The part of ``io_timeout_seconds`` that rank 0 waits for copies while the others wait for it.
_PATIENCE = 0.75


def open_memory(
    group: Group, durable: Root, writer: RootWriter, options: SaveOptions, memory: MemoryTier
) -> MemoryFirst:
    """Open the memory root on every rank.

    Args:
        group: The ranks.
        durable: The durable root.
        writer: The right of rank 0 to change its steps.
        options: The options of all saves.
        memory: The memory tier.

    Raises:
        ForeignMemory: The memory holds steps that are not the newest of this run.
        RankFailed: The ranks do not see the same directory, or one of them failed.
    """
    # Shorter than the other ranks wait for rank 0, so that they learn of the cause.
    patience_seconds = _PATIENCE * options.io_timeout_seconds
    with group.sharing_failure():
        path = storage.local(memory.path, "a memory tier").absolute()
    opened = group.open_together(
        path,
        RankSetup(storage.full_name(path), {}),
        lambda: Tier(memory, writer, options, patience_seconds),
        lambda: Root(path, create_store(path, durability=Durability.PROCESS)),
        Tier.release,
        call="opens a memory root",
        remedy=_REMEDY,
    )
    if isinstance(opened, Tier):
        return MemoryFirst(opened.root, durable, writer, opened, patience_seconds)
    return MemoryFirst(opened, durable, writer, None, patience_seconds)


def make_room(group: Group, roots: MemoryFirst, saver: Saver, step: int, tiles: Flat) -> bool:
    """Let rank 0 wait until the memory has space for one more save of all ranks.

    Args:
        group: The ranks, all of which make this call.
        roots: The roots of the run.
        saver: The saver of this rank.
        step: The training step of the save.
        tiles: What this rank writes.

    Returns:
        True if there is room; False if all ranks skip the save.
    """
    sizes = [LeafSpec.of(name, x.shape, x.dtype).raw_bytes for name, x in tiles.leaves.items()]
    is_empty = False

    def start_over() -> None:
        group.forget_segments()
        saver.chains.start_over()

    def empty_memory() -> None:
        nonlocal is_empty
        is_empty = True
        start_over()

    def decide(bytes_of_ranks: list[Any]) -> tuple[bool, bool]:
        return roots.make_room(saver, step, sum(bytes_of_ranks), empty_memory), is_empty

    try:
        has_room, is_empty = group.joint.agree(
            most_bytes(sum(sizes), len(sizes)), decide, "makes room"
        )
    except BaseException:
        # Rank 0 may have emptied the memory before it failed.
        start_over()
        raise
    if is_empty:
        start_over()
    return bool(has_room)
