"""Match the leaves of a step with the leaves of a state in memory."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from deltacheck.errors import TreeMismatch
from deltacheck.leaf.containers import DTYPE
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_SCALAR, ArrayLeaf, ArrayNode, Flat, array_paths
from deltacheck.restore.follower import LeafChange, Update
from deltacheck.store.manifest import Manifest

# A model of another size differs in every leaf. The first few leaves show the cause.
_SHOWN_PROBLEMS = 5


def match_targets(
    manifest: Manifest,
    target: Flat,
    arrays: Mapping[str, ArrayNode],
    partly: bool = False,
    *,
    omitted: Container[str] = (),
    remedy: str = "Restore without a target to get the tree as it was saved",
) -> dict[str, str]:
    """Return the stored leaf for each leaf of a restore target.

    Args:
        manifest: The step.
        target: The target, flattened.
        arrays: The arrays of its skeleton (``tree.array_nodes``).
        partly: Accept a target that does not have all leaves of the step.
        omitted: Leaves of the step that the target may lack in any case.
        remedy: What the caller can do if they differ, for the message.

    Returns:
        Target path -> stored path. Tied leaves of the target appear once.

    Raises:
        TreeMismatch: Paths, shapes or dtypes differ, or leaves that are tied in the target were
            saved with different content. The message names the leaves and both values.
    """
    step_arrays, specs = manifest.arrays, manifest.specs
    common = sorted(arrays.keys() & step_arrays.keys())
    problems = [
        f"leaf {path!r} of the target is not in step {manifest.step}"
        for path in sorted(arrays.keys() - step_arrays.keys())
    ]
    problems += [
        f"leaf {path!r} of step {manifest.step} is not in the target"
        for path in sorted(step_arrays.keys() - arrays.keys())
        if not partly and path not in omitted
    ]
    # By path and not by owner: tied leaves may be views of another element type.
    problems += [
        f"leaf {path!r} is {_type_of(step_arrays[path])} in step {manifest.step},"
        f" {_type_of(arrays[path])} in the target"
        for path in common
        if _type_of(step_arrays[path]) != _type_of(arrays[path])
    ]
    sources: dict[str, str] = {}
    for path in common:
        owner, stored_owner = arrays[path].owner, step_arrays[path].owner
        problems += _mismatch(
            path, target.leaves[owner], specs[stored_owner], manifest.step, "target"
        )
        source = sources.setdefault(owner, stored_owner)
        # Tied leaves of the target share memory, so they can hold only one content. Equal digests
        # prove that it does not matter whose content is read.
        if source != stored_owner and not _are_equal(manifest, source, stored_owner):
            problems.append(
                f"leaves {owner!r} and {path!r} are tied in the target, but were saved with"
                " different content"
            )
    raise_mismatches(problems, remedy)
    return sources


def changes_of(update: Update, target: Flat) -> dict[str, LeafChange]:
    """Return the change for each leaf of a state that follows a run.

    Args:
        update: The update that was polled.
        target: The state, flattened.

    Returns:
        Target path -> change, for the leaves that change. Tied leaves of the state appear once.

    Raises:
        TreeMismatch: The state does not have exactly the followed leaves, or one has another shape
            or dtype, or ties leaves that are two in the step, or is a NumPy scalar, which cannot be
            changed in place.
    """
    owners = array_paths(target.skeleton)
    problems = [
        f"leaf {path!r} is followed, but not in the state"
        for path in sorted(update.names.keys() - owners.keys())
    ]
    problems += [
        f"leaf {path!r} of the state is not followed: it would stay as it is"
        for path in sorted(owners.keys() - update.names.keys())
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
        leaf = target.leaves[path]
        problems += _mismatch(path, leaf, change.spec, update.step, "state")
        if leaf.tag == NUMPY_SCALAR:
            problems.append(
                f"leaf {path!r} is a NumPy scalar, which cannot be changed in place; make it an"
                " array"
            )
    raise_mismatches(problems, "Follow what the state holds: follow(root, leaves=lambda path: ...)")
    return changes


def raise_mismatches(problems: Sequence[str], remedy: str) -> None:
    """Raise ``TreeMismatch`` with the first problems and the remedy, if there are any."""
    if not problems:
        return
    text = "; ".join(problems[:_SHOWN_PROBLEMS])
    if len(problems) > _SHOWN_PROBLEMS:
        text += f"; and {len(problems) - _SHOWN_PROBLEMS} more"
    raise TreeMismatch(f"{text}. {remedy}")


def _type_of(node: ArrayNode) -> str:
    """Return the element type of an array if only its framework has it."""
    is_own = node.tag is not None and node.tag.startswith(DTYPE)
    return str(node.tag) if is_own else "another type"


def _mismatch(path: str, leaf: ArrayLeaf, spec: LeafSpec, step: int, holder: str) -> list[str]:
    """Return a message if shape or dtype of a leaf differ from the step's, else an empty list."""
    if (leaf.shape, leaf.dtype) == (spec.shape, spec.dtype):
        return []
    return [
        f"leaf {path!r} is {spec.dtype}{list(spec.shape)} in step {step},"
        f" {leaf.dtype}{list(leaf.shape)} in the {holder}"
    ]


def _are_equal(manifest: Manifest, path: str, other: str) -> bool:
    """Return ``True`` if the digests of two leaves of a step show that they are equal."""
    digest = manifest.digest_of(path)
    # Leaves without a digest (bounded leaves and leaves in tiles) cannot be proven to be equal.
    return bool(digest) and digest == manifest.digest_of(other)
