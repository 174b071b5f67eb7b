"""What a backend must do, and what all backends share.

A backend turns a tree of its framework into ``tree.Flat`` (``describe``), gives the bytes of a leaf
in the form that its codec takes (capture), and puts restored bytes where the framework wants them
(place). It keeps no format knowledge of its own.
"""

from __future__ import annotations

import numpy as np

from deltacheck.errors import TreeMismatch, UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_ARRAY, NUMPY_SCALAR, ArrayLeaf, Flat, array_paths
from deltacheck.restore.follower import LeafChange, Update
from deltacheck.restore.values import Loaded
from deltacheck.store.manifest import Manifest

_BYTE_SWAPPED = ">" if np.little_endian else "<"


def describe_numpy(value: object) -> ArrayLeaf | None:
    """NumPy arrays and scalars, tagged so that they come back as such; ``None`` for anything
    else.
    """
    if isinstance(value, np.generic) and not isinstance(value, np.str_ | np.bytes_ | np.void):
        return ArrayLeaf((), dtype_named(value.dtype.name).name, None, NUMPY_SCALAR)
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.byteorder == _BYTE_SWAPPED or isinstance(value, np.ma.MaskedArray):
        raise UnsupportedLeaf(
            f"a {type(value).__name__} of dtype {value.dtype.str} cannot be kept exactly; convert"
            " it to native byte order, unmasked"
        )
    pointer = value.__array_interface__["data"][0]
    identity = (pointer, value.strides) if value.size else None
    return ArrayLeaf(value.shape, dtype_named(value.dtype.name).name, identity, NUMPY_ARRAY)


def numpy_bytes(value: np.ndarray | np.generic) -> np.ndarray:
    """The bytes of a NumPy array, uint8 1-D in C order; a view where its memory allows it."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def specs_of(flat: Flat) -> dict[str, LeafSpec]:
    """The leaf specs of a flattened tree, in its order."""
    return {path: LeafSpec.of(path, leaf.shape, leaf.dtype) for path, leaf in flat.leaves.items()}


def place_numpy(item: Loaded, tag: str | None) -> object | None:
    """A leaf that was saved from NumPy, as what it was; ``None`` for other tags. The result owns
    its memory.
    """
    if tag not in (NUMPY_ARRAY, NUMPY_SCALAR):
        return None
    spec = item.spec
    array = item.data.copy().view(spec.element.numpy).reshape(spec.shape)
    return array if tag == NUMPY_ARRAY else array[()]


def match_targets(manifest: Manifest, target: Flat, partly: bool = False) -> dict[str, str]:
    """Which stored leaf fills which leaf of a restore target: target path (ties once) -> stored
    path.
    ``partly``: the target need not have all.

    Raises ``TreeMismatch`` naming the leaves and both values where paths, shapes or dtypes differ,
    or where leaves that are tied in the target were saved with different content.
    """
    stored, wanted, specs = array_paths(manifest.tree), array_paths(target.skeleton), manifest.specs
    missing, unexpected = (
        sorted(wanted.keys() - stored.keys()),
        sorted(stored.keys() - wanted.keys()),
    )
    problems = [f"leaf {p!r} of the target is not in step {manifest.step}" for p in missing]
    problems += [
        f"leaf {p!r} of step {manifest.step} is not in the target" for p in unexpected if not partly
    ]
    chosen: dict[str, str] = {}
    for path in sorted(wanted.keys() & stored.keys()):
        owner, leaf, spec = wanted[path], target.leaves[wanted[path]], specs[stored[path]]
        if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
            problems.append(
                f"leaf {path!r} is {spec.dtype}{list(spec.shape)} in step {manifest.step},"
                f" {leaf.dtype}{list(leaf.shape)} in the target"
            )
        other = chosen.setdefault(owner, stored[path])
        if other != stored[path] and not _equal(manifest, other, stored[path]):
            problems.append(
                f"leaves {owner!r} and {path!r} are tied in the target, but were saved with"
                " different content"
            )
    if problems:
        shown = "; ".join(problems[:5]) + (
            f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        )
        raise TreeMismatch(f"{shown}. Restore without a target to get the tree as it was saved")
    return chosen


def changes_of(update: Update, target: Flat) -> dict[str, LeafChange]:
    """Which change goes into which leaf of a tree that follows a run: path in ``target`` (ties
    once)
    -> change.

    Raises ``TreeMismatch`` where the tree does not have the followed leaves and no others, or one
    of another shape or dtype, or ties leaves that are two in the step, or has a NumPy scalar, which
    cannot be changed.
    """
    owners = array_paths(target.skeleton)
    missing, unexpected = (
        sorted(update.names.keys() - owners.keys()),
        sorted(owners.keys() - update.names.keys()),
    )
    problems = [f"leaf {path!r} is followed, but not in the state" for path in missing]
    problems += [
        f"leaf {path!r} of the state is not followed: it would stay as it is" for path in unexpected
    ]
    sources: dict[str, str] = {}
    for path in sorted(owners.keys() & update.names.keys()):
        if sources.setdefault(owners[path], update.names[path]) != update.names[path]:
            problems.append(
                f"leaves {owners[path]!r} and {path!r} are tied in the state, but are two in step"
                f" {update.step}"
            )
    changes = {
        path: update.changes[source] for path, source in sources.items() if source in update.changes
    }
    for path, change in changes.items():
        leaf, spec = target.leaves[path], change.spec
        if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
            problems.append(
                f"leaf {path!r} is {spec.dtype}{list(spec.shape)} in step {update.step},"
                f" {leaf.dtype}{list(leaf.shape)} in the state"
            )
        if leaf.tag == NUMPY_SCALAR:
            problems.append(
                f"leaf {path!r} is a NumPy scalar, which cannot be changed in place; make it an"
                " array"
            )
    if problems:
        shown = "; ".join(problems[:5]) + (
            f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        )
        raise TreeMismatch(
            f"{shown}. Follow what the state holds: follow(root, leaves=lambda path: ...)"
        )
    return changes


def _equal(manifest: Manifest, one: str, other: str) -> bool:
    """Whether two leaves of a step are known to be equal."""
    digest = manifest.digest_of(one)
    return bool(digest) and digest == manifest.digest_of(other)
