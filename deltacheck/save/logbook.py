"""Keep a gradient log between saves: its base, the updates since, and the content of each save.

The log stores the inputs of the updates instead of the state. A save first repeats the new updates
on a replica and compares digests. If they differ, it stores the state itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.replay import LogSituation, ReplayLimits
from deltacheck.save.job.source import Coded, LeafSource
from deltacheck.store.manifest import Replay, ReplayStep

log = logging.getLogger("deltacheck")

# The skeleton of an empty dictionary, for updates without options.
_NONE: Node = {"t": "dict", "k": []}


class Replica(Protocol):
    """A copy of the memory that updates work on, in the framework's own form."""

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """Repeat one update. ``inputs`` are not changed."""
        ...

    def memory(self) -> Flat:
        """Return the arrays that the updates work on."""
        ...


@dataclass(slots=True)
class LoggedUpdate:
    """One update since the base.

    Args:
        specs: The leaf of each input, by input name.
        inputs: Copies of the inputs, by name; ``None`` once they are stored.
        options: The options of the update, such as the learning rate.
    """

    specs: dict[str, LeafSpec]
    inputs: dict[str, Any] | None
    options: Node = field(default_factory=lambda: _NONE)


@dataclass(slots=True)
class Base:
    """The checkpoint that a restore replays from, and the replica that has followed the updates.

    Args:
        seq: The sequence number of the checkpoint.
        step: Its training step.
        name: The name of what computes the updates.
        memory: The structure of the memory.
        places: The leaf path of each array of the memory, by array path.
        replica: The copy of the memory, after ``replayed`` updates.
        standing: ``Saver.standing()`` after the last save of this log.
        updates: The updates since the checkpoint, oldest first.
        replayed: The number of updates that the replica has repeated.
    """

    seq: int
    step: int
    name: str
    memory: Node
    places: dict[str, str]
    replica: Replica
    standing: tuple[int, int]
    updates: list[LoggedUpdate] = field(default_factory=list)
    replayed: int = 0

    @property
    def fresh(self) -> list[LoggedUpdate]:
        """The updates that no save has stored."""
        return [update for update in self.updates if update.inputs is not None]


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The content of one save.

    Args:
        rest: The part of the state that is stored directly.
        sources: Leaves beside it: the inputs of updates, and stored leaves that stay.
        replay: How a restore computes the other leaves of the state.
        reason: Why the state itself is stored. If there is a reason, ``rest`` is the whole state,
            and there are neither sources nor ``replay``.
    """

    rest: Flat
    sources: Mapping[str, LeafSource]
    replay: Replay | None
    reason: str | None

    @property
    def note(self) -> str:
        """The remark for the save report."""
        return "" if self.reason is None else f"the state itself is stored: {self.reason}"


class Logbook:
    """One gradient log.

    Args:
        limits: When a save stores the state itself.
        digests: Return the leaf digest of each array of a memory, by array path.
        read: Return how a save reads an input, and true if that may happen behind the training.
    """

    def __init__(
        self,
        limits: ReplayLimits,
        digests: Callable[[Flat], dict[str, str]],
        read: Callable[[Any], tuple[Callable[[], Any], bool]],
    ) -> None:
        self._limits = limits
        self._digests = digests
        self._read = read
        self._base: Base | None = None
        # Why the next save must store the state itself, if an update could not be recorded.
        self._gap: str | None = None
        # Saves in a row whose replay differed from the live state.
        self._mismatches = 0

    @property
    def listens(self) -> bool:
        """True if the next save can still use an update."""
        return (
            self._base is not None
            and self._gap is None
            # One update above the limit is still recorded: it tells the save that there were too
            # many.
            and len(self._base.fresh) <= self._limits.max_steps_per_save
        )

    def record(self, make: Callable[[int], LoggedUpdate]) -> None:
        """Record an update.

        Args:
            make: Return the update with copies of its inputs, from its number. If it raises
                ``UnsupportedLeaf``, or memory is short, the next save stores the state itself.
        """
        if self._base is None or not self.listens:
            return
        if len(self._base.fresh) == self._limits.max_steps_per_save:
            # One update too many: the next save stores the state itself, and needs no inputs.
            for update in self._base.fresh:
                update.inputs = {}
            self._base.updates.append(LoggedUpdate({}, {}))
            return
        try:
            self._base.updates.append(make(len(self._base.updates)))
        # A device without memory left raises a RuntimeError. Training must not stop for an update
        # that cannot be stored.
        except (UnsupportedLeaf, RuntimeError, MemoryError) as error:
            self.spoil(str(error))

    def spoil(self, reason: str) -> None:
        """Let the next save store the state itself, for this reason."""
        self._gap = reason

    def plan(self, state: Flat, standing: tuple[int, int], memory: Callable[[], Flat]) -> LogPlan:
        """Plan the content of a save.

        Args:
            state: The live state.
            standing: ``Saver.standing()`` before the save.
            memory: Return the live arrays that the updates work on.
        """
        base = self._base
        fresh_count = 0 if base is None else len(base.fresh)
        # If anything else has saved or dropped the shadow since, the stored leaves are not those of
        # the base.
        has_base = base is not None and base.standing == standing
        stored_count = 0 if base is None else len(base.updates) - fresh_count
        reason = replay.why_direct(
            LogSituation(has_base, stored_count, fresh_count, self._mismatches, self._gap),
            self._limits,
        )
        promised: dict[str, str] = {}
        if reason is None and base is not None:
            try:
                promised, reason = self._prove(base, state, memory())
            except UnsupportedLeaf as error:
                reason = str(error)
        if reason is not None or base is None:
            return LogPlan(state, {}, None, reason)
        return self._logged(base, state, promised)

    def saved(
        self, plan: LogPlan, step: int, standing: tuple[int, int], rebase: Callable[[], Base | None]
    ) -> None:
        """Record that a save has begun as planned.

        Args:
            plan: The content of the save.
            step: Its training step.
            standing: ``Saver.standing()`` after it has begun.
            rebase: Return the save as a base, if it stores the state itself; ``None`` if it cannot
                be one.
        """
        if plan.reason is not None:
            gave_up = self._mismatches >= replay.GIVE_UP_AFTER
            log.info("step %d stores the state itself: %s", step, plan.reason)
            if gave_up and self._base is not None:
                log.warning(
                    "step %d: %s. The gradient log gives up: every save stores the state itself",
                    step,
                    plan.reason,
                )
            # In two steps: the old replica must be freed before the new one is allocated.
            self._base = None
            self._base = None if gave_up else rebase()
            self._gap = None
        elif self._base is not None:
            # The inputs are stored with this save, so their memory is released.
            for update in self._base.updates:
                update.inputs = None
            self._base.standing = standing

    def forget(self) -> None:
        """Drop the base, so that the next save stores the state itself."""
        self._base = None

    def _prove(self, base: Base, state: Flat, live: Flat) -> tuple[dict[str, str], str | None]:
        """Repeat the fresh updates on the replica.

        Returns:
            The digest of each leaf that the updates write, by path, and ``None``; or no digests
            and the reason why the updates cannot be replayed.
        """
        # Arrays that were added or moved have no counterpart in the replica.
        if places(live, state) != base.places:
            return (
                {},
                "the optimizer or the state has other arrays than at the checkpoint to replay from",
            )
        try:
            for update in base.updates[base.replayed :]:
                assert update.inputs is not None  # only what was replayed is stored
                base.replica.update(update.options, update.inputs)
                base.replayed += 1
            replayed = self._digests(base.replica.memory())
        except Exception as error:  # noqa: BLE001 - the checkpoint can store the state itself
            self._mismatches += 1
            return {}, f"{base.name} cannot be replayed: {type(error).__name__}: {error}"
        live_digests = self._digests(live)
        for path, digest in live_digests.items():
            if replayed.get(path) != digest:
                self._mismatches += 1
                return (
                    {},
                    (
                        f"leaf {base.places[path]!r} has digest {digest}, replaying"
                        f" {len(base.updates)} updates gives {replayed.get(path)}: another kernel,"
                        " or something else than the updates wrote to it"
                    ),
                )
        # Mismatches count only in a row: one success shows that a replay is possible.
        self._mismatches = 0
        return {base.places[path]: digest for path, digest in live_digests.items()}, None

    def _logged(self, base: Base, state: Flat, promised: dict[str, str]) -> LogPlan:
        """Return a plan that stores inputs in place of the ``promised`` leaves."""
        # The stored leaves stay as the base has them, because a restore replays from there.
        sources = {
            path: _unchanged(LeafSpec.of(path, leaf.shape, leaf.dtype))
            for path, leaf in state.leaves.items()
            if path in promised
        }
        for update in base.updates:
            for name, spec in update.specs.items():
                if update.inputs is None:
                    sources[spec.path] = _unchanged(spec)
                else:
                    current, lazy = self._read(update.inputs[name])
                    # A gradient has no relation to an earlier one, so no copy of it is kept for
                    # deltas.
                    sources[spec.path] = LeafSource(spec, current, lazy=lazy, whole=True)
        steps = tuple(
            ReplayStep({name: spec.path for name, spec in update.specs.items()}, update.options)
            for update in base.updates
        )
        rest = Flat(
            state.skeleton,
            {path: value for path, value in state.arrays.items() if path not in promised},
            {path: leaf for path, leaf in state.leaves.items() if path not in promised},
        )
        return LogPlan(
            rest,
            sources,
            Replay(base.seq, base.step, base.name, base.memory, base.places, steps, promised),
            None,
        )


def places(memory: Flat, state: Flat) -> dict[str, str] | None:
    """Return which leaf of the state is which array of the memory, by their addresses.

    ``None`` if an array is in no leaf, or two arrays are in one.
    """
    path_of = {
        (leaf.identity, leaf.shape, leaf.dtype): path
        for path, leaf in state.leaves.items()
        if leaf.identity is not None
    }
    leaf_paths: dict[str, str] = {}
    for path, leaf in memory.leaves.items():
        leaf_path = path_of.get((leaf.identity, leaf.shape, leaf.dtype))
        if leaf_path is None:
            return None
        leaf_paths[path] = leaf_path
    return leaf_paths if len(set(leaf_paths.values())) == len(leaf_paths) else None


def _unchanged(spec: LeafSpec) -> LeafSource:
    """Return a source that keeps the stored content of a leaf."""
    return LeafSource(spec, lambda: Coded(spec, None))
