"""The handler that ``ocp.CheckpointManager`` calls to save and restore JAX trees.

Orbax owns the step directories: it creates them, renames them when the futures of all handlers are
done, and deletes old ones. The handler owns the store beside them. ``async_save`` captures and
encodes a save, the saver's threads write it, and its manifest goes into the item's directory as
soon as Orbax has created that. Orbax's rename makes the step exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from orbax import checkpoint as ocp

from deltacheck.backends.orbax import orbax_args
from deltacheck.backends.orbax.group.coordination import join
from deltacheck.backends.orbax.item import Item, require_json
from deltacheck.backends.orbax.manager_root.commit_gate import Commit, Notes
from deltacheck.backends.orbax.manager_root.item_writer import Writer, has_store
from deltacheck.backends.orbax.manager_root.orbax_internals import (
    ItemPlace,
    await_directories,
    is_foreign,
    remove_unused,
)
from deltacheck.backends.orbax.state.load import restore_tree
from deltacheck.backends.orbax.state.metadata import TreeMetadata, described, metadata_of
from deltacheck.backends.orbax.state.repeated import KnownArrays
from deltacheck.backends.orbax.state.saved_shardings import records_of
from deltacheck.backends.orbax.state.targets import WantedPart
from deltacheck.errors import Damaged, NotACheckpointRoot, SaveFailed
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Policy
from deltacheck.save.ranks.joint import Joint
from deltacheck.save.save_options import SaveOptions, Settings, metric_numbers, require_defaults
from deltacheck.store import layout
from deltacheck.store.documents import read_manifest
from deltacheck.store.files import storage
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root, refuse_engine_root
from deltacheck.store.roots.root import Root, whole_steps
from deltacheck.store.roots.wording import way_out

# Orbax has one save under way, and changes are found where the arrays are.
_NO_OPTIONS = ("device_cache_bytes", "max_pending", "on_busy", "shadow")


@typed
class DeltaCheckpointHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc] # orbax has no types
    """A handler that saves and restores items of the steps of a ``CheckpointManager``.

    ``manager()`` makes one and registers it. One instance may serve several items: each has its own
    chain and its own *shadow*, a copy of the state that changes are found against. See
    ``docs/how-to/orbax.md``.

    Args:
        root: The directory of the steps, of a ``CheckpointManager`` or a plain ``Checkpointer``.
            Default: taken from the step directories that a manager names. A ``Checkpointer``
            without a root makes each path that it saves to a root of one step, which can be moved.
        policy: The contract of each leaf and the length of chains. Longer chains: smaller saves;
            shorter: faster restores. Default: ``Policy.exact()``.
        save_options: All else, as for ``Engine``. Those of a queue of saves are refused: Orbax
            has one save under way. Only ``manager()`` syncs Orbax's own files and renames, and
            follows ``on_error`` and ``exit_timeout_seconds``.
        read_only: Keep no shadow at a restore, and refuse saves. Default: a save may follow.

    Raises:
        NotACheckpointRoot: The root is that of an ``Engine``, or a file.
        StorageFailed: The root is an address of an object store.
        ValueError: An option has a value that it cannot have.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        policy: Policy | None = None,
        save_options: SaveOptions | None = None,
        read_only: bool = False,
    ) -> None:
        self._root = None if root is None else storage.local(root, "a handler").absolute()
        if self._root is not None:
            refuse_engine_root(self._root)
        self._settings = Settings.of(policy, None, save_options)
        require_defaults(self._settings.options, _NO_OPTIONS, "Orbax's interface")
        self._read_only = read_only
        self._closed = False
        self._items: dict[tuple[Path, str], Item] = {}
        self._restoring: Joint | None = None  # the restores of several processes

    # --- called by Orbax --------------------------------------------------------------------------

    async def async_save(self, directory: Any, args: DeltaSaveArgs) -> list[Any]:
        """Capture and encode an item.

        The manager's next ``save`` or ``wait_until_finished`` raises a failure after this call. The
        step then does not exist, and the next save writes whole leaves.

        Args:
            directory: The item's directory, which Orbax may not have created yet.
            args: The item.

        Returns:
            A list with the future of the manifest.

        Raises:
            UnsupportedLeaf: A leaf cannot be kept exactly.
            DuplicatePath: Two leaves have the same path.
            RootBusy: Another process writes to the root.
            StorageFailed: The root cannot be written.
            RankFailed: Another process raised one of these, or has another state.
        """
        return [self._begin_save(directory, args)]

    def save(self, directory: Any, args: DeltaSaveArgs) -> None:
        """Save an item and wait until its manifest is durable.

        Args:
            directory: The item's directory.
            args: The item.

        Raises:
            SaveFailed: The save failed; also what ``async_save`` raises.
        """
        self._begin_save(directory, args, creating=False).result()

    def restore(self, directory: Any, args: DeltaRestoreArgs | None = None) -> Any:
        """Restore an item of a step, verified bit for bit. The next save continues from it.

        Args:
            directory: The item's directory.
            args: The target and the conditions. Default: ``DeltaRestoreArgs()``.

        Returns:
            The tree.

        Raises:
            DeltacheckError: The item cannot be restored; see ``DeltaRestoreArgs``.
        """
        args = args or DeltaRestoreArgs()
        if not isinstance(args, DeltaRestoreArgs):
            args = DeltaRestoreArgs(
                **orbax_args.of_restore(args, lambda: described(self._manifest_at(directory)))
            )
        # A single process needs no coordination service.
        if jax.process_count() == 1:
            return self._restore(directory, args)[1]
        # Imported here, because only runs of several processes use it.
        from deltacheck.backends.orbax.group.collective import restored_by_all

        # Joined at the first restore, which all processes call together. Their keys in the service
        # match only if each has joined equally often.
        if self._restoring is None:
            self._restoring = Joint(
                join(f"{self._root or ''}:restore", self._settings.options.io_timeout_seconds)
            )
        return restored_by_all(self._restoring, lambda: self._restore(directory, args))

    def _restore(self, directory: Any, args: DeltaRestoreArgs) -> tuple[str, Any]:
        """Return the digest of the restored manifest, and its tree."""
        place = ItemPlace.to_read(directory)
        root, manifest = self._open(place)
        root.require_digest(manifest, args.expected_digest)
        restored = restore_tree(
            root,
            manifest,
            WantedPart(args.item, args.leaves, args.partial_restore, args.cast),
            shardings=args.shardings,
            contract=args.contract,
            max_bytes=args.max_bytes,
        )
        if (
            # The next save can continue only from a whole step (otherwise there are no chains), and
            # only in the same root: a segment must not depend on the segments of another root.
            restored.chains
            and not (self._read_only or self._closed)
            and not place.has_own_root
            and root.path == self._root_of(place)
        ):
            self._item(place).adopt(restored, manifest)
        return root.digest_of(manifest), restored.tree

    def metadata(self, directory: Any) -> TreeMetadata:
        """Return the saved tree with a description of each leaf in its place.

        Args:
            directory: The item's directory.

        Returns:
            Orbax's metadata, which can be the target of a restore.

        Raises:
            FileNotFoundError: The item was not saved with ``DeltaSaveArgs``.
        """
        return metadata_of(self._manifest_at(directory), directory)

    def _manifest_at(self, directory: Any) -> Manifest:
        return read_manifest(ItemPlace.to_read(directory).directory / "zarr.json")

    def finalize(self, directory: Any) -> None:
        """Remove the segments that no step needs.

        Orbax calls this when every future is done, before the renames. It deletes old steps after
        the renames, so their segments are removed one save later.

        Args:
            directory: The item's directory.
        """
        place = ItemPlace.to_save(directory, self._root)
        item = self._items.get(self._key(place))
        # Only process 0 has a ``Writer``, and with it the lease that a deletion needs.
        if item is not None and isinstance(item.writer, Writer):
            options = self._settings.options
            item.writer.collect(options.grace_seconds, options.io_timeout_seconds)

    def close(self) -> None:
        """Finish the saves under way, stop the threads and give the root back.

        A second call does nothing.
        """
        # Set first, so that a save that another thread begins meanwhile is refused.
        self._closed = True
        while self._items:
            # Each item leaves the table before it is closed, so that a second call does not close
            # it again.
            self._items.popitem()[1].close()

    @classmethod
    def typestr(cls) -> str:
        """Return the name under which Orbax records the writer of an item. It is permanent.

        Returns:
            The name.
        """
        return layout.ITEM_HANDLER

    # --- internal ---------------------------------------------------------------------------------

    def _tolerates(self, error: Exception) -> bool:
        """Return true if ``on_error`` leaves a failure that Orbax raises to the log."""
        counts = [item.failures for item in self._items.values() if item.failures is not None]
        return bool(counts) and all(count.to_raise(error) is None for count in counts)

    def _raise_lost(self) -> None:
        """Raise the failure of the newest save of an item, if only the log has it."""
        for item in self._items.values():
            if item.failures is not None:
                item.failures.raise_lost()

    @property
    def is_exact(self) -> bool:
        """True if the policy stores every leaf exactly."""
        return self._settings.policy.is_exact

    def _check_open(self) -> None:
        if self._closed or self._read_only:
            raise SaveFailed(
                f"this handler is {'closed' if self._closed else 'read-only'}; open a new manager"
                " or context to save"
            )

    def _begin_save(self, directory: Any, args: DeltaSaveArgs, *, creating: bool = True) -> Commit:
        """Capture and encode an item, as ``async_save`` does.

        ``creating``: Orbax is creating the directories already, on a thread.
        """
        self._check_open()
        try:
            return self._begin(directory, args, creating)
        except BaseException:
            if creating:
                # A retry must not meet Orbax's thread in the same directory.
                await_directories()
            remove_unused(directory, awaited_seconds=2.0 if creating else 0.0)
            raise

    def _begin(self, directory: Any, args: DeltaSaveArgs, creating: bool) -> Commit:
        begin = time.perf_counter()
        if not isinstance(args, DeltaSaveArgs):
            args = DeltaSaveArgs(**orbax_args.of_save(args))
        place = ItemPlace.to_save(directory, self._root)
        item = self._item(place)
        # The other processes already wait for this one. A leaf that is refused here must fail the
        # save in all of them instead of letting them run into their timeout.
        with item.sharing_failure():
            flat = item.flatten(args.item)
            # Metrics may be 0-d arrays, which a manifest cannot hold.
            metrics = metric_numbers(args.metrics)
            records = flat.records if isinstance(flat, KnownArrays) else records_of(flat.arrays)
            notes = Notes(metrics, require_json(args.custom_metadata), records)
        if not place.has_own_root:
            return item.begin(place, flat, notes, begin)
        if creating:
            # The store lies in Orbax's directory, too.
            await_directories()
        commit = item.begin(place, flat, notes, begin)
        # Nothing may write to the store when Orbax renames the directory.
        commit.after = partial(self._close_item, self._key(place))
        return commit

    def _close_item(self, key: tuple[Path, str]) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            item.close()

    def _item(self, place: ItemPlace) -> Item:
        key = self._key(place)
        # Made at the first call: only Orbax knows the names of the items.
        if key not in self._items:
            self._items[key] = Item(*key, self._settings)
        return self._items[key]

    def _key(self, place: ItemPlace) -> tuple[Path, str]:
        return self._root_of(place), place.item

    def _root_of(self, place: ItemPlace) -> Path:
        if self._root is not None and not place.has_own_root:
            return self._root
        place.step  # noqa: B018 - raises if this is not a manager's step: no store is made there
        return place.root

    def _open(self, place: ItemPlace) -> tuple[Root, Manifest]:
        """Return the root whose segments a step needs, and the manifest of the step.

        A step of another manager is read from the store beside that step.
        """
        # The step decides, not the manager: Orbax restores steps of other directories, too.
        path = place.root if has_store(place.root) else self._root_of(place)
        if is_foreign(place):
            raise NotACheckpointRoot(
                f"{place.directory} was not saved with DeltaSaveArgs, but by plain Orbax. Load it"
                " inside deltacheck.backends.orbax.v1.context(root), or make a root of its steps:"
                f" deltacheck import NEW {path}"
            )
        try:
            root = open_root(path)
            try:
                return root, root.read(place.directory / "zarr.json")
            except Damaged as error:
                message = f"step {place.step} of {path}: {error}. {way_out(whole_steps(root))}"
                # The class is kept: callers distinguish ``ChainBroken`` from other damage.
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
    """The arguments of a save.

    The arrays may be donated or deleted as soon as ``save`` returns, and NumPy arrays may be
    written to, but not memory that a JAX array shares (``capture="eager"`` permits that, too).

    Args:
        item: A nested state of JAX and NumPy arrays, typed PRNG keys, numbers, text, bytes and
            ``None``. Containers are pytree nodes and ``deque``.
        metrics: Numbers kept with the step. Default: none.
        custom_metadata: JSON to keep with the item, which ``item_metadata`` returns. Default: none.
    """

    item: Any
    metrics: Mapping[str, float] | None = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(DeltaCheckpointHandler, for_restore=True)
