"""Read any root as torch tensors, without the right to write to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.state import leaves
from deltacheck.leaf.external_errors import typed
from deltacheck.restore import damage
from deltacheck.restore.resolve import require_contract, require_leaves
from deltacheck.restore.values import StepReader
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectStore
from deltacheck.store.files.storage import Place
from deltacheck.store.roots.opening import open_root

MapLocation: TypeAlias = (
    "torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any]"
)


@typed
def load(  # noqa: PLR0913 - one argument per option
    root: str | os.PathLike[str],
    step: int | MapLocation | None = None,
    *,
    map_location: MapLocation | None = None,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    item: str | None = None,
    contract: str | None = None,
    max_bytes: int | None = None,
    expected_digest: str | None = None,
    storage: ObjectStore | None = None,
) -> Any:
    """Read a step of an ``Engine`` root or of an Orbax ``CheckpointManager`` as torch tensors.

    Every byte is verified. No lock is taken, and nothing is written. No code of a checkpoint is
    run.

    Args:
        root: A root, or a file that ``save`` or ``DeltaCheckIO`` has written, which is one step.
        step: The step; ``None``: the newest. As in ``torch.load``, ``map_location`` may be the
            second argument.
        map_location: The device of the tensors, in any form that ``torch.load`` accepts; ``None``:
            the host. Tensors that were on a device when they were saved come to the host first.
        weights_only: Has no effect. It exists for the signature of ``torch.load``.
        mmap: Has no effect, because decoded leaves cannot be mapped.
        item: The item of a manager's steps, if they have more than one.
        contract: Refuse a step with a leaf that was saved under a weaker contract than ``"exact"``
            or ``"bounded"``; ``None``: accept all.
        max_bytes: Refuse to allocate more than this; ``None``: the memory of the machine.
        expected_digest: Refuse a step whose manifest has another digest than this. The save's
            report and ``deltacheck show`` print it.
        storage: Access to an object store, if ``root`` is an address.

    Returns:
        The nested state, with tied leaves as one tensor. Typed PRNG keys of JAX are their uint32
        data.

    Raises:
        TypeError: ``root`` is not a path.
        ValueError: ``step`` is not an integer, or is not the step of the file.
        NotACheckpointRoot, StepNotFound: There is no such root or step.
        ContractNotMet: A leaf has a weaker contract; the message names the leaves.
        Damaged, ChainBroken: The step is not whole. The message names step, leaf, file and the
            steps that still restore.
        BudgetExceeded: The step is larger than ``max_bytes``.
        UnsupportedLeaf: torch does not have an element type.
    """
    # ``torch.load(path, "cpu")`` has the location in this place.
    if step is not None and not isinstance(step, int):
        if map_location is not None:
            raise ValueError(f"step must be an integer, not {step!r}")
        step, map_location = None, step
    if not isinstance(root, str | os.PathLike):
        raise TypeError(f"deltacheck reads from a path, not from a {type(root).__name__}")
    path = place.of(root, storage)
    # A file is one step. A root is a directory, or an address, which is never a local file.
    if isinstance(path, Path) and path.is_file():
        opened, manifest = pointer.opened(path)
        if step not in (None, manifest.step):
            raise ValueError(
                f"{path} is step {manifest.step}, not {step}; for others read the root"
                f" {opened.path}"
            )
    else:
        opened = open_root(path, item)
        manifest = opened.manifest(step)
    opened.require_digest(manifest, expected_digest)
    require_leaves(opened, manifest)
    require_contract(manifest, contract)
    with damage.named(opened, manifest):
        # No save continues from this read, so no bytes are kept for it.
        loaded = StepReader(opened, manifest, max_bytes=max_bytes, keep=False).whole()
    return leaves.tree_of(manifest.tree, loaded, lambda tensor: moved(tensor, map_location))


class ReadStep(NamedTuple):
    """The step of a file that was read, from which a save can continue.

    Attributes:
        path: The file.
        root: The root, without links.
        reader: Has the chains, and the bytes of their last content.
    """

    path: Path
    root: Place
    reader: StepReader


def read_to_continue(path: Path, map_location: MapLocation | None) -> tuple[ReadStep, Any]:
    """Return the step that a file points to, and its content as ``load`` returns it.

    Args:
        path: The file.
        map_location: As in ``load``.

    Raises:
        NotACheckpointRoot, StepNotFound, Damaged, ChainBroken, UnsupportedLeaf: As ``load`` raises
            them.
    """
    opened, manifest = pointer.opened(path)
    require_leaves(opened, manifest)
    with damage.named(opened, manifest):
        reader = StepReader(opened, manifest)
        loaded = reader.whole()
    content = leaves.tree_of(
        manifest.tree,
        loaded,
        lambda tensor: moved(tensor, map_location),
        stored=reader.stored,
    )
    return ReadStep(path.resolve(), pointer.read(path).root, reader), content


def moved(tensor: torch.Tensor, map_location: MapLocation | None) -> torch.Tensor:
    """Return a host tensor on the device where ``torch.load`` would put it."""
    if map_location is None:
        return tensor
    return leaves.as_dtype(_moved(leaves.copyable(tensor), map_location), tensor.dtype)


def _moved(tensor: torch.Tensor, map_location: MapLocation) -> torch.Tensor:
    if isinstance(map_location, Mapping):
        # Decoded tensors are on the host, so only that entry of a mapping applies.
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    return tensor.to(map_location)
