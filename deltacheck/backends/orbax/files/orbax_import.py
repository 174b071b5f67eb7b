"""Import checkpoints of plain Orbax, and export a step to plain Orbax."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from jax.sharding import SingleDeviceSharding

from deltacheck.backends.numpy_leaves import numpy_bytes
from deltacheck.backends.orbax.handler import DeltaSaveArgs
from deltacheck.backends.orbax.manager import manager
from deltacheck.backends.orbax.manager_root.tree_internals import stored_names, tree_checkpointer
from deltacheck.backends.orbax.state.leaves import is_key, is_key_tag, key_of, own_rules
from deltacheck.errors import Damaged, DeltacheckError, StepNotFound, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import translated
from deltacheck.leaf.tree import Json, Node
from deltacheck.restore.content import as_array
from deltacheck.restore.export import Progress, new_folder, read_all, require_types
from deltacheck.store.files.durability import Durability
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root
from deltacheck.store.roots.root import Root

__all__ = ["ingest", "sources_of", "state_of", "steps", "write_orbax"]

# Orbax keeps integers of at most 64 bits.
_EXACT_INTEGERS = range(-(2**63), 2**63)
# Looks for files that late writes of a failed export make.
_LOOKS = 20
_LOOK_SECONDS = 0.1


def sources_of(folder: Path, step: int | None = None) -> list[tuple[int, Path]]:
    """Return the step and path of each checkpoint of a folder, ascending.

    Args:
        folder: The folder of a plain manager, whose steps have numbers; of one checkpoint
            (``StandardCheckpointer``, ``PyTreeCheckpointer``, v1), or of safetensors files.
        step: The step of a folder of one checkpoint. ``None``: the last number in its name.

    Raises:
        ValueError: The folder is neither, or its name has no number, or ``step`` was given for
            steps that have numbers.
    """
    if not (_is_tree(folder) or _items_of(folder) or _is_safetensors(folder)):
        source_steps = steps(folder)
        if not source_steps:
            raise ValueError(
                f"{folder} has no steps of an Orbax CheckpointManager, no checkpoint of Orbax, no"
                " safetensors and no model of Hugging Face; name files, or one of these folders"
            )
        if step is not None:
            raise ValueError(
                f"--step goes with a folder of one checkpoint, and {folder} has the steps"
                f" {[number for number, _ in source_steps]}; to import one, name its folder"
            )
        return source_steps
    numbers = re.findall(r"\d+", folder.absolute().name)
    if step is None and not numbers:
        raise ValueError(f"{folder.name} has no number; say the step with --step")
    return [(int(numbers[-1]) if step is None else step, folder)]


def steps(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the step and folder of each step of a plain ``CheckpointManager``, ascending."""
    # Step folders may have a prefix, such as ``checkpoint_30``.
    names = [
        (path.name.rpartition("_")[2], path) for path in Path(folder).iterdir() if path.is_dir()
    ]
    return sorted((int(name), path) for name, path in names if name.isdecimal())


def _is_tree(folder: Path) -> bool:
    return (folder / "_METADATA").exists()


def _items_of(folder: Path) -> list[Path]:
    """Return the trees in the folder of one checkpoint of several items."""
    # Orbax writes this file for a step, and not for the folder of a manager.
    if not (folder / "_CHECKPOINT_METADATA").exists():
        return []
    return [path for path in folder.iterdir() if _is_tree(path)]


def _is_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def ingest(
    root: str | os.PathLike[str], sources: Sequence[tuple[int, Path]], item: str | None = None
) -> Iterator[tuple[Path, int]]:
    """Save each source as a step of a manager root, ascending; yield each when committed.

    Arrays are NumPy's, and typed PRNG keys JAX's.

    Args:
        root: The root to import into.
        sources: Steps and folders (``sources_of``).
        item: The item of each step, needed only if there are several.

    Raises:
        ValueError: ``root`` has one of the steps. Nothing was written.
        StepNotFound: There is no such item.
        Damaged: Orbax cannot read a step; the message names it.
    """
    # An import keeps every step; retention is up to later saves.
    with manager(root, ocp.CheckpointManagerOptions(max_to_keep=None)) as target:
        # All steps are checked before the first is written.
        existing = sorted({step for step, _ in sources} & set(target.all_steps()))
        if existing:
            raise ValueError(f"{root} has step {existing[0]} already; import into another root")
        for step, place in sources:
            target.save(step, args=DeltaSaveArgs(state_of(step, place, item)), force=True)
            # The caller may delete the source of a step once it gets it, so the step is read back
            # first.
            target.wait_until_finished()
            open_root(root).manifest(step)
            yield place, step


