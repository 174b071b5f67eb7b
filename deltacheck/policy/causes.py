"""The cause of the bytes that a save writes for a leaf: a pure function of two manifests."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from deltacheck.leaf.contracts import Reused

if TYPE_CHECKING:
    from deltacheck.store.manifest import Manifest

# Permanent names, from the most avoidable cause to the least.
KEYFRAME, LATTICE, REFRESH, EVENT, CHANGED = "keyframe", "lattice", "refresh", "event", "changed"
MERGED = "merged"  # deltas of earlier saves, which were merged behind the training
REST = "rest"  # tables and manifest, which belong to no leaf
CAUSES = (KEYFRAME, LATTICE, REFRESH, EVENT, CHANGED)


def cause_of(
    path: str,
    *,
    is_array: bool,
    before: Manifest | None,
    manifest: Manifest,
    promised: Collection[str],
) -> str:
    """Return the cause for which a save has written a leaf.

    - ``lattice``: a master is stored on another lattice than before, so every code is new.
    - ``refresh``: moments that would have been reused were too old or had drifted too far.
    - ``event``: a leaf that had a weaker contract is stored exactly, because an event or a guard
      ended that contract.
    - ``keyframe``: the leaf is stored whole because it is new or its chain reached a limit.
    - ``changed``: the leaf is stored as the difference from the save before, or whole in encoded
      form because that takes hardly more bytes.

    The first of these that applies is returned.

    Args:
        path: The path of the leaf. The save has written it.
        is_array: If True, it was written whole, as an array.
        before: The manifest of the previous save, ``None`` for the first one.
        manifest: The manifest of the save.
        promised: The leaves that had a contract other than ``exact`` in an earlier save.
    """
    if before is not None and _lattices(manifest, path) - _lattices(before, path):
        return LATTICE
    promise = manifest.contracts.get(path)
    if promise is not None and isinstance(promise.terms, Reused):
        return REFRESH
    if promise is None and path in promised:
        return EVENT
    return KEYFRAME if is_array else CHANGED


def _lattices(manifest: Manifest, path: str) -> set[tuple[str, float]]:
    """Return the lattices that a leaf or its tiles are stored on: the rule and the spacing."""
    cut, rule = manifest.tiles.get(path), manifest.derived.get(path)
    rules = (*(() if cut is None else cut.forms), *(() if rule is None else (rule,)))
    # The spacing of ratios follows the count of updates.
    return {(rule.how, rule.spacing) for rule in rules if rule.spacing and rule.how != "ratio"}
