"""Import the steps of a plain Orbax ``CheckpointManager``, and export a step to plain Orbax."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from deltacheck.backends.orbax.handler import DeltaSaveArgs
from deltacheck.backends.orbax.manager import manager
from deltacheck.backends.orbax.state.sampling import item_of, steps
from deltacheck.errors import Damaged, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.tree import Json, Node
from deltacheck.restore.content import Loaded, as_array
from deltacheck.restore.export import Progress, resolve
from deltacheck.restore.values import load_leaves
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

__all__ = ["ingest", "steps", "write_orbax"]

# Orbax keeps integers of at most 64 bits.
_EXACT_INTEGERS = range(-(2**63), 2**63)


def ingest(
    root: str | os.PathLike[str], source: str | os.PathLike[str], item: str | None = None
) -> Iterator[tuple[Path, int]]:
    """Save every step of ``source`` into a manager root, ascending; yield each when committed.

    The arrays are NumPy's.

    Args:
        root: The root to import into.
        source: The folder of the plain manager.
        item: The item of each step, needed only if there are several.

    Raises:
        ValueError: ``root`` has one of the steps. Nothing was written.
        StepNotFound: There is no such item.
        Damaged: Orbax cannot read a step; the message names it.
    """
    source_steps = steps(source)
    # An import keeps every step; retention is up to later saves.
    with manager(root, ocp.CheckpointManagerOptions(max_to_keep=None)) as target:
        # All steps are checked before the first is written.
        existing = sorted({step for step, _ in source_steps} & set(target.all_steps()))
        if existing:
            raise ValueError(f"{root} has step {existing[0]} already; import into another root")
        for step, place in source_steps:
            target.save(
                step, args=DeltaSaveArgs(_read(place / item_of(step, place, item))), force=True
            )
            # The caller may delete the source of a step once it gets it, so the step is read back
            # first.
            target.wait_until_finished()
            open_root(root).manifest(step)
            yield place, step


def _read(path: Path) -> Any:
    """Return a tree as Orbax has written it.

    Arrays are NumPy's in their own dtype; numbers and texts are Python's.
    """
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(path).item_metadata.tree
            return checkpointer.restore(
                path, args=ocp.args.PyTreeRestore(restore_args=jax.tree.map(_as_numpy, metadata))
            )
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise Damaged(
            f"{path} cannot be read by Orbax: {type(error).__name__}: {reason}"
        ) from error


def _as_numpy(metadata: Any) -> Any:
    """Return the options to read a leaf.

    Without ``jax_enable_x64``, JAX would cast 64-bit numbers.
    """
    plain = isinstance(
        metadata, ocp.metadata.value.ScalarMetadata | ocp.metadata.value.StringMetadata
    )
    return ocp.RestoreArgs() if plain else ocp.RestoreArgs(restore_type=np.ndarray)


def write_orbax(
    path: Path,
    root: Root,
    manifest: Manifest,
    keys: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step as a folder that ``ocp.StandardCheckpointer().restore(path)`` reads.

    The folder appears whole. All leaves are in memory at once.

    Args:
        path: The folder, which must not exist.
        root: The root.
        manifest: The step.
        keys: Key -> leaf path: write a flat dict of arrays; ``None``: write the nested state.
        progress: Called with the bytes of each leaf.

    Raises:
        UnsupportedLeaf: Orbax does not keep a value (empty arrays, bytes, integers of more than 64
            bits); the message names it.
        FileExistsError: ``path`` exists.
    """
    owners = tree.array_paths(manifest.tree)
    loaded: dict[str, Loaded] = {}
    for owner, leaf in resolve(
        root, manifest, {owner: owner for owner in (owners if keys is None else keys).values()}
    ).items():
        if leaf.spec.raw_bytes == 0:
            raise UnsupportedLeaf(
                f"leaf {owner!r} is empty, and Orbax keeps no empty arrays; leave it out with"
                " --leaves"
            )
        loaded |= load_leaves({owner: leaf})
        if progress is not None:
            progress(leaf.spec.raw_bytes)
    arrays = {owner: as_array(item) for owner, item in loaded.items()}
    if keys is None:
        for name, value in tree.scalars(manifest.tree).items():
            # Refused before anything is written.
            if isinstance(value, bytes | bytearray | complex) or (
                isinstance(value, int) and value not in _EXACT_INTEGERS
            ):
                raise UnsupportedLeaf(
                    f"leaf {name!r} is {value!r}, which Orbax does not keep; leave it out with"
                    " --leaves"
                )
        state = tree.unflatten(
            _with_plain_containers(manifest.tree), lambda place, owner, tag: arrays[owner]
        )
    else:
        state = {key: arrays[owner] for key, owner in keys.items()}
    if path.exists():
        raise FileExistsError(f"{path} is there and was left as it is")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(state))


def _with_plain_containers(node: Node) -> Node:
    """Return a skeleton without types of containers that JAX would take for leaves."""
    plain = {name: value for name, value in node.items() if name not in ("c", "a", "maxlen")}
    if plain["t"] == "deque":
        plain["t"] = "list"
    for name in ("k", "n"):
        if name in plain:
            plain[name] = cast(
                "Json",
                [
                    _with_plain_containers(item)
                    if name == "n"
                    else [item[0], _with_plain_containers(item[1])]
                    for item in cast("list[Any]", plain[name])
                ],
            )
    return plain