def state_of(step: int, place: Path, item: str | None) -> Any:
    """Return the state of a step. Arrays are NumPy's, and typed PRNG keys JAX's.

    Args:
        step: The step.
        place: Its folder.
        item: The item of the step, needed only if there are several.

    Raises:
        StepNotFound: There is no such item.
        Damaged: Orbax cannot read the step; the message names it.
    """
    if _is_safetensors(place):
        return _read_safetensors(place)
    return _read(place if _is_tree(place) else place / _item_of(step, place, item))


def _item_of(step: int, place: Path, item: str | None) -> str:
    """Return the item of a step: the named one, or the only one.

    Raises:
        StepNotFound: There is no such item, or there are several. The message names them.
    """
    items = sorted(
        # Orbax writes this file for items that are trees, and deltacheck for its own.
        path.name
        for path in place.iterdir()
        if path.is_dir() and (path / "_METADATA").exists() and not (path / "zarr.json").exists()
    )
    if item is None and len(items) != 1:
        raise StepNotFound(
            f"step {step} in {place.parent} has the items {items}; name one with --item"
        )
    if item is not None and item not in items:
        raise StepNotFound(
            f"step {step} in {place.parent} has no item {item!r} that is a tree; it has {items}"
        )
    return item or items[0]


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise Damaged(
            f"{path} cannot be read by Orbax: {type(error).__name__}: {reason}"
        ) from error


def _read(path: Path) -> Any:
    """Return a tree as Orbax has written it.

    Arrays are NumPy's in their own dtype, and typed keys JAX's; numbers and texts are Python's.
    Tuples are tuples if Orbax has written their type, else lists.
    """
    with _damage_named(path), tree_checkpointer() as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata.tree
        restored = checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(restore_args=jax.tree.map(_as_numpy, metadata))
        )
    return jax.tree.map(_without_jax, restored)


def _read_safetensors(folder: Path) -> Any:
    """Return the arrays of a folder of safetensors files, by key, as Orbax reads them."""
    from orbax.checkpoint import v1

    context = v1.Context()
    context.checkpoint_layout = v1.options.CheckpointLayout.SAFETENSORS
    with _damage_named(folder), context.__contextmanager__():
        return jax.tree.map(_without_jax, v1.load(folder))


def _as_numpy(metadata: Any) -> Any:
    """Return the options to read a leaf.

    Without ``jax_enable_x64``, JAX would cast 64-bit numbers.
    """
    plain = isinstance(
        metadata, ocp.metadata.value.ScalarMetadata | ocp.metadata.value.StringMetadata
    )
    if plain:
        return ocp.RestoreArgs()
    # Typed keys are stored as their data. Orbax makes keys of them only as JAX arrays.
    if metadata.dtype == np.uint32 and metadata.shape:
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            sharding=SingleDeviceSharding(jax.local_devices(backend="cpu")[0]),
        )
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _without_jax(leaf: Any) -> Any:
    """Return a JAX array as NumPy's, unless it has typed keys."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and not is_key(leaf.dtype) else leaf


def write_orbax(
    path: Path,
    root: Root,
    manifest: Manifest,
    keys: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a step as a folder that ``ocp.StandardCheckpointer().restore(path)`` reads.

    The folder appears whole, after it was read back and compared. All leaves are in memory at once.

    Args:
        path: The folder, which must not exist.
        root: The root.
        manifest: The step.
        keys: Key -> leaf path: write a flat dict of arrays; ``None``: write the nested state.
        progress: Called with the bytes of each leaf.

    Raises:
        UnsupportedLeaf: Orbax does not keep a value (empty arrays, bytes, integers of more than 64
            bits, some element types, keys that JAX cannot order); the message names it.
        DuplicatePath: Orbax would store two values under one name.
        StorageFailed: The folder cannot be written.
        FileExistsError: ``path`` exists and is not an empty folder.
    """
    owners = tree.array_paths(manifest.tree) if keys is None else keys
    require_types("orbax", ((path, manifest.spec(owner).dtype) for path, owner in owners.items()))
    for owner in owners.values():
        if manifest.spec(owner).raw_bytes == 0:
            raise UnsupportedLeaf(
                f"leaf {owner!r} is empty, and Orbax keeps no empty arrays; leave it out with"
                " --leaves"
            )
    loaded = read_all(root, manifest, owners.values(), progress)
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
            _with_plain_containers(manifest.tree),
            lambda place, owner, tag: _as_leaf(arrays[owner], tag),
        )
    else:
        tags = {node.owner: node.tag for node in tree.array_nodes(manifest.tree).values()}
        state = {key: _as_leaf(arrays[owner], tags.get(owner)) for key, owner in keys.items()}
    _require_names(state)
    expected = _digests(state)
    # Not held while the folder is read back.
    arrays.clear()
    loaded.clear()
    with new_folder(path.absolute()) as folder, _foreign_errors(manifest.step, path, folder):
        with tree_checkpointer() as checkpointer:
            # Orbax makes the folder anew, in one rename.
            checkpointer.save(folder, args=ocp.args.PyTreeSave(state), force=True)
        del state
        digests = _digests(_read(folder))
        if digests != expected:
            place = next(p for p in (expected | digests) if expected.get(p) != digests.get(p))
            raise UnsupportedLeaf(
                f"the value {place!r} of step {manifest.step} is {expected.get(place)}, but Orbax"
                f" has stored {digests.get(place)}; leave it out with --leaves"
            )
        Durability.POWER.sync_tree(folder)


