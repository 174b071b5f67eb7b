"""Store the inputs of updates instead of the state, and replay the updates at a restore.

Checkpoints every few steps then take about a tenth of the bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from deltacheck.backends.orbax.handler import DeltaRestoreArgs, DeltaSaveArgs
from deltacheck.backends.orbax.manager import handler_of
from deltacheck.backends.orbax.state import leaves, replica
from deltacheck.backends.orbax.state.load import Read
from deltacheck.errors import ReplayNeeded, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.replay import ReplayLimits
from deltacheck.save import logbook
from deltacheck.save.handle import SaveHandle, skipped
from deltacheck.save.logbook import Base, Logbook, LoggedUpdate, LogPlan
from deltacheck.save.saver import Saver
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")

# The value of ``_saving`` between saves. It refers to no learner, so that old arrays are freed.
_NOTHING: tuple[Any, Flat] = None, Flat({"t": "none"}, {}, {})


class GradientLog:
    """Saves a training state as the inputs of its updates if that is proven to be exact.

    The training calls ``log.update`` instead of ``update``, and ``log.save`` instead of
    ``manager.save``. The first save stores the state itself. Later saves store the inputs of the
    updates, everything of the state that is not the learner's, and the digest that each array of
    the learner must have after a replay. Before such a save, the same updates are done on a
    *replica* of the learner. If one bit of it differs from the state, the state itself is stored,
    and ``handle.report.note`` and the log say why.

    The cost: the replica takes as much memory as the learner, on the same devices. The inputs since
    the last save are kept. Each update is done a second time at the save.

    Args:
        manager: Made by ``deltacheck.backends.orbax.manager``, with ``Policy.exact()``.
        update: The training's update, usually ``update(learner, gradients) -> learner``. It is a
            pure function, jitted, that returns the structure of its first argument. Its other
            arguments are stored as the gradients are. It may donate all arguments.
        learner: Returns the first argument of ``update`` from the state. By default it is the whole
            state.
        max_replay_steps: The most updates that a restore replays. Larger: fewer saves that store
            the state itself, so fewer bytes; smaller: a shorter restore, which depends on fewer
            segments.
        max_steps_per_save: The most updates between two saves that are logged. Larger: saves with
            longer intervals are logged too, but more inputs are kept in memory; smaller: less
            memory.

    Raises:
        ValueError: The manager is another one, or its policy is not exact.
    """

    def __init__(
        self,
        manager: Any,
        update: Callable[..., Any],
        learner: Callable[[Any], Any] = lambda state: state,
        *,
        max_replay_steps: int = 16,
        max_steps_per_save: int = 4,
    ) -> None:
        _require_one_process()
        if not handler_of(manager).is_exact:
            raise ValueError(
                "a gradient log needs a manager with Policy.exact(): a replay must begin with the"
                " state itself"
            )
        self._manager = manager
        self._update = update
        self._learner = learner
        self._book = Logbook(
            ReplayLimits(max_replay_steps, max_steps_per_save), replica.digests, _read
        )
        self._seconds = 0.0  # spent in recording since the last save
        self._saver: Saver | None = None
        self._handle: SaveHandle | None = None
        self._saving = _NOTHING  # the learner of the save that is beginning

    def update(self, learner: Any, *inputs: Any) -> Any:
        """Return ``update(learner, *inputs)``, after recording the inputs for the next save.

        An update that raises is not recorded.

        Args:
            learner: The first argument of the update.
            *inputs: The other arguments.

        Returns:
            The result of the update.

        Raises:
            TypeError: JAX is tracing. Call this outside of ``jit``, ``grad`` and ``vmap``.
        """
        leaves = jax.tree_util.tree_leaves((learner, inputs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                "log.update was called inside of jit, grad or vmap, where arrays have no content to"
                " record; jit the update"
            )
        begin = time.perf_counter()
        recorded = self._recorded(inputs)  # before the update, which may donate them
        # Only the recording is a cost of the log. The update is the training's own time.
        self._seconds += time.perf_counter() - begin
        result = self._update(learner, *inputs)
        # Recorded after the update: one that raises has returned no new learner.
        if recorded is not None:
            copies, skeleton = recorded
            self._book.record(lambda number: _numbered(number, copies, skeleton))
        return result

    @typed
    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step`` of the manager.

        This does what ``manager.save`` does with ``DeltaSaveArgs``. To save one item of several, or
        with metrics for Orbax's ``best_fn``, call ``manager.save`` with ``DeltaSaveArgs(state,
        log=log)``.

        Args:
            step: The training step.
            state: The state.
            metrics: Numbers to keep with the step.
            force: Save even if the manager's options would skip this step.

        Returns:
            The handle of the save, ``"skipped"`` if the manager's options skip the step. The step
            exists when Orbax has renamed its directory, soon after the handle's ``result``.
            ``manager.wait_until_finished`` waits for that.

        Raises:
            UnsupportedLeaf, SaveFailed, StorageTimeout: As ``manager.save`` raises them.
        """
        # The manager may skip the step and never call the handler. The handle of an earlier save
        # must not be returned for this one.
        self._handle = None
        self._manager.save(step, args=DeltaSaveArgs(state, metrics, log=self), force=force)
        return skipped(step) if self._handle is None else self._handle

    @typed
    def restore(
        self,
        step: int | None = None,
        target: Any = None,
        *,
        shardings: Any = None,
        max_bytes: int | None = None,
    ) -> Any:
        """Restore a step; the next save stores the state itself.

        Args:
            step: The step; ``None``: the newest.
            target: A tree of the same structure. A logged step needs it, because ``update`` gets
                its containers.
            shardings: The shardings of the result, as in ``DeltaRestoreArgs``.
            max_bytes: Refuse to allocate more than this.

        Returns:
            The state, as the manager returns it.

        Raises:
            ReplayNeeded: The step is logged, and there is no target.
            ReplayDiffers: The replay does not give the bits that were saved. The message names the
                leaf, both digests and the next step to restore.
        """
        args = DeltaRestoreArgs(target, shardings=shardings, max_bytes=max_bytes, log=self)
        return self._manager.restore(step, args=args)

    @typed
    def close(self) -> None:
        """Release the replica and the recorded inputs. The manager stays open."""
        self._book.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what the handler calls -------------------------------------------------------------------

    def plan(self, state: Any, flat: Flat, saver: Saver) -> LogPlan:
        """Return the plan of a save of ``state``.

        The outcome of the saver's last save must be known.

        Args:
            state: The state.
            flat: The state, flattened.
            saver: The saver of the item.

        Returns:
            The leaves and inputs to store.
        """
        if saver is not self._saver:
            self._book.forget()  # its base is a step of another root or item
            self._saver = saver
        # Taken before the save begins: an accessor that raises then leaves no save waiting for
        # Orbax.
        learner = self._learner(state)
        self._saving = learner, _flat(learner)
        return self._book.plan(flat, saver.standing(), lambda: self._saving[1])

    def saved(
        self, plan: LogPlan, handle: SaveHandle, flat: Flat, standing: tuple[int, int]
    ) -> float:
        """Record that a save has begun.

        Args:
            plan: The plan of the save.
            handle: The handle of the save.
            flat: The state, flattened.
            standing: The saver's standing after the save.

        Returns:
            The seconds that the training has spent in recording since the save before.
        """
        self._handle = handle
        # Cleared at once, because the learner of a finished save would keep its arrays alive.
        (learner, memory), self._saving = self._saving, _NOTHING
        self._book.saved(
            plan,
            handle.step,
            standing,
            lambda: self._based(handle.step, learner, memory, flat, standing),
        )
        # Handed over once: these seconds belong to the blocking time of this save only.
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def replayed(self, root: Root, manifest: Manifest, target: Any, max_bytes: int | None) -> Read:
        """Return the leaves of a logged step.

        Args:
            root: The root.
            manifest: The step.
            target: A state of the same structure.
            max_bytes: Refuse to allocate more than this.

        Returns:
            The leaves, and what a saver needs to continue from them.

        Raises:
            ReplayNeeded: There is no target.
            ReplayDiffers: The replay does not give the bits that were saved.
        """
        assert manifest.replay is not None
        if target is None:
            raise ReplayNeeded(
                f"step {manifest.step} replays {len(manifest.replay.steps)} updates, which work on"
                f" containers that only a target has: name one, log.restore({manifest.step},"
                f" target). {replay.way_out(root, manifest)}"
            )
        return replica.replayed(
            root, manifest, manifest.replay, self._learner(target), self._update, max_bytes
        )

    def _recorded(self, inputs: tuple[Any, ...]) -> tuple[dict[str, Any], Node] | None:
        # The next save stores the state itself in any case. A copy would only take memory.
        if not self._book.listens:
            return None
        try:
            flat = _flat(inputs)
            _refuse_classes(flat.skeleton)
        # The training must not stop for an input that cannot be stored.
        except UnsupportedLeaf as error:
            self._book.spoil(f"an input of the update cannot be kept: {error}")
            return None
        with leaves.own_rules():
            # The update may donate its inputs, and a data loader may overwrite them, before the
            # save reads them.
            return {path: _copy(value) for path, value in flat.arrays.items()}, flat.skeleton

    def _based(
        self, step: int, learner: Any, memory: Flat, flat: Flat, standing: tuple[int, int]
    ) -> Base | None:
        """Return the save just begun as the base of the next ones.

        Returns ``None`` if the next saves cannot be replayed from it.
        """
        places = logbook.places(memory, flat)
        if places is None:
            log.info(
                "step %d: the next save stores the state itself: not every array of the learner is"
                " one of the state",
                step,
            )
            return None
        try:
            twin = replica.ArrayReplica(self._update, replica.owned(learner))
        # The device may have no memory for a second learner. The log then stores states only.
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            log.warning(
                "step %d: there is no replica to replay on, and the next save stores the state"
                " itself: %s",
                step,
                str(error),
            )
            return None
        return Base(
            # ``standing`` has the number of the next save. The base is the one before it.
            standing[1] - 1,
            step,
            replica.name_of(self._update),
            memory.skeleton,
            places,
            twin,
            standing,
        )


