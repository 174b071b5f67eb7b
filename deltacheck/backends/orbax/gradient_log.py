"""Checkpoints every few steps at a tenth of the bytes: the gradients are stored, and the update is
replayed at restore.
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
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.replay import Limits
from deltacheck.save import logbook
from deltacheck.save.handle import SaveHandle, skipped
from deltacheck.save.logbook import Base, Logbook, Plan, Update
from deltacheck.save.saver import Saver
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Root

log = logging.getLogger("deltacheck")

_NOTHING: tuple[Any, Flat] = None, Flat({"t": "none"}, {}, {})


class GradientLog:
    """Saves of a training state through a manager, as the inputs of its updates wherever that is
    proven to be exact.

    ``manager``: made by ``deltacheck.backends.orbax.manager``, with ``Policy.exact()``. ``update``:
    the training's own, usually ``update(learner, gradients) -> learner``, a jitted pure function of
    its arguments that gives the structure that it takes; whatever else it takes is stored as the
    gradients are. It may donate all of them. ``learner``: where in the state that lies which
    ``update`` takes and gives, ``learner(state) -> learner``; by default the state is nothing else.

    The training calls ``log.update`` in place of ``update``, and ``log.save`` in place of
    ``manager.save``. The first save stores the state itself; later ones store what the updates were
    given, everything of the state that is not the learner's, and the digest that each array of the
    learner must have after a replay. Before such a save the same updates are done on a *replica* of
    the learner, and where one bit of it differs from the state, the state itself is stored
    (``handle.report.note`` says why, and the log).

    The price: the replica takes as much memory as the learner, where that lies, the gradients since
    the last save are kept, and each update is done a second time at the save. ``max_replay_steps``,
    ``max_steps_per_save``: see ``deltacheck.restore.replay.Limits``. Raises ``ValueError`` for another
    manager or policy.
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
        if not handler_of(manager).is_exact:
            raise ValueError(
                "a gradient log needs a manager with Policy.exact(): a replay must begin with the"
                " state itself"
            )
        self._manager = manager
        self._update = update
        self._learner = learner
        self._book = Logbook(Limits(max_replay_steps, max_steps_per_save), replica.digests, _read)
        self._seconds = 0.0  # that recording has taken since the last save
        self._saver: Saver | None = None
        self._handle: SaveHandle | None = None
        self._saving = _NOTHING  # the learner of the save that is being begun

    def update(self, learner: Any, *inputs: Any) -> Any:
        """``update(learner, *inputs)``, its inputs recorded for the next save.

        An update that raises is not recorded. Raises ``TypeError`` while JAX traces: call it
        outside of ``jit``.
        """
        if any(
            isinstance(leaf, jax.core.Tracer)
            for leaf in jax.tree_util.tree_leaves((learner, inputs))
        ):
            raise TypeError(
                "log.update was called inside of jit, grad or vmap, where arrays have no content to"
                " record; jit the update"
            )
        begin = time.perf_counter()
        recorded = self._recorded(inputs)  # before the update, which may donate them
        self._seconds += time.perf_counter() - begin
        result = self._update(learner, *inputs)
        if recorded is not None:
            copies, skeleton = recorded
            self._book.record(lambda number: _numbered(number, copies, skeleton))
        return result

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> SaveHandle:
        """Save ``state`` as of this call as checkpoint ``step`` of the manager, as ``manager.save``
        with ``DeltaSaveArgs`` does.

        The handle is ``"skipped"`` where the manager's options leave this step out (not with
        ``force``). The step exists when Orbax has renamed its directory, soon after the handle's
        ``result``: ``manager.wait_until_finished`` waits for that. One item of several, or with
        metrics for Orbax's ``best_fn``, is saved with ``manager.save`` and ``DeltaSaveArgs(state,
        log=log)``.
        """
        self._handle = None
        self._manager.save(step, args=DeltaSaveArgs(state, metrics, log=self), force=force)
        handle = self._handle
        if handle is None:
            handle = skipped(step)
        return handle

    def restore(
        self,
        step: int | None = None,
        target: Any = None,
        *,
        shardings: Any = None,
        max_bytes: int | None = None,
    ) -> Any:
        """Restore a step (by default the newest) as ``DeltaRestoreArgs`` says; the next save stores
        the state itself.

        A logged step needs ``target``, whose containers ``update`` is given. Raises
        ``ReplayNeeded`` without one, ``ReplayDiffers`` (naming leaf, both digests and way out)
        where the replay does not give what was saved.
        """
        args = DeltaRestoreArgs(target, shardings=shardings, max_bytes=max_bytes, log=self)
        return self._manager.restore(step, args=args)

    def close(self) -> None:
        """Let go of the replica and the gradients. The manager stays open."""
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

    def plan(self, state: Any, flat: Flat, saver: Saver) -> Plan:
        """What a save of ``state`` stores. REQUIRES: it is known what became of the saver's last
        save.
        """
        if saver is not self._saver:
            self._book.forget()  # its base is a step of another root or item
            self._saver = saver
        learner = self._learner(state)
        self._saving = learner, _flat(learner)
        return self._book.plan(flat, saver.standing(), lambda: self._saving[1])

    def saved(self, plan: Plan, handle: SaveHandle, flat: Flat, standing: tuple[int, int]) -> float:
        """Learn that this save has begun; seconds that the training has lost to the updates before.
        ``standing``: the saver's after it.
        """
        self._handle = handle
        (learner, memory), self._saving = self._saving, _NOTHING
        self._book.saved(
            plan,
            handle.step,
            standing,
            lambda: self._based(handle.step, learner, memory, flat, standing),
        )
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def replayed(self, root: Root, manifest: Manifest, target: Any, max_bytes: int | None) -> Read:
        """The leaves of a logged step."""
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
        if not self._book.listens:
            return None
        try:
            flat = _flat(inputs)
            _refuse_classes(flat.skeleton)
        except UnsupportedLeaf as error:
            self._book.spoil(f"what the update was given cannot be kept: {error}")
            return None
        with leaves.own_rules():
            return {path: _copy(value) for path, value in flat.arrays.items()}, flat.skeleton

    def _based(
        self, step: int, learner: Any, memory: Flat, flat: Flat, standing: tuple[int, int]
    ) -> Base | None:
        """The save just begun as the base of the next ones; ``None`` where they cannot be replayed
        from it.
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
            twin = replica.Replica(self._update, replica.owned(learner))
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            log.warning(
                "step %d: there is no replica to replay on, and the next save stores the state"
                " itself: %s",
                step,
                error,
            )
            return None
        return Base(
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


def _numbered(number: int, copies: dict[str, Any], skeleton: Node) -> Update:
    """``copies`` as the inputs of update ``number`` since the base."""
    specs = {}
    for name, value in copies.items():
        described = leaves.describe(value)
        assert described is not None
        specs[name] = LeafSpec.of(replay.input_path(number, name), described.shape, described.dtype)
    return Update(specs, copies, skeleton)


def _copy(value: Any) -> Any:
    """An array that nobody else donates or writes to; of keys, their data."""
    if not isinstance(value, jax.Array):
        return np.array(value)
    return (jax.random.key_data(value) if leaves.is_key(value.dtype) else value).copy()


def _read(copy: Any) -> tuple[Callable[[], Any], bool]:
    """The log's own copy, which nobody writes to, can be read behind the training loop."""
    return partial(_bytes_of, copy), True


def _bytes_of(copy: Any) -> Any:
    with leaves.own_rules():
        return leaves.bytes_of(copy)


def _refuse_classes(node: Any) -> None:
    """A restore builds what is Python's own. Of other containers it knows the name only, and code
    is not found by name.
    """
    if isinstance(node, dict):
        if node.get("t") == "fields":
            raise UnsupportedLeaf(
                f"a restore could not build a {node['c']} again; give the update dicts, lists and"
                " tuples, such as jax.tree.leaves(gradients), and let it put them together"
            )
        for child in [*node.get("n", ()), *(child for _, child in node.get("k", ()))]:
            _refuse_classes(child)
