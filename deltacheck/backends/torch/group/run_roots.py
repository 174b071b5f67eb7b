"""The roots of a run: one root, or a root in memory in front of a durable one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from deltacheck.errors import Damaged, StepNotFound
from deltacheck.maintain.memory_tier import Tier, durable_digest
from deltacheck.save.root_writer import RootWriter
from deltacheck.save.saver import Saver
from deltacheck.store import layout
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots import tagging
from deltacheck.store.roots.root import Root

log = logging.getLogger("deltacheck")


class RunRoots:
    """The roots of a run, as those of one run of saves: here its only root.

    Args:
        live: The root that saves are written to.
        durable: The durable root, which has the tags. Without a memory tier, it is ``live``.
        writer: The right to change the steps of the durable root.
        tier: The memory tier. ``None``: there is none, or this is a rank other than 0, which only
            writes segments to it.
        patience_seconds: The longest wait for copies; ``None``: the caller's own.
    """

    def __init__(
        self,
        live: Root,
        durable: Root,
        writer: RootWriter,
        tier: Tier | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        self.live, self.durable, self.tier = live, durable, tier
        self._writer = writer
        self._patience_seconds = patience_seconds
        # Copies are read in this order.
        self.roots = (durable,) if live is durable else (live, durable)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self.durable.steps()

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step, a tag's save or the newest step, and its root."""
        return self.durable, self.durable.manifest(step)

    def require_digest(self, root: Root, manifest: Manifest, expected: str | None) -> None:
        """Raise ``Damaged`` unless a step has the digest that the caller has kept."""
        root.require_digest(manifest, expected)

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a step of the durable root."""
        tagging.put(self.durable, step, name, move=move)

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step."""
        self._writer.delete(step)

    # --- copies of steps --------------------------------------------------------------------------

    def raise_unseen(self) -> None:
        """Raise the failure of a copy, if no call has raised it."""
        if self.tier is not None:
            self.tier.raise_unseen()

    def persist(self, deadline: Deadline) -> None:
        """Wait until the newest step is in the durable root."""
        if self.tier is not None:
            seconds = [s for s in (self._patience_seconds, deadline.left) if s is not None]
            self.tier.persist(None, min(seconds, default=None))

    # --- reading ----------------------------------------------------------------------------------

    def durable_form(self, manifest: Manifest) -> Manifest | None:
        """Return the copy of a step in the durable root, or ``None`` if none can be read."""
        name = layout.checkpoint_id(manifest.seq)
        try:
            durable = self.durable.read(self.durable.path / layout.CHECKPOINTS / name / "zarr.json")
        # Not copied yet, deleted, or damaged too: the caller reports the first failure.
        except (FileNotFoundError, Damaged):
            return None
        # A resumed run may have used the number again; only the nonce identifies a save.
        return durable if durable.nonce == manifest.nonce else None

    def copies(
        self, step: int | str | None, expected_digest: str | None
    ) -> list[tuple[Root, Manifest]]:
        """Return the newest save of a step in each root that has it, the live root first.

        Raises ``StepNotFound``, and ``Damaged`` if it has not the digest that is expected.
        """
        root, manifest = self.find(step)
        self.require_digest(root, manifest, expected_digest)
        durable = None if root is self.durable else self.durable_form(manifest)
        return [(root, manifest)] + ([] if durable is None else [(self.durable, durable)])

    def candidates(self, step: int | str | None) -> list[Root]:
        """Return the roots to look for the newest whole step in."""
        return [self.durable] if isinstance(step, str) else list(self.roots)

    def load(self, root: Root, manifest: Manifest, load: Callable[[Root, Manifest], Any]) -> Any:
        """Load a step; if it is damaged in memory, load its copy in the durable root."""
        try:
            return load(root, manifest)
        # Files in memory are never synced. The copy on the disk may be whole.
        except Damaged as error:
            durable = None if root is self.durable else self.durable_form(manifest)
            if durable is None:
                raise
            log.warning("%s. It is read from %s instead", str(error), self.durable.path)
            return load(self.durable, durable)

    def without_deletion(self) -> AbstractContextManager[object]:
        """Return a context in which no step that is being read is deleted by this process."""
        # The next save builds on the segments that are read, and the drain may trim the memory.
        return nullcontext() if self.tier is None else self.tier.drain.without_trimming()

    def is_base(self, root: Root) -> bool:
        """Return true if saves can go on from the segments of a root."""
        # Segments of the durable root are no base for saves in memory: chains begin anew there.
        return root is self.live

    # --- the end ----------------------------------------------------------------------------------

    def stop(self, release: Callable[[], None]) -> None:
        """Copy the newest step, then call ``release``, on the thread of the copies."""
        if self.tier is None:
            release()
        else:
            self.tier.stop(release)

    def await_end(self, deadline: Deadline) -> None:
        """Wait until the copies have ended."""
        if self.tier is not None:
            self.tier.await_end(deadline.left)

    def abandon(self) -> None:
        """Record that nobody refers to the engine, so that another may wait for the memory."""
        if self.tier is not None:
            self.tier.abandon()

    def release(self) -> None:
        """Give the memory root back."""
        if self.tier is not None:
            self.tier.release()


