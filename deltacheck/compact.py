"""Rewrite the newest step of a root so that a restore applies no deltas, without the training that made it."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from deltacheck import chain
from deltacheck.codec.base import U64
from deltacheck.errors import StepNotFound
from deltacheck.store import collect, layout
from deltacheck.store.root import Root, commit
from deltacheck.store.schema import KeyframeAt, LeafEntry, Manifest
from deltacheck.store.segment import is_packed


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was done. ``leaves``: how many were written whole; ``deltas``: of the longest chain before; ``stored_bytes``: of all new files."""

    step: int
    seq: int
    leaves: int
    deltas: int
    stored_bytes: int


def compact(root: Root, *, io_timeout_seconds: float = 600.0) -> Compacted | None:
    """Write every leaf of the newest step that has deltas as a keyframe, and put a manifest that needs no deltas in the step's place.

    The step is restored as before, bit for bit; so is every other. Until the new manifest is committed nothing has changed; after it
    the old one goes. Segments that no step needs any more stay for ``gc``. Holds one leaf in memory at a time. ``None`` where there is nothing to do.

    REQUIRES: the caller holds the lease. Raises ``StepNotFound`` where there is no step, or where the root is a manager's, whose steps are
    Orbax's; ``Damaged`` or ``ChainBroken``, before anything is written, where the step is not whole.
    """
    if root.is_manager_root:
        raise StepNotFound(f"{root.path} is the root of a CheckpointManager: its steps cannot be written again in their place")
    before = root.manifest()
    chains = chain.resolve(root, before, before.leaves)
    long = {path: found for path, found in sorted(chains.items()) if found.deltas}
    if not long:
        return None
    seq = root.next_seq()
    writer = root.store.writer(seq)
    names = layout.array_names([path for path, found in long.items() if not is_packed(found.spec)])
    entries: dict[str, LeafEntry] = {}
    tables: list[U64] = []
    rows = 0
    for path, found in long.items():
        spec = found.spec
        data = chain.load({path: found}, {path: list(range(spec.chunk_count))})[path]
        if is_packed(spec):
            key = writer.put_packed(spec, data)
        else:
            writer.put_natural(spec, names[path], data).result(timeout=io_timeout_seconds)
            key = KeyframeAt(array=names[path])
        entries[path] = LeafEntry(spec.dtype, spec.shape, spec.chunk, before.leaves[path].digest, rows, key=key)
        tables.append(found.digests)
        rows += found.digests.shape[0]
    ref = writer.finish(entries, np.concatenate(tables), time.monotonic() + io_timeout_seconds)
    kept = {found.key[0].id for path, found in chains.items() if path not in long}
    segments = (*(old for old in before.segments if old.id in kept), ref)
    about = f"process {os.getpid()} on {socket.gethostname()}, compacting"
    durability = root.store.durability
    # The nonce stays: it is the same save, and its tags go by that.
    after: Manifest = msgspec.structs.replace(before, seq=seq, writer=about, segments=segments, durability=durability.value)
    written = commit(root.path, after, durability)
    collect.delete_checkpoint(root, before.seq)
    return Compacted(before.step, seq, len(long), max(len(found.deltas) for found in long.values()), ref.stored_bytes + written)
