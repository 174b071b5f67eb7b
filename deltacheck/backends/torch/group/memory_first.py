"""The session of an engine with a memory tier: steps are committed in memory, then copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.single_process import (
    Attempt,
    RestoreRequest,
    SingleProcessSession,
)
from deltacheck.backends.torch.group.two_roots import TwoRoots
from deltacheck.errors import Damaged
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.maintain.memory_tier import MemoryTier, Tier, most_bytes
from deltacheck.restore.chain import Chain
from deltacheck.save.save_options import Settings
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")


class MemoryFirstSession(SingleProcessSession):
    """The session of an engine whose newest steps are in memory.

    Args:
        path: The durable root.
        settings: The settings of all saves.
        settle_reads: Waits until no save under way reads the state any more.
        memory: The memory tier.
    """

    def __init__(
        self,
        path: Place,
        settings: Settings,
        settle_reads: Callable[[], None],
        memory: MemoryTier,
    ) -> None:
        # Before the base class is initialised, which calls ``_live_root``.
        self._memory = memory
        self.tier: Tier | None = None
        super().__init__(path, settings, settle_reads)
        # The drain may remove segments, so it must know those that the saver builds on.
        self._tier.start(self.saver.protected_segments)
        self._roots = TwoRoots(self.live, self.root)

    @property
    def _tier(self) -> Tier:
        assert self.tier is not None, "the session has no live root yet"
        return self.tier

    def _live_root(self, settings: Settings) -> Root:
        self.tier = Tier(self._memory, self.writer, settings.options)
        return self.tier.root

    def begin(
        self, step: int, flat: Flat, metrics: Mapping[str, float], *, is_whole: bool
    ) -> Attempt | None:
        """Begin a save that is committed in memory."""
        return Attempt(flat, self._tier.commit)

    def make_room(self, step: int, specs: Iterable[LeafSpec]) -> bool:
        """Wait until the memory has space for one more save, or return ``False`` to skip it."""
        self.saver.check_usable()
        # A failed copy is raised before a new save begins, as a failed save is.
        self._tier.raise_unseen()
        sizes = [spec.raw_bytes for spec in specs]
        return self._tier.make_room(
            step,
            most_bytes(sum(sizes), len(sizes)),
            lambda: len(self.saver.pending()),
            self.saver.start_over,
            wait=self.saver.options.on_busy == "wait",
        )

    def wait(self, timeout: float | None) -> None:
        """Wait until every save under way is committed in memory; raise the failure of a copy."""
        self.saver.wait(timeout)
        self._tier.raise_unseen()

    def persist(self, timeout: float | None) -> None:
        """Wait until the newest step is copied to the durable root."""
        # One deadline for both waits.
        deadline = Deadline.after(timeout)
        self.saver.wait(timeout)
        self._tier.persist(None, deadline.left)

    def steps(self) -> list[int]:
        """Return the steps in memory and in the durable root, ascending."""
        return self._roots.steps()

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a step of the durable root; a step that is only in memory is copied there first."""
        self._roots.tag(self._tier, step, name, move=move)

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step, in memory and in the durable root."""
        self._tier.delete(step)

    def restore_overlapped(self, request: RestoreRequest) -> tuple[Manifest, Any, Arrival]:
        """Refuse: the memory may be trimmed while the restore reads it."""
        raise ValueError("memory and overlap=True cannot be given together yet; restore without it")

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step and its root: the memory, if both have it.

        Tags are those of the durable root.
        """
        return self._roots.find(step)

    def _no_deletion(self) -> AbstractContextManager[object]:
        # The next save builds on the segments that are read, and the drain may trim the memory.
        return self._tier.drain.without_trimming()

    def _roots_of(self, step: int | str | None) -> list[Root]:
        return [self.root] if isinstance(step, str) else [self.live, self.root]

    def _require_digest(self, root: Root, manifest: Manifest, expected: str | None) -> None:
        self._roots.require_digest(root, manifest, expected)

    def _load_or_durable(
        self, root: Root, manifest: Manifest, load: Callable[[Root, Manifest], Any]
    ) -> Any:
        """Load a step; if it is damaged in memory, load its copy in the durable root."""
        try:
            return load(root, manifest)
        # Files in memory are never synced. The copy on the disk may be whole.
        except Damaged as error:
            durable = None if root is self.root else self._roots.durable_form(manifest)
            if durable is None:
                raise
            log.warning("%s. It is read from %s instead", str(error), self.root.path)
            return load(self.root, durable)

    def _adopt(
        self,
        root: Root,
        manifest: Manifest,
        chains: Mapping[str, Chain],
        bases: Mapping[str, NDArray[np.uint8]],
    ) -> None:
        # Segments of the durable root are no base for saves in memory: chains begin anew there.
        if root is not self.live:
            chains, bases = {}, {}
        self.saver.adopt(chains, bases, manifest)

    def close(self, timeout: float | None) -> None:
        """Finish the saves under way, copy the newest step and give both roots back."""
        deadline = Deadline.after(timeout)
        try:
            self.saver.close(timeout)
            self.live.store.close()
        finally:
            # The drain ends after the saver's last thread, which may still commit a step in memory.
            self.saver.when_stopped(partial(self._tier.stop, self.release))
            if not self.saver.pending():
                self._tier.await_end(deadline.left)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for its roots."""
        super().abandon()
        if self.tier is not None:
            self.tier.abandon()

    def release(self) -> None:
        """Give both roots back."""
        if self.tier is not None:
            self.tier.release()
        super().release()