def _flat(value: Any) -> Flat:
    return tree.flatten(value, leaves.describe, leaves.expand)


def _numbered(number: int, copies: dict[str, Any], skeleton: Node) -> LoggedUpdate:
    """Return ``copies`` as the inputs of update ``number`` since the base."""
    specs = {}
    for name, value in copies.items():
        leaf = leaves.describe(value)
        assert leaf is not None
        # The number counts from the base, so an input keeps its path in all later saves. They refer
        # to what is stored already, and do not store it again.
        specs[name] = LeafSpec.of(replay.input_path(number, name), leaf.shape, leaf.dtype)
    return LoggedUpdate(specs, copies, skeleton)


def _copy(value: Any) -> Any:
    """Return a copy that only the log donates or writes to. Of keys, copy their data."""
    if not isinstance(value, jax.Array):
        # Not ``asarray``, which would share the memory of the training.
        return np.array(value)
    return (jax.random.key_data(value) if leaves.is_key(value.dtype) else value).copy()


def _read(copy: Any) -> tuple[Callable[[], Any], bool]:
    """Return a function that reads a recorded input, and ``True``: it may run in the background.

    The log owns the copy, so nothing writes to it.
    """
    return partial(_bytes_of, copy), True


def _bytes_of(copy: Any) -> Any:
    with leaves.own_rules():
        return leaves.bytes_of(copy)


def _refuse_classes(node: Any) -> None:
    """Raise ``UnsupportedLeaf`` for containers that a restore could not build.

    A restore builds Python's own containers. Of others it knows only the name, and it never looks
    for code by a name.
    """
    if isinstance(node, dict):
        # This kind of node stands for named tuples, dataclasses and framework containers. Only the
        # name of the class is stored.
        if node.get("t") == "fields":
            raise UnsupportedLeaf(
                f"a restore could not build a {node['c']} again; give the update dicts, lists and"
                " tuples, such as jax.tree.leaves(gradients), and let it put them together"
            )
        for child in [*node.get("n", ()), *(child for _, child in node.get("k", ()))]:
            _refuse_classes(child)


def _require_one_process() -> None:
    if jax.process_count() > 1:
        raise ValueError(
            "several processes save without a gradient log: its replay would need the gradients of"
            " all processes in each. Save with manager.save and Policy.auto(), which"
            " keeps the saves of several processes small"
        )
