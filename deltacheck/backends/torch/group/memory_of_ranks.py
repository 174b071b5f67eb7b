"""The session of ranks with a memory tier: one step of all in memory, then copied by rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from deltacheck.backends.torch.group.collective import StepPlaces
from deltacheck.backends.torch.group.process_group import ProcessGroupSession
from deltacheck.backends.torch.group.single_process import Attempt, RestoreRequest
from deltacheck.backends.torch.group.two_roots import TwoRoots
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.maintain.memory_tier import MemoryTier, Tier, most_bytes
from deltacheck.save.ranks.rank_setup import RankSetup
from deltacheck.save.save_options import Settings
from deltacheck.store.documents import Written
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import create_store
from deltacheck.store.roots.root import Root

_REMEDY = (
    "The ranks of a memory tier share one directory in memory, so they are processes of one"
    " machine, and of one container if /dev/shm is its own. On several machines, save without"
    " memory="
)


# The part of ``io_timeout_seconds`` that rank 0 waits for copies while the others wait for it.
_PATIENCE = 0.75


class MemoryOfRanksSession(ProcessGroupSession):
    """The session of one rank whose run keeps its newest steps in memory.

    Every rank writes its segments to the memory root. Rank 0 commits there, and its drain copies
    the steps of all ranks.

    Args:
        path: The durable root, which rank 0 opens for all.
        settings: The settings of all saves, the same on every rank.
        settle_reads: Waits until no save under way reads the state any more.
        process_group: The ranks.
        memory: The memory tier, with the same options on every rank.

    Raises:
        ForeignMemory: The memory holds steps that are not the newest of this run.
        RankFailed: The ranks differ in an option or in a folder, or one of them failed.
    """

    def __init__(
        self,
        path: Place,
        settings: Settings,
        settle_reads: Callable[[], None],
        process_group: dist.ProcessGroup,
        memory: MemoryTier,
    ) -> None:
        # Before the base class is initialised, which calls ``_live_root``.
        self._memory = memory
        # Shorter than the other ranks wait for rank 0, so that they learn of the cause.
        self._patience_seconds = _PATIENCE * settings.options.io_timeout_seconds
        # Rank 0 only.
        self.tier: Tier | None = None
        super().__init__(path, settings, settle_reads, process_group)
        self._roots = TwoRoots(self.live, self.root)
        if self.tier is not None:
            # The bases of the other ranks are segments of the newest step.
            self.tier.start(
                lambda: self.saver.protected_segments() | self.group.protected(self.live.store)
            )

    @property
    def _tier(self) -> Tier:
        assert self.tier is not None, "only rank 0 has a tier"
        return self.tier

    def _own_options(self) -> dict[str, object]:
        tier = self._memory
        return {
            "memory": MemoryTier(
                "", tier.memory_bytes, tier.persist_every, tier.keep, tier.on_stale
            )
        }

    def _live_root(self, settings: Settings) -> Root:
        with self.group.sharing_failure():
            path = storage.local(self._memory.path, "a memory tier").absolute()
        setup = RankSetup(storage.full_name(path), {})
        with self.group.same_setup(path, setup, _REMEDY) as remove_probe:

            def open_tier() -> None:
                # Before the root is made, which must be empty.
                remove_probe()
                self.tier = Tier(
                    self._memory, self.writer, settings.options, self._patience_seconds
                )

            self.group.call_on_first(open_tier, "opens a memory root")
        with self.group.sharing_failure():
            live = (
                Root(path, create_store(path, durability=Durability.PROCESS))
                if self.tier is None
                else self.tier.root
            )
        # Every rank waits here, so that none saves to a memory that another one could not open.
        self.group.call_on_first(lambda: None, "opens a memory root")
        return live

    # --- saves ------------------------------------------------------------------------------------

    def begin(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, is_whole: bool
    ) -> Attempt | None:
        """Agree with the other ranks on a save in memory, or return ``None`` if all skip it."""
        if self.tier is not None:
            # A failed copy is raised before a new save begins, as a failed save is.
            with self.group.sharing_failure():
                self.tier.raise_unseen()
        return super().begin(step, flat, metrics, is_whole=is_whole)

    def _commit(self, manifest: Manifest) -> Written:
        return self._tier.commit(manifest)

    def _make_room(self, step: int, tiles: Flat) -> bool:
        """Let rank 0 wait until the memory has space for one more save of all ranks."""
        sizes = [LeafSpec.of(name, x.shape, x.dtype).raw_bytes for name, x in tiles.leaves.items()]
        is_empty = False

        def start_over() -> None:
            nonlocal is_empty
            is_empty = True
            self._start_over()

        def decide(bytes_of_ranks: list[Any]) -> tuple[bool, bool]:
            has_room = self._tier.make_room(
                step,
                sum(bytes_of_ranks),
                lambda: len(self.saver.pending()),
                start_over,
                wait=self.saver.options.on_busy == "wait",
                timeout=self._patience_seconds,
            )
            return has_room, is_empty

        try:
            has_room, is_empty = self.group.joint.agree(
                most_bytes(sum(sizes), len(sizes)), decide, "makes room"
            )
        except BaseException:
            # Rank 0 may have emptied the memory before it failed.
            self._start_over()
            raise
        if is_empty:
            self._start_over()
        return bool(has_room)

    def _start_over(self) -> None:
        self.group.forget_segments()
        self.saver.start_over()

    def persist(self, timeout: float | None) -> None:
        """Wait until the newest step is copied to the durable root."""
        deadline = Deadline.after(timeout)
        with self.group.sharing_failure():
            self.saver.wait(timeout)

        def persist() -> None:
            seconds = [self._patience_seconds, deadline.left]
            self._tier.persist(None, min(s for s in seconds if s is not None))

        self.group.call_on_first(persist, "persists")

    def finish(self, timeout: float | None) -> None:
        """Wait for the saves of this rank, and on rank 0 until the newest step is copied."""
        # Without an agreement: the other ranks may have ended.
        deadline = Deadline.after(timeout)
        self.saver.wait(timeout)
        if self.tier is not None:
            self.tier.persist(None, deadline.left)

    # --- steps ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps in memory and in the durable root, ascending."""
        return self._roots.steps()

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step, a tag's save or the newest step, and its root."""
        return self._roots.find(step)

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a step of the durable root; a step that is only in memory is copied there first."""
        self.run_once(lambda: self._roots.tag(self._tier, step, name, move=move))

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step, in memory and in the durable root."""
        self.run_once(lambda: self._tier.delete(step))

    # --- restores ---------------------------------------------------------------------------------

    def restore(self, request: RestoreRequest) -> tuple[Manifest, Any]:
        """Restore a step on every rank, from memory if it is there."""
        with self._no_deletion():
            manifest, state = super().restore(request)
            # The next save of any rank may build on these segments, and the drain trims the memory.
            self.group.segments = frozenset(ref.id for ref in manifest.segments)
        return manifest, state

    def _places(self) -> StepPlaces:
        return self._roots

    def _no_deletion(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self.tier is None else self.tier.drain.without_trimming()

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float | None) -> None:
        """Finish the saves of this rank; on rank 0, copy the newest step and give both roots back.

        The other ranks do not wait for rank 0.
        """
        deadline = Deadline.after(timeout)
        try:
            self.saver.close(timeout)
            self.live.store.close()
        finally:
            # The drain ends after the saver's last thread, which may still commit a step in memory.
            self.saver.when_stopped(self._stop)
            if self.tier is not None and not self.saver.pending():
                self.tier.await_end(deadline.left)

    def _stop(self) -> None:
        # No agreement comes any more, and torch's groups belong to this thread, not the drain's.
        self.group.close()
        if self.tier is None:
            self.release()
        else:
            self.tier.stop(self.release)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for its roots."""
        super().abandon()
        if self.tier is not None:
            self.tier.abandon()

    def release(self) -> None:
        """Give the groups back, and on rank 0 both roots."""
        if self.tier is not None:
            self.tier.release()
        super().release()
