"""Rewrite the newest step of a root so that a restore applies no deltas, without the training that
made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltacheck.errors import StepNotFound
from deltacheck.leaf import tiles
from deltacheck.restore.chain import resolve_chains
from deltacheck.save.compactor import write_whole
from deltacheck.save.rewrite import renewed
from deltacheck.store import collect
from deltacheck.store.commit import commit
from deltacheck.store.root import Root


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was done. ``leaves``: how many were written whole, one in tiles counting once;
    ``deltas``:
    of the longest chain before; ``stored_bytes``: of all new files.
    """

    step: int
    seq: int
    leaves: int
    deltas: int
    stored_bytes: int


def compact(root: Root, *, io_timeout_seconds: float = 600.0) -> Compacted | None:
    """Write every leaf of the newest step that has deltas as a keyframe, and put a manifest that
    needs
    no deltas in the step's place.

    The step is restored as before, bit for bit; so is every other. Until the new manifest is
    committed nothing has changed; after it the old one goes. Segments that no step needs any more
    stay for ``gc``. Holds a few leaves in memory at a time. ``None`` where there is nothing to do.

    REQUIRES: the caller holds the lease. Raises ``StepNotFound`` where there is no step, or where
    the root is a manager's, whose steps are Orbax's; ``Damaged`` or ``ChainBroken``, before
    anything is written, where the step is not whole.
    """
    if root.is_manager_root:
        raise StepNotFound(
            f"{root.path} is the root of a CheckpointManager: its steps cannot be written again in"
            " their place"
        )
    before = root.manifest()
    chains = resolve_chains(root, before, before.stored)
    long = {path: found for path, found in sorted(chains.items()) if found.deltas}
    if not long:
        return None
    seq = root.next_seq()
    ref = write_whole(root.store.writer(seq), long, io_timeout_seconds)
    kept = {found.key[0].id for path, found in chains.items() if path not in long}
    segments = (*(old for old in before.segments if old.id in kept), ref)
    after = renewed(root, before, seq, segments, "compacting")
    written = commit(root.path, after, root.store.durability)
    collect.delete_checkpoint(root, before.seq)
    leaves = {tiles.leaf_of(path) for path in long}
    deltas = max(len(found.deltas) for found in long.values())
    return Compacted(before.step, seq, len(leaves), deltas, ref.stored_bytes + written.stored_bytes)