class MemoryFirst(RunRoots):
    """A run whose newest steps are in memory, and are copied to a durable root later."""

    @property
    def _tier(self) -> Tier:
        assert self.tier is not None, "only rank 0 has a tier"
        return self.tier

    def make_room(
        self, saver: Saver, step: int, most_bytes: int, start_over: Callable[[], None]
    ) -> bool:
        """Wait until the memory has space for one more save, or return ``False`` to skip it.

        Args:
            saver: The saver, whose pending saves take space, too.
            step: The training step of the save.
            most_bytes: The most bytes that it takes.
            start_over: Called if the memory is emptied, so that the save writes whole leaves.
        """
        return self._tier.make_room(
            step,
            most_bytes,
            lambda: len(saver.pending()),
            start_over,
            wait=saver.options.on_busy == "wait",
            timeout=self._patience_seconds,
        )

    def steps(self) -> list[int]:
        """Return the steps in memory and in the durable root, ascending."""
        return sorted({*self.durable.steps(), *self.live.steps()})

    def find(self, step: int | str | None) -> tuple[Root, Manifest]:
        """Return the newest save of a step and its root: the memory, if both have it."""
        if isinstance(step, str):
            return self.durable, self.durable.manifest(step)
        candidates: list[tuple[Root, Manifest]] = []
        for root in (self.live, self.durable):
            with contextlib.suppress(StepNotFound):
                candidates.append((root, root.manifest(step)))
        if not candidates:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise StepNotFound(
                f"neither {self.live.path} nor {self.durable.path} has"
                f" {'any step' if step is None else f'step {step}'}; steps: {steps}"
            )
        # For equal numbers ``max`` returns the first candidate, the memory, which is faster to
        # read.
        return max(candidates, key=lambda candidate: candidate[1].seq)

    def require_digest(self, root: Root, manifest: Manifest, expected: str | None) -> None:
        """Raise ``Damaged`` unless a step has the digest that the caller has kept."""
        # The digest that a save reports is that of the durable manifest, also while the step is
        # only in memory, where its manifest differs.
        is_live = root is self.live and expected is not None
        digest = durable_digest(self.durable, manifest) if is_live else None
        root.require_digest(manifest, expected, digest)

    def tag(self, step: int | str | None, name: str, *, move: bool) -> None:
        """Name a step of the durable root; a step that is only in memory is copied there first."""
        # The lock is held so that nothing deletes the copy before it has its tag.
        with self._tier.drain.retention_lock:
            root, manifest = self.find(step)
            if root is self.live and self.durable_form(manifest) is None:
                self._tier.persist(manifest, None)
            tagging.put(self.durable, step, name, move=move)

    def delete(self, step: int) -> None:
        """Delete every checkpoint of a training step, in memory and in the durable root."""
        self._tier.delete(step)
