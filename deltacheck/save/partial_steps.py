"""Remove leaves from committed steps, so that the history of a run has weights only.

The manifest of a step is replaced in one rename. Segments are not changed: ``prune`` removes those
that no step needs any more, and ``prune --compact`` writes the others again without such leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import TypeVar

import msgspec

from deltacheck.leaf.contracts import weakest_of
from deltacheck.leaf.tree import Node, array_nodes, without_arrays
from deltacheck.restore.chain import without_unneeded
from deltacheck.restore.resolve import matches, needed_by
from deltacheck.store.documents import encode_manifest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import sync_directory
from deltacheck.store.files.storage import inside
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

_Value = TypeVar("_Value")


def remove_leaves(
    root: Root,
    seqs: Collection[int],
    patterns: Sequence[str],
    *,
    dry_run: bool = False,
    still_ours: Callable[[], None] | None = None,
) -> frozenset[int]:
    """Remove all leaves from checkpoints but those that patterns name.

    Steps of so many ranks that their manifest has the compact form, and steps without any leaf that
    a pattern names stay as they are.

    Args:
        root: An engine root. The caller holds its lease.
        seqs: The sequence numbers of the checkpoints.
        patterns: Paths or patterns of leaves.
        dry_run: Change nothing.
        still_ours: Raises if the right to write has been lost.

    Returns:
        The sequence numbers of the checkpoints that have lost leaves, or would.

    Raises:
        Damaged: The kept leaves of a step are not whole. Steps before it have been changed.
        RootBusy: The right to write has been lost.
    """
    changed: set[int] = set()
    for ref in root.checkpoints():
        if ref.seq not in seqs:
            continue
        before = root.read(ref.manifest_path)
        after = partial_manifest(root, before, patterns)
        if after == before:
            continue
        changed.add(ref.seq)
        if dry_run:
            continue
        # Checked before each: another process may take the root over while this one hangs.
        if still_ours is not None:
            still_ours()
        folder = inside(root.path, ref.manifest_path.parent)
        # Both manifests restore: the old one also needs segments that are collected later only.
        arrays.replace_file(folder, ref.manifest_path.name, encode_manifest(after))
        sync_directory(folder)
    return frozenset(changed)


def partial_manifest(root: Root, manifest: Manifest, patterns: Sequence[str]) -> Manifest:
    """Return the manifest of the same step with some leaves; itself if nothing is to remove.

    Args:
        root: The root of the step.
        manifest: The step.
        patterns: Paths or patterns of the leaves to keep. Leaves that these follow from stay, too.

    Raises:
        Damaged, ChainBroken: The kept leaves are not whole.
    """
    wanted = {
        path for path in manifest.arrays if any(matches(path, pattern) for pattern in patterns)
    }
    if not wanted or manifest.lane_digests:
        return manifest
    tree, owners, removed = _reduced(manifest, wanted)
    if not removed:
        return manifest
    # A container that was removed whole stands for what was removed below it before.
    earlier = [
        path for path in manifest.absent if not any(path.startswith(f"{n}/") for n in removed)
    ]
    contracts = _only(owners, manifest.contracts)
    arrays_left = array_nodes(tree)
    after = msgspec.structs.replace(
        manifest,
        tree=tree,
        absent=tuple(sorted([*earlier, *removed])),
        leaves=_only(owners, manifest.leaves),
        derived=_only(owners, manifest.derived),
        tiles=_only(owners, manifest.tiles),
        contracts=contracts,
        contract=weakest_of(contracts.values()),
        shardings=tuple(
            msgspec.structs.replace(sharding, leaves=leaves)
            for sharding in manifest.shardings
            if (leaves := tuple(path for path in sharding.leaves if path in arrays_left))
        ),
    )
    after = msgspec.structs.replace(after, must_understand=after.features)
    return without_unneeded(root, after)


def _reduced(manifest: Manifest, wanted: set[str]) -> tuple[Node, set[str], list[str]]:
    """Return the tree of a step with some leaves, and with those that these follow from.

    Args:
        manifest: The step.
        wanted: The leaves to keep.

    Returns:
        The tree, the leaves that hold the bytes of its arrays, and the paths that were removed.
    """
    while True:
        tree, removed = without_arrays(manifest.tree, wanted)
        owners = {node.owner for node in array_nodes(tree).values()}
        sources = set(needed_by(manifest, owners)) - owners
        if not sources:
            return tree, owners, removed
        wanted = wanted | sources


def _only(paths: Container[str], leaves: Mapping[str, _Value]) -> dict[str, _Value]:
    return {path: value for path, value in leaves.items() if path in paths}
