"""Make steps of ours out of those of a plain Orbax ``CheckpointManager``, and a plain Orbax
checkpoint out of one of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from deltacheck.backends.orbax.handler import DeltaSaveArgs
from deltacheck.backends.orbax.manager import manager
from deltacheck.backends.orbax.state.sampling import item_of, steps
from deltacheck.errors import Damaged, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.restore.content import Loaded, as_array
from deltacheck.restore.export import Progress, resolve
from deltacheck.restore.values import load_leaves
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root

__all__ = ["ingest", "steps", "write_orbax"]

_EXACT_INTEGERS = range(-(2**63), 2**63)


def ingest(
    root: str | os.PathLike[str], source: str | os.PathLike[str], item: str | None = None
) -> Iterator[tuple[Path, int]]:
    """Save every step of ``source`` into a manager root, ascending, and give each when it is
    committed; its arrays are NumPy's.

    ``item``: which item of each step, needed only where they have several. Raises ``ValueError``
    before anything is written where ``root`` has one of the steps, ``StepNotFound`` for an item
    that is not there, ``Damaged`` naming the step that Orbax cannot read.
    """
    found = steps(source)
    with manager(root, ocp.CheckpointManagerOptions(max_to_keep=None)) as target:
        taken = sorted({step for step, _ in found} & set(target.all_steps()))
        if taken:
            raise ValueError(f"{root} has step {taken[0]} already; import into another root")
        for step, place in found:
            target.save(
                step, args=DeltaSaveArgs(_read(place / item_of(step, place, item))), force=True
            )
            target.wait_until_finished()
            open_root(root).manifest(step)
            yield place, step


def _read(path: Path) -> Any:
    """A tree as Orbax wrote it: arrays as NumPy, in the type that they were written in, and
    Python's numbers and texts as such.
    """
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            about = checkpointer.metadata(path).item_metadata.tree
            return checkpointer.restore(
                path, args=ocp.args.PyTreeRestore(restore_args=jax.tree.map(_as_numpy, about))
            )
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise Damaged(
            f"{path} cannot be read by Orbax: {type(error).__name__}: {reason}"
        ) from error


def _as_numpy(about: Any) -> Any:
    """How to read a leaf. JAX would cast 64-bit numbers where ``jax_enable_x64`` is not set."""
    plain = isinstance(about, ocp.metadata.value.ScalarMetadata | ocp.metadata.value.StringMetadata)
    return ocp.RestoreArgs() if plain else ocp.RestoreArgs(restore_type=np.ndarray)


def write_orbax(
    path: Path,
    root: Root,
    manifest: Manifest,
    keys: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step as the folder that ``ocp.StandardCheckpointer().restore(path)`` reads; it
    appears
    whole.

    Without ``keys`` the nested state, with ``keys`` (key -> leaf path) a flat dict of arrays. Holds
    all of the leaves in memory. Raises ``UnsupportedLeaf`` naming what Orbax does not keep (empty
    arrays, bytes, integers of more than 64 bits), ``FileExistsError``.
    """
    owners = tree.array_paths(manifest.tree)
    loaded: dict[str, Loaded] = {}
    for owner, leaf in resolve(
        root, manifest, {o: o for o in (owners if keys is None else keys).values()}
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
            if isinstance(value, bytes | complex) or (
                isinstance(value, int) and value not in _EXACT_INTEGERS
            ):
                raise UnsupportedLeaf(
                    f"leaf {name!r} is {value!r}, which Orbax does not keep; leave it out with"
                    " --leaves"
                )
        state = tree.unflatten(manifest.tree, lambda place, owner, tag: arrays[owner])
    else:
        state = {key: arrays[owner] for key, owner in keys.items()}
    if path.exists():
        raise FileExistsError(f"{path} is there and was left as it is")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(state))
