"""Match the leaves of a step with the leaves of a state in memory."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from typing import NamedTuple
from urllib.parse import unquote

from deltacheck.errors import TreeMismatch
from deltacheck.leaf.containers import DTYPE
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import NUMPY_SCALAR, ArrayLeaf, ArrayNode, Flat, array_paths, scalars
from deltacheck.restore.follow.follower import LeafChange, Update
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
    problems = tree_differences(manifest, target, arrays, partly=partly, omitted=omitted)
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


def tree_differences(
    manifest: Manifest,
    target: Flat,
    arrays: Mapping[str, ArrayNode],
    *,
    partly: bool = False,
    omitted: Container[str] = (),
    skipped: Set[str] | None = None,
) -> list[str]:
    """Return a message for each leaf that only one of two trees has, or only one as an array.

    Args:
        manifest, target, arrays, partly, omitted: As in ``match_targets``.
        skipped: The places of ``None`` in the target that stand for any leaf. ``None``: only arrays
            are compared, and not numbers and text. Numbers of two types are no difference.

    Returns:
        The messages. Each has the path of the leaf and the values of both trees.
    """
    step_arrays = manifest.arrays
    surplus = set(arrays.keys() - step_arrays.keys())
    missing = set(step_arrays.keys() - arrays.keys())
    if not surplus and not missing and skipped is None:
        return []
    saved, requested = scalars(manifest.tree), scalars(target.skeleton)
    if skipped is not None:
        surplus |= {
            path
            for path, value in requested.items()
            if (_is_text_and_number(value, saved[path]) if path in saved else path not in skipped)
        }
        missing |= saved.keys() - requested.keys()
    missing = {path for path in missing if not partly and path not in omitted}
    if not surplus and not missing:
        return []
    step = _Side.of(
        f"step {manifest.step}",
        saved,
        {path: text_of(manifest.specs[node.owner]) for path, node in step_arrays.items()},
    )
    requested_side = _Side.of(
        "the target",
        requested,
        {path: text_of(target.leaves[node.owner]) for path, node in arrays.items()},
    )
    # A leaf in the place of a subtree is named once.
    surplus_side = _Side.of("", {}, dict.fromkeys(surplus, ""))
    return [_difference(path, requested_side, step) for path in sorted(surplus)] + [
        _difference(path, step, requested_side)
        for path in sorted(missing - surplus)
        if path not in surplus_side.subtrees and surplus_side.leaf_above(path) is None
    ]


class _Side(NamedTuple):
    """The leaves of one of two trees that differ.

    Attributes:
        name: The name of the tree in messages.
        leaves: The text of each leaf, by path.
        subtrees: The first leaf of each subtree, by the path of the subtree.
        keys: Each path by its keys, of which numbers are text, too.
    """

    name: str
    leaves: Mapping[str, str]
    subtrees: Mapping[str, str]
    keys: Mapping[str, str]

    @classmethod
    def of(cls, name: str, scalars: Mapping[str, object], arrays: Mapping[str, str]) -> _Side:
        """Return a side with these leaves."""
        leaves = {path: _shortened(repr(value)) for path, value in scalars.items()} | dict(arrays)
        subtrees: dict[str, str] = {}
        for path in sorted(leaves):
            for parent in _parents(path):
                subtrees.setdefault(parent, path)
        return cls(name, leaves, subtrees, {unquote(path): path for path in leaves})

    def leaf_above(self, path: str) -> str | None:
        """Return the leaf that is in the place of a subtree with this path."""
        return next((parent for parent in _parents(path) if parent in self.leaves), None)


def _parents(path: str) -> list[str]:
    """Return the paths of the containers of a leaf; that of the whole tree is empty."""
    keys = path.split("/") if path else []
    return ["/".join(keys[:count]) for count in range(len(keys))]


def _difference(path: str, side: _Side, counterpart: _Side) -> str:
    """Return a message on a leaf of a tree that is not in the other tree, or of another type."""
    value = side.leaves[path]
    if path in counterpart.leaves:
        sides = sorted([(side.name, value), (counterpart.name, counterpart.leaves[path])])
        return f"leaf {path!r} is " + ", ".join(f"{text} in {name}" for name, text in sides)
    if path in counterpart.subtrees:
        inner = counterpart.subtrees[path]
        return (
            f"leaf {path!r} is {value} in {side.name}, a subtree in {counterpart.name} (its leaf"
            f" {inner!r} is {counterpart.leaves[inner]})"
        )
    container = counterpart.leaf_above(path)
    if container is not None:
        return (
            f"leaf {container!r} is {counterpart.leaves[container]} in {counterpart.name}, a"
            f" subtree in {side.name} (its leaf {path!r} is {value})"
        )
    twin = counterpart.keys.get(unquote(path))
    if twin is not None:
        return (
            f"leaf {path!r} of {side.name} is not in {counterpart.name}, which has {twin!r}"
            f" ({counterpart.leaves[twin]}): a key is an integer in one and text in the other"
        )
    return f"leaf {path!r} of {side.name} is not in {counterpart.name} ({value} in {side.name})"


def _is_text_and_number(value: object, saved_value: object) -> bool:
    """Return ``True`` if one of two scalars is text or bytes, and the other one of another type."""
    kinds = {type(value), type(saved_value)}
    return len(kinds) > 1 and not kinds.isdisjoint((str, bytes)) and type(None) not in kinds


def text_of(leaf: ArrayLeaf | LeafSpec) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    return [f"leaf {path!r} is {text_of(spec)} in step {step}, {text_of(leaf)} in the {holder}"]


def _are_equal(manifest: Manifest, path: str, tied_path: str) -> bool:
    """Return ``True`` if the digests of two leaves of a step show that they are equal."""
    digest = manifest.digest_of(path)
    # Leaves without a digest (bounded leaves and leaves in tiles) cannot be proven to be equal.
    return bool(digest) and digest == manifest.digest_of(tied_path)
