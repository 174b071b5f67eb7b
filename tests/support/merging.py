"""Merge the deltas of the newest step at once, as a saver merges them behind a training."""

from __future__ import annotations

from deltacheck.restore.chain import resolve_chains
from deltacheck.save.chains.merged_deltas import Run, chains_before, write_merged
from deltacheck.save.chains.whole_leaves import IO_TIMEOUT_SECONDS, manifest_on
from deltacheck.store import collect
from deltacheck.store.commit import commit
from deltacheck.store.roots.root import Root


def merge_newest(root: Root) -> frozenset[str]:
    """Replace the newest step by one with one delta for each leaf that had several.

    Returns:
        The stored paths of the merged leaves; none: nothing has changed.
    """
    manifest, seq = root.manifest(), root.next_seq()
    chains = resolve_chains(root, manifest, manifest.stored)
    long_chains = {path: chain for path, chain in chains.items() if len(chain.deltas) > 1}
    if not long_chains:
        return frozenset()
    before = chains_before(root, manifest, long_chains, dict.fromkeys(long_chains, 0))
    runs = {path: Run(before[path], chain, lambda *_: True) for path, chain in long_chains.items()}
    merged = write_merged(root.store.writer(seq), runs, IO_TIMEOUT_SECONDS, lambda: False)
    if merged.ref is None:
        return frozenset()
    needed_ids = {
        segment.id
        for path, chain in chains.items()
        for segment, _ in (chain.key, *(() if path in merged.decoded_bytes else chain.deltas))
    }
    segments = (*(ref for ref in manifest.segments if ref.id in needed_ids), merged.ref)
    commit(root.path, manifest_on(root, manifest, seq, segments, "merging"), root.store.durability)
    collect.delete_checkpoint(root, manifest.seq)
    return frozenset(merged.decoded_bytes)