@dataclass
class DeltaRestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The arguments of a restore.

    If ``jax_enable_x64`` is off, arrays of 64-bit types come back as NumPy, because JAX would round
    them. Every JAX array owns its buffer and can be donated. In a run of several processes all of
    them restore, each what its devices need; an array without a sharding is whole in each. A
    failure of one process is raised in all.

    A restore raises ``TreeMismatch``, ``Damaged``, ``ChainBroken``, ``ContractNotMet``,
    ``StepNotFound`` (an unknown leaf), ``BudgetExceeded``, and ``NotACheckpointRoot`` for an item
    that was not saved with ``DeltaSaveArgs``.

    Args:
        item: The target, a tree of arrays or ``jax.ShapeDtypeStruct`` of the saved structure, or
            the metadata of the item. Each array comes in the form (JAX, NumPy, PRNG key) and with
            the sharding that it has there. ``ocp.PLACEHOLDER`` (``...``) or ``None`` in the place
            of a leaf or a subtree leaves it out, and stays in the result. Default: the saved tree,
            foreign pytree nodes as dicts of their fields.
        shardings: One ``Sharding`` or device for all arrays, or a tree of them. Default: those of
            the target. An array to which neither gives one has its saved sharding, if this run has
            the devices of its mesh. Otherwise it is whole on the default device, and the log warns.
        leaves: Leaf paths, subtrees (``"params"``) or patterns (``"*/kernel"``; ``*`` also matches
            ``/``). The result is then ``{path: leaf}`` of these. Default: the whole tree.
        contract: The weakest contract that a leaf may have, ``"exact"`` or ``"bounded"``. Default:
            any.
        max_bytes: The most bytes to allocate. Default: no limit.
        expected_digest: The digest that the manifest must have, from the report of the save or
            ``deltacheck show``. Default: any.
        partial_restore: Accept a target that lacks leaves or subtrees of the step, which are then
            not read: ``DeltaRestoreArgs({"params": target}, partial_restore=True)``. ``False``: a
            forgotten part is refused.
        cast: Convert each array and number to the dtype of the target, with NumPy's rounding.
            ``False``, or with ``contract="exact"``: only if every saved value is kept, so that none
            is rounded unnoticed.
        strict: ``False`` (as in ``StandardRestore``, to pad or cut arrays to the shapes of the
            target) is refused: zeros that nobody saved would be restored as verified content.

    Raises:
        ValueError: ``strict`` is ``False``.
    """

    item: Any = None
    shardings: Any = None
    leaves: str | Iterable[str] | None = None
    contract: str | None = None
    max_bytes: int | None = None
    expected_digest: str | None = None
    partial_restore: bool = False
    cast: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        if not self.strict:
            raise ValueError(
                "deltacheck does not support strict=False: arrays are restored with their saved"
                " shape. Leave the target's shapes as they were saved, and use jnp.pad or a slice"
                " afterwards"
            )
