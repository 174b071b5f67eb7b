"""Write a checkpoint as one file for ``torch.load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

import torch

from deltacheck.backends.numpy_leaves import place_numpy
from deltacheck.backends.torch.state.classes import build, named
from deltacheck.backends.torch.state.leaves import shaped
from deltacheck.leaf import tree
from deltacheck.leaf.containers import Node
from deltacheck.restore.export import Progress, read_all, require_types
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

# Classes that ``torch.load`` makes without further consent, and those of Python's that it does not.
_ACCEPTED = ("collections.Counter", "bytearray", "torch.Size", "torch.dtype")
_REFUSED = ("collections.defaultdict", "time.struct_time")


def write_torch(
    file: BinaryIO,
    root: Root,
    manifest: Manifest,
    keys: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> bool:
    """Write a step with ``torch.save``.

    All leaves are in memory at once, because the format cannot be streamed.

    Args:
        file: The file to write to.
        root: The root.
        manifest: The step.
        keys: Key -> leaf path: write a flat dict of tensors; ``None``: write the nested state that
            ``Engine.restore`` returns, with its ties.
        progress: Called with the bytes of each leaf.

    Returns:
        ``True`` if ``torch.load(..., weights_only=True)`` accepts the file. NumPy arrays and some
        containers, such as deques, need ``weights_only=False``.

    Raises:
        UnsupportedLeaf: ``torch.save`` lacks an element type. Nothing was written.
    """
    nodes = tree.array_nodes(manifest.tree)
    owners = {path: node.owner for path, node in nodes.items()} if keys is None else keys
    numpy_tags = (tree.NUMPY_ARRAY, tree.NUMPY_SCALAR)
    require_types(
        "torch",
        (
            (path, manifest.spec(owner).dtype)
            for path, owner in owners.items()
            # NumPy pickles its arrays itself.
            if keys is not None or nodes[path].tag not in numpy_tags
        ),
    )
    loaded = read_all(root, manifest, owners.values(), progress)
    if keys is not None:
        tags = tree.flat_tags(manifest.tree)
        tensors = {path: shaped(item, tags.get(path)) for path, item in loaded.items()}
        _save({key: tensors[owner] for key, owner in keys.items()}, file)
        return True
    plain = True
    # By owner and tag: equal pairs are one object, so that ``torch.save`` keeps the tie.
    values: dict[tuple[str, str | None], object] = {}

    def place(path: str, owner: str, tag: str | None) -> object:
        nonlocal plain
        if (owner, tag) not in values:
            array = place_numpy(loaded[owner], tag)
            # NumPy arrays are pickled by NumPy's functions, which ``weights_only=True`` refuses.
            plain = plain and array is None
            values[owner, tag] = shaped(loaded[owner], tag) if array is None else array
        return values[owner, tag]

    state = tree.unflatten(manifest.tree, place, _built)
    _save(state, file)
    return plain and _is_accepted(manifest.tree)


def _save(state: object, file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # Of a write that failed, torch reports the position only.
        cause = error.__context__
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror) from error


def _built(path: str, node: Node, plain: object, attributes: Mapping[str, object]) -> object:
    """Return a value of its class, or in Python's own types if this process has not named it."""
    name = str(node["c"])
    is_known = name in _ACCEPTED or named(name) is not None
    return build(path, node, plain, attributes) if is_known else plain


def _is_accepted(node: object) -> bool:
    """Return ``True`` if ``torch.load(..., weights_only=True)`` makes all values of ``_built``."""
    if isinstance(node, dict):
        name = str(node.get("c", _ACCEPTED[0]))
        has_class = name in _REFUSED or (name not in _ACCEPTED and named(name) is not None)
        return (
            node.get("t") != "deque"
            and (node.get("t") == "fields" or not has_class)
            and all(_is_accepted(value) for key, value in node.items() if key in ("k", "n", "a"))
        )
    return not isinstance(node, list) or all(map(_is_accepted, node))
