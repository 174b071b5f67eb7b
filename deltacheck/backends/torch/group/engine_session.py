"""The session of an engine: alone or with other ranks, with one root or with a memory tier.

torch's global hooks refer to ``OpenSession`` and not to the engine, so that an engine which nobody
refers to is collected. Its saves are then finished as if it had been closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from deltacheck.backends.torch.capture import tensor_codec
from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.backends.torch.capture.guard import Guard
from deltacheck.backends.torch.capture.tensor_codec import TorchCodec
from deltacheck.backends.torch.group import memory_of_ranks
from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.restores import Restores
from deltacheck.backends.torch.group.run_roots import MemoryFirst, RunRoots
from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.repeated import Flattener
from deltacheck.leaf.tree import Flat
from deltacheck.maintain import compaction
from deltacheck.maintain.memory_tier import MemoryTier, Tier, most_bytes
from deltacheck.save import exits
from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.job.source import Sources, specs_of_sources
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.save_options import SaveOptions, Settings
from deltacheck.save.saver import Saver
from deltacheck.save.treatment.signals import Agreed
from deltacheck.store.documents import Written
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opened import Opened, open_alone
from deltacheck.store.roots.root import Root

if TYPE_CHECKING:
    # torch.distributed.tensor takes long to import, and most processes save alone.
    from deltacheck.backends.torch.group.collective import RankGroup

Commit = Callable[[Manifest], Written]


class BegunSave(NamedTuple):
    """A save that may begin: the leaves that this process writes, and the call that commits it.

    ``agreed`` is the agreement with other ranks; ``None`` if there are none.
    """

    flat: Flat
    commit: Commit
    agreed: Agreed | None = None


class Session:
    """The session of an engine on its roots: open, begin a save, commit, restore and release.

    It is composed of who saves and of where: ``group`` agrees with other ranks, ``roots`` is one
    root or a memory tier in front of it.

    Args:
        path: The durable root, made if it does not exist.
        settings: The settings of all saves, the same on every rank.
        settle_reads: Waits until no save under way reads the state any more.
        group: The ranks that save together, every one of which makes the same calls in the same
            order; ``None``: this process saves alone.
        memory: The memory tier, with the same options on every rank; ``None``: there is none.

    Raises:
        ValueError: The options cannot be combined.
        ForeignMemory: The memory holds steps that are not the newest of this run.
        RankFailed: The ranks differ in an option or in a folder, or one of them failed.
    """

    def __init__(
        self,
        path: Place,
        settings: Settings,
        settle_reads: Callable[[], None],
        *,
        group: RankGroup | None = None,
        memory: MemoryTier | None = None,
    ) -> None:
        # Returns the leaves and the skeleton of a state that is saved.
        self.flatten: Callable[[object], Flat] = (
            Flattener(tensor_codec.is_host) if group is None else group.flatten
        )
        self.group = group
        with ExitStack() as on_failure:
            # Nobody could release what an engine has taken that was not made.
            if group is not None:
                on_failure.callback(group.close)
            opened = _opened(path, settings, group, memory)
            self.root = Root(path, opened.store)
            self.writer = RootWriter(
                self.root,
                opened.lease,
                settings.keep,
                grace_seconds=settings.options.grace_seconds,
                rewrite=compaction.reclaim_history,
            )
            on_failure.callback(self.writer.release)
            self.roots = _roots(self.root, self.writer, settings.options, group, memory)
            on_failure.callback(self.roots.release)
            self.live = self.roots.live
            # A memory tier may hold newer steps than the durable root, and each number is used
            # once.
            next_seq = opened.next_seq
            if memory is not None:
                next_seq = max(next_seq, self.live.next_seq())
            self.saver = Saver(self.live.store, TorchCodec(), settings, Numbers(next_seq))
            on_failure.pop_all()
        self.restores = Restores(self.roots, self.saver, settle_reads, group)
        self.writer.protect(self.saver.chains.protected_segments)
        self.saver.on_resume = self.writer.course.follow
        if group is not None:
            group.joint.groups = self.saver.groups
            group.joint.compactions = self.saver.chains.compactions
            # The saver of rank 0 does not know the segments of other ranks, which a collection
            # must spare.
            self.writer.protect(lambda: group.protected(self.root.store))
        if self.roots.tier is not None:
            # The drain may remove segments, so it must know those that the savers build on.
            self.roots.tier.start(self._bases_in_memory)

    def _bases_in_memory(self) -> set[str]:
        segments = self.saver.chains.protected_segments()
        if self.group is not None:
            segments |= self.group.protected(self.live.store)
        return segments

    # --- saves ------------------------------------------------------------------------------------

    def tensors(self, state: object) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a state with their paths; of sharded ones, this rank's parts."""
        if self.group is not None:
            yield from self.group.tensors(state)
            return
        # Not by the flattener, which keeps what it knows of the states that are saved.
        for path, value in leaves.flatten(state).arrays.items():
            if isinstance(value, torch.Tensor):
                yield path, value

    def begin(self, step: int, flat: Flat, metrics: Mapping[str, float]) -> BegunSave | None:
        """Begin a save, or return ``None`` if all ranks skip it."""
        group, roots = self.group, self.roots
        # Of ranks, only the one with the lease calls it, which has the tier, too.
        commit = (roots.tier or self.writer).commit
        if group is None:
            return BegunSave(flat, commit)
        make_room: Callable[[int, Flat], bool] | None = None
        if isinstance(roots, MemoryFirst):
            make_room = partial(memory_of_ranks.make_room, group, roots, self.saver)
            # A failed copy is raised before a new save begins, as a failed save is.
            with group.sharing_failure():
                roots.raise_unseen()
        begun = group.begin(self.saver, step, flat, metrics, make_room)
        if begun is None:
            return None
        tiles, attempt = begun
        make = group.maker(commit, self.live.store.path)
        return BegunSave(tiles, partial(attempt.commit, make), attempt.agreed)

    def make_room(self, step: int, sources: Sources) -> bool:
        """Wait until there is space for one more save, or return ``False`` to skip it."""
        # Ranks agree on the space when a save begins.
        if self.group is not None or not isinstance(self.roots, MemoryFirst):
            return True
        self.saver.check_usable()
        # A failed copy is raised before a new save begins, as a failed save is.
        self.roots.raise_unseen()
        sizes = [spec.raw_bytes for spec in specs_of_sources(sources)]
        largest = most_bytes(sum(sizes), len(sizes))
        return self.roots.make_room(self.saver, step, largest, self.saver.chains.start_over)

    def wait(self, timeout: float | None) -> None:
        """Wait until every save under way is committed, and raise the first unseen failure."""
        self.saver.wait(timeout)
        # Of ranks, only rank 0 knows; it shares the failure when the next save begins.
        if self.group is None:
            self.roots.raise_unseen()

    def persist(self, timeout: float | None) -> None:
        """Wait until the newest step is in the durable root."""
        if self.group is None or not isinstance(self.roots, MemoryFirst):
            self.finish(timeout)
            return
        # One deadline for both waits.
        deadline, roots = Deadline.after(timeout), self.roots
        with self.group.sharing_failure():
            self.saver.wait(timeout)
        self.group.call_on_first(lambda: roots.persist(deadline), "persists")

    def finish(self, timeout: float | None) -> None:
        """Do what ``persist`` does, without other ranks, which may have ended."""
        deadline = Deadline.after(timeout)
        self.saver.wait(timeout)
        self.roots.persist(deadline)

    def run_once(self, action: Callable[[], object]) -> None:
        """Run an action in one process; every rank waits for it and raises its failure."""
        if self.group is None:
            action()
        else:
            self.group.call_on_first(action)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float | None) -> None:
        """Finish the saves under way, copy the newest step, and give the roots back.

        If the time runs out, the saver's threads go on, and the last of them releases the roots.
        No rank waits for another.
        """
        deadline = Deadline.after(timeout)
        try:
            self.saver.close(timeout)
            self.live.store.close()
        finally:
            # Threads that still write need the lease, and may still commit a step in memory, so
            # the last of them ends the copies and releases the roots.
            self.saver.pipeline.when_stopped(self._stop)
            if not self.saver.pending():
                self.roots.await_end(deadline)

    def _stop(self) -> None:
        # No agreement comes any more, and torch's groups belong to this thread, not the drain's.
        if self.group is not None:
            self.group.close()
        self.roots.stop(self.release)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for its roots."""
        self.writer.abandon()
        self.roots.abandon()

    def release(self) -> None:
        """Give the groups and the roots back. No save is under way."""
        self.roots.release()
        if self.group is not None:
            self.group.close()
        self.writer.release()


class OpenSession:
    """The session of one engine and all that may outlive it: saves under way, hooks, and the end.

    Args:
        settings: The settings of all saves.
        open_session: Opens the session. Its argument waits until no save reads the state any more,
            and is called in restores only.
    """

    def __init__(
        self, settings: Settings, open_session: Callable[[Callable[[], None]], Session]
    ) -> None:
        # Only an exact policy reads each leaf once and in order, so that leaves can be copied
        # ahead.
        self.capture = Capture(settings)
        self.session = open_session(self.settle_reads)
        self.saver = self.session.saver
        # The rest of an overlapped restore, also after it has failed.
        self.arrival: Arrival | None = None
        self._guard: Guard | None = None

    def watch(self) -> Guard:
        """Watch the steps of all optimizers from now on."""
        self._guard = Guard(self.before_update)
        return self._guard

    def before_update(self) -> None:
        """Wait until the saves under way have read the state, and an overlapped restore is done."""
        # Its hooks stay, because this may be called by a hook.
        if (arrival := self.arrival) is not None:
            arrival.wait()
        self.settle_reads()

    def await_arrival(self, timeout: float | None = None) -> None:
        """Wait for an overlapped restore. Each call raises its failure, until the next restore."""
        if (arrival := self.arrival) is not None:
            arrival.wait(timeout)
            arrival.release()
            self.arrival = None

    def settle_reads(self) -> None:
        """Wait until no save under way reads the state any more."""
        if self.saver.settle_reads():
            # The training's stream waits for the reads, which does not block the host.
            self.capture.hold()
        if self._guard is not None:
            self._guard.announced()

    # --- the end ----------------------------------------------------------------------------------

    def end(self, timeout: float | None) -> None:
        """Finish the saves under way and give the root back, as ``Engine.close``."""
        deadline = Deadline.after(timeout)
        arrival = self.arrival if self.saver.is_ours() else None
        if arrival is not None:
            arrival.join(timeout)
            self.arrival = None
        # Before the saves, of which one may fail: torch's global hook would stay.
        if self._guard is not None:
            self._guard.close()
        try:
            # A forked child has neither the threads nor the lease of its parent.
            if self.saver.is_ours():
                self.session.close(deadline.left)
        except Exception:
            exits.forget(self)
            raise
        # Not after Ctrl-C, or after ``sys.exit`` in a handler: the exit then finishes the saves.
        exits.forget(self)
        if arrival is not None:
            arrival.finish()

    def end_unattended(self) -> None:
        """Do the same behind the program, because nobody refers to the engine any more.

        A garbage collection calls this on any thread.
        """
        self.session.abandon()
        self.saver.end_unattended(partial(exits.close_unattended, self))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves when a signal ends the process; see ``exits``."""
        deadline = Deadline.after(timeout)
        self.await_arrival(timeout)
        self.session.finish(deadline.left)
        self.saver.pipeline.failures.raise_lost()

    def close(self, timeout: float | None = None) -> None:
        """End when the process ends. Steps that are only in memory are copied too."""
        self.end(timeout)
        self.saver.pipeline.failures.raise_lost()


def _opened(
    path: Place, settings: Settings, group: RankGroup | None, memory: MemoryTier | None
) -> Opened:
    if group is None:
        return open_alone(path, settings.durability)
    # An engine with another memory tier, or with none, is refused instead of waited for.
    common = None if memory is None else replace(memory, path="")
    return group.open(path, settings, memory=common)


def _roots(
    root: Root,
    writer: RootWriter,
    options: SaveOptions,
    group: RankGroup | None,
    memory: MemoryTier | None,
) -> RunRoots:
    if memory is None:
        return RunRoots(root, root, writer)
    if group is not None:
        return memory_of_ranks.open_memory(group, root, writer, options, memory)
    tier = Tier(memory, writer, options)
    return MemoryFirst(tier.root, root, writer, tier)