def _require_names(state: Any) -> None:
    """Raise unless Orbax stores each value under a name of its own."""
    try:
        jax.tree.structure(state)  # Orbax's names are those of text keys
        names = list(stored_names(state))
    except ValueError as error:
        raise UnsupportedLeaf(
            f"Orbax cannot store this step: {error} A dict has both integer and text keys; leave it"
            " out with --leaves, or choose --to npz or --to torch"
        ) from error
    tree.distinct(names, "a checkpoint of Orbax")


def _digests(state: Any) -> dict[str, tuple[object, ...]]:
    """Return type, shape and digest of each array, and type and text of other values.

    They are keyed by Orbax's names, which are the same for the keys ``30`` and ``"30"``: Orbax
    gives text back for both.
    """
    names = {place: name for name, place in stored_names(state)}
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    return {names[jax.tree_util.keystr(path)]: _digest(leaf) for path, leaf in pairs}


def _digest(leaf: Any) -> tuple[object, ...]:
    if isinstance(leaf, jax.Array):
        return (str(leaf.dtype), *_digest(np.asarray(jax.random.key_data(leaf))))
    if isinstance(leaf, np.ndarray | np.generic):
        content = numpy_bytes(leaf)
        return leaf.dtype.name, leaf.shape, str(xxhash.xxh3_128_hexdigest(content.data))
    return type(leaf).__name__, repr(leaf)


@contextlib.contextmanager
def _foreign_errors(step: int, path: Path, folder: Path) -> Iterator[None]:
    """Raise errors of ours for those of Orbax and TensorStore, which also print tracebacks."""
    absl = logging.getLogger("absl")
    before, absl.disabled = absl.disabled, True
    report = sys.unraisablehook

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    # It stays after a failure: see ``_end_writes``.
    sys.unraisablehook = report_others
    try:
        yield
        sys.unraisablehook = report
    except (DeltacheckError, OSError):
        raise
    except Exception as error:
        _end_writes(folder)
        raise translated(error, "export", path) or UnsupportedLeaf(
            f"Orbax cannot store step {step}: {type(error).__name__}:"
            f" {str(error).partition(chr(10))[0]}. Choose --to npz or --to torch"
        ) from error
    finally:
        absl.disabled = before


def _end_writes(folder: Path) -> None:
    """Remove what writes of TensorStore make that outlive a failed save.

    Nobody can wait for them, and each prints that it finds the event loop of Orbax closed.
    """
    for _ in range(_LOOKS):
        shutil.rmtree(folder.parent, ignore_errors=True)
        time.sleep(_LOOK_SECONDS)
        if not folder.parent.exists():
            break


def _as_leaf(array: Any, tag: str | None) -> Any:
    """Return an array for Orbax: NumPy's, or typed keys."""
    if not is_key_tag(tag):
        return array
    with own_rules(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return key_of(jnp.asarray(array), tag, None)


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
