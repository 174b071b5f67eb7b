"""The handler that ``ocp.CheckpointManager`` calls: saves of JAX trees as segments beside the
steps,
and their way back.

Orbax owns the step directories: it creates them, renames them when every handler's futures are
done, and deletes old ones. We own the store beside them. A save is captured and encoded before
``async_save`` returns, written by the saver's threads, and its manifest put into the item directory
as soon as that exists; the rename is what makes the step exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from orbax import checkpoint as ocp

from deltacheck.backends.orbax.group.coordination import join
from deltacheck.backends.orbax.item import Commit, Item, Log
from deltacheck.backends.orbax.manager_root.item_writer import Writer, has_store
from deltacheck.backends.orbax.manager_root.orbax_internals import ItemPlace, await_directories
from deltacheck.backends.orbax.state.load import abstract_tree, restore_tree
from deltacheck.errors import Damaged, NotACheckpointRoot, SaveFailed
from deltacheck.policy import Policy
from deltacheck.save.joint import Joint
from deltacheck.save.options import SaveOptions
from deltacheck.store.documents import read_manifest
from deltacheck.store.files.durability import Durability
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root, open_root, way_out, whole_steps


class DeltaCheckpointHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc] # orbax has no types
    """Saves and restores the items of a ``CheckpointManager``'s steps. ``manager()`` makes one and
    registers it.

    ``root``: the manager's directory; without it, taken from the step directories that Orbax names.
    ``policy``: what is promised and how long chains grow (default ``Policy.exact()``).
    ``host_cache_bytes``: most encoded bytes between the training loop and the disk; larger: a slow
    disk blocks training later, smaller: less memory. ``grace_seconds``: how long segments that no
    step needs stay for readers that began before; longer: safer for slow readers, shorter: disk
    space sooner. ``io_timeout_seconds``: longest wait for the storage before a save is given up.
    ``durability``: what our files survive when our future is done. ``"power"``: a power cut, at the
    cost of a flush of the disk's cache for each file and directory. ``"process"``: only the end of
    this process, however it comes; saves end sooner, but a power cut may take the last ones, or
    leave steps that are listed and raise ``Damaged``. Orbax's own files and renames are synced by
    ``manager()`` only, see there. ``verify``: whether each save is read back from disk and compared
    with the state as it was captured. ``"none"``: no; a restore checks what was written.
    ``"commit"``: what the save wrote, before its step exists, so that a fault on the way to the
    disk is a failed save; it commits later by the time that reading takes. ``"receipt"``: the whole
    step, after the commit and behind everything else: ``handle.receipt``, a failure is logged and
    raised by the next call. Both read about as much as a restore at each save, and hash the whole
    state at the capture. ``capture``: of arrays that lie in host memory (JAX on the processor).
    ``"eager"``: they are read before ``save`` returns, and may be donated at once. ``"lazy"``:
    behind the training; ``save`` returns much sooner, encoding takes processor time from the
    training, and until an array has been read it cannot be donated: XLA copies it instead, which
    takes its memory twice. Others are always read at once. ``read_only``: restores keep no copy of
    the state to go on from, and saves are refused.

    One instance may serve several items: each has its own chain. Beside the encoded bytes it holds
    one *shadow* an item, a copy of its state, to compare with.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        policy: Policy | None = None,
        host_cache_bytes: int = 1 << 30,
        grace_seconds: float = 60.0,
        io_timeout_seconds: float = 600.0,
        durability: str = "power",
        verify: str = "none",
        capture: str = "eager",
        read_only: bool = False,
    ) -> None:
        if capture not in ("eager", "lazy"):
            raise ValueError(f"capture must be 'eager' or 'lazy', not {capture!r}")
        self._is_lazy = capture == "lazy"
        self._root = None if root is None else Path(root).absolute()
        self._options = SaveOptions(
            policy=policy or Policy.exact(),
            host_cache_bytes=host_cache_bytes,
            grace_seconds=grace_seconds,
            io_timeout_seconds=io_timeout_seconds,
            durability=Durability.of(durability),
            verify=verify,
        )
        self._read_only = read_only
        self._closed = False
        self._items: dict[tuple[Path, str], Item] = {}
        self._restoring: Joint | None = None  # of several processes

    # --- what Orbax calls -------------------------------------------------------------------------

    async def async_save(self, directory: Any, args: DeltaSaveArgs) -> list[Any]:
        """Capture and encode ``args.item``; returns the future of its manifest.

        Raises ``UnsupportedLeaf`` or ``DuplicatePath`` for what cannot be kept exactly,
        ``RootBusy``, ``OSError``, ``RankFailed`` where another process has raised one of these, or
        has another state. What goes wrong later is raised by the manager's next ``save`` or
        ``wait_until_finished``; that step then does not exist, and the save after it writes whole
        leaves.
        """
        self._check_open()
        try:
            return [self._begin(directory, args)]
        except BaseException:
            await_directories()
            raise

    def save(self, directory: Any, args: DeltaSaveArgs) -> None:
        """As ``async_save``, and wait until the manifest is durable."""
        self._check_open()
        self._begin(directory, args).result()

    def restore(self, directory: Any, args: DeltaRestoreArgs | None = None) -> Any:
        """Restore an item of a step, verified bit for bit; the next save goes on from there. See
        ``DeltaRestoreArgs``.
        """
        args = args or DeltaRestoreArgs()
        if jax.process_count() == 1:
            return self._restore(directory, args)[1]
        from deltacheck.backends.orbax.group.collective import restored_by_all

        if self._restoring is None:
            self._restoring = Joint(
                join(f"{self._root or ''}:restore", self._options.io_timeout_seconds)
            )
        return restored_by_all(self._restoring, lambda: self._restore(directory, args))

    def _restore(self, directory: Any, args: DeltaRestoreArgs) -> tuple[str, Any]:
        """What was restored (the digest of its manifest), and its tree."""
        place = ItemPlace.of(directory)
        root, manifest = self._open(place)
        root.require_digest(manifest, args.expected_digest)
        restored = restore_tree(
            root,
            manifest,
            args.item,
            shardings=args.shardings,
            paths=args.leaves,
            contract=args.contract,
            max_bytes=args.max_bytes,
            log=args.log,
        )
        if (
            restored.chains
            and not (self._read_only or self._closed)
            and root.path == self._root_of(place)
        ):
            self._item(place).adopt(restored, manifest)
        return root.digest_of(manifest), restored.tree

    def metadata(self, directory: Any) -> Any:
        """The tree as it was saved, with ``jax.ShapeDtypeStruct`` for arrays: fit to be a restore
        target.

        Raises ``FileNotFoundError`` where the item was not saved with ``DeltaSaveArgs``.
        """
        place = ItemPlace.of(directory)
        return abstract_tree(read_manifest(place.directory / "zarr.json"))

    def finalize(self, directory: Any) -> None:
        """Remove segments that no step needs any more. Orbax calls this when every future is done,
        before the renames.

        So deletions take effect one save late: Orbax deletes old steps after the renames.
        """
        item = self._items.get(self._key(ItemPlace.of(directory)))
        if item is not None and isinstance(item.writer, Writer):
            item.writer.collect(self._options.grace_seconds, self._options.io_timeout_seconds)

    def close(self) -> None:
        """Finish the saves under way, stop the threads, give the root back. More than once does
        nothing.
        """
        self._closed = True
        while self._items:
            self._items.popitem()[1].close()

    @classmethod
    def typestr(cls) -> str:
        """The name under which Orbax records who wrote an item. Permanent."""
        return "deltacheck.DeltaCheckpointHandler"

    # --- our side ---------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is stored as it is."""
        return self._options.policy.is_exact

    def _check_open(self) -> None:
        if self._closed or self._read_only:
            raise SaveFailed(
                f"this handler is {'closed' if self._closed else 'read-only'}; open a new manager"
                " to save"
            )

    def _begin(self, directory: Any, args: DeltaSaveArgs) -> Commit:
        begin = time.perf_counter()
        place = ItemPlace.of(directory)
        item = self._item(place)
        with item.telling():
            flat = item.flatten(args.item)
            metrics = {name: float(value) for name, value in (args.metrics or {}).items()}
        return item.begin(place, args.item, flat, metrics, begin, args.log)

    def _item(self, place: ItemPlace) -> Item:
        key = self._key(place)
        if key not in self._items:
            self._items[key] = Item(*key, self._options, lazy=self._is_lazy)
        return self._items[key]

    def _key(self, place: ItemPlace) -> tuple[Path, str]:
        return self._root_of(place), place.item

    def _root_of(self, place: ItemPlace) -> Path:
        if self._root is not None:
            return self._root
        place.step  # noqa: B018 - raises where this is no manager's step, so that no store appears in a place that nobody meant
        return place.root

    def _open(self, place: ItemPlace) -> tuple[Root, Manifest]:
        """The root whose segments a step needs, and its manifest. A step of another root brings the
        store beside it.
        """
        path = place.root if has_store(place.root) else self._root_of(place)
        try:
            root = open_root(path)
            try:
                return root, root.read(place.directory / "zarr.json")
            except Damaged as error:
                message = f"step {place.step} of {path}: {error}. {way_out(whole_steps(root))}"
                raise type(error)(message, file=error.file) from error
        except FileNotFoundError:
            raise NotACheckpointRoot(
                f"step {place.step}: {place.directory} has no manifest of ours (zarr.json): it was"
                " not saved with DeltaSaveArgs, or has lost it."
                f" {way_out(whole_steps(open_root(path)))}"
            ) from None


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_save=True)
@dataclass
class DeltaSaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: ``item``, any nested state of JAX and NumPy arrays, typed PRNG keys, numbers,
    text, bytes and ``None``.

    Containers: whatever is a pytree node, and ``deque``. The arrays may be donated or deleted as
    soon as ``save`` returns (donated without a gain under ``capture="lazy"``); NumPy arrays may be
    written to. ``metrics``: numbers kept with the step. ``log``: a ``GradientLog`` that may keep
    the item as gradients, as its ``save`` does; one log serves one item.
    """

    item: Any
    metrics: Mapping[str, float] | None = None
    log: Log | None = None


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_restore=True)
@dataclass
class DeltaRestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """How to restore.

    Without ``item``: the tree as it was saved, pytree nodes that Python itself does not have as
    dicts of their fields, arrays on the default device. With ``item``, a tree of arrays or
    ``jax.ShapeDtypeStruct`` of the same structure: its containers, each array in the form (JAX,
    NumPy, PRNG key) and with the sharding that it has there; numbers and text as they were saved.
    ``shardings``: one ``Sharding`` or device for all arrays, or a tree of them; goes before the
    target's. ``leaves``: only these leaf paths, as ``{path: array}``. ``contract``: refuse leaves
    that were saved under a weaker one than ``"exact"`` or ``"bounded"``; by default each comes as
    it was saved. ``max_bytes``: refuse before allocating more than this. ``log``: the
    ``GradientLog`` whose update replays a step that is kept as gradients; such a step needs
    ``item``. ``expected_digest``: refuse a step whose manifest has another digest than this, which
    the save's report and ``deltacheck show`` give.

    Arrays of 64-bit types come back as NumPy where ``jax_enable_x64`` is off: JAX would round them.
    Every JAX array owns its buffer and can be donated.

    In a run of several processes all of them restore, each what its devices need; without a target
    or ``shardings`` each gets whole arrays of its own. What fails in one is raised in all.

    Raises ``TreeMismatch`` naming leaf and both values, ``Damaged`` or ``ChainBroken`` naming leaf,
    segment and way out, ``ContractNotMet`` naming the leaves, ``ReplayNeeded`` for a step that is
    kept as gradients where there is no ``log``, ``StepNotFound`` for a leaf that is not there,
    ``BudgetExceeded``, ``NotACheckpointRoot`` for an item that was not saved with
    ``DeltaSaveArgs``.
    """

    item: Any = None
    shardings: Any = None
    leaves: Iterable[str] | None = None
    contract: str | None = None
    max_bytes: int | None = None
    log: Log | None = None
    expected_digest: str | None = None
