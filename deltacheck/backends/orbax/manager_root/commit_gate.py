"""The commit of an item that Orbax waits for, and the gate that holds its manifest back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from deltacheck.backends.orbax.manager_root.orbax_internals import ItemPlace
from deltacheck.errors import SaveFailed
from deltacheck.save.handle import SaveHandle
from deltacheck.save.save_options import Settings
from deltacheck.store.documents import Written, encode_manifest, manifest_digest
from deltacheck.store.files import arrays
from deltacheck.store.files.durability import Durability
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import Flag, Lock
from deltacheck.store.manifest import Manifest, SavedSharding

# Orbax's own handler for trees, with which this content has no key type that it knows, says so.
_READ_WITH = "saved with deltacheck: read it with deltacheck.backends.orbax"
_TREE_MARK = json.dumps(
    {"tree_metadata": {"": {"key_metadata": [{"key": "", "key_type": _READ_WITH}]}}}
).encode()


class Notes(NamedTuple):
    """Content of a manifest beside the state: numbers, JSON of the user, and shardings."""

    metrics: Mapping[str, float]
    custom_metadata: Any = None
    shardings: tuple[SavedSharding, ...] = ()


class Gate:
    """A gate that holds a manifest back until Orbax has created the item's directory."""

    def __init__(
        self,
        directory: Path,
        timeout_seconds: float,
        durability: Durability = Durability.POWER,
        *,
        notes: Notes | None = None,
        makes_directory: bool = False,
    ) -> None:
        self._directory = directory
        self._durability = durability
        self._notes = notes
        self._makes_directory = makes_directory
        self.timeout_seconds = timeout_seconds
        # Orbax opens the gate on one of its threads, ``close`` and ``cancel`` abandon it on the
        # training thread, and the committer thread waits for the first of them.
        self._changed = Flag()
        self._lock = Lock()
        self._verdict = ""  # the first decision; "" until then

    @classmethod
    def of(cls, place: ItemPlace, settings: Settings, notes: Notes) -> Gate:
        """Return the gate of a save to a place."""
        return cls(
            place.directory,
            settings.options.io_timeout_seconds,
            settings.durability,
            notes=notes,
            makes_directory=place.is_ours,
        )

    def open(self) -> None:
        """Let the manifest be written: the directory exists."""
        self._decide("open")

    def abandon(self, reason: str) -> bool:
        """Refuse the manifest: the directory will never exist for this save.

        Does nothing once the gate is open. Returns whether the save is abandoned.
        """
        return self._decide(reason) != "open"

    def wait(self, timeout: float) -> bool:
        """Wait until the gate is open or abandoned. Return ``False`` if it is neither in time."""
        return self._changed.wait(timeout)

    def _decide(self, verdict: str) -> str:
        with self._lock:
            self._verdict = self._verdict or verdict
            self._changed.set()
            return self._verdict

    def write_manifest(self, manifest: Manifest) -> Written:
        """Write the manifest durably into the item's directory.

        This runs on the committer thread. The step exists once Orbax has renamed the directory.
        Raises ``SaveFailed`` if Orbax does not create the directory in time.
        """
        # Bounded, because Orbax may have failed without telling the handler.
        if not self._changed.wait(self.timeout_seconds):
            raise SaveFailed(
                f"Orbax did not create {self._directory} within {self.timeout_seconds:g} s"
            )
        if self._verdict != "open":
            raise SaveFailed(
                f"step {manifest.step} was not committed: {self._verdict} before its directory"
                " existed"
            )
        if self._notes is not None:
            manifest = msgspec.structs.replace(
                manifest,
                custom_metadata=self._notes.custom_metadata,
                shardings=self._notes.shardings,
            )
        content = encode_manifest(manifest)
        if self._makes_directory:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._durability.sync_directory(self._directory.parent)
            self._durability.sync_directory(self._directory.parent.parent)
        # Orbax's v1 interface takes an item for a tree only if it has a file of this name.
        arrays.create_file(self._directory, "_METADATA", _TREE_MARK, self._durability)
        # Created and never replaced: a manifest that exists was written by another handler.
        # Its name is durable, too, before Orbax renames the directory and so makes the step exist.
        if not arrays.create_file(self._directory, "zarr.json", content, self._durability):
            raise SaveFailed(
                f"{self._directory} already holds a manifest; two handlers save the same item"
            )
        return Written(len(content), manifest_digest(content))


class Commit:
    """Orbax's future of one save, an ``ocp.future.Future``.

    It is done when the manifest is durable in the item's directory.

    Args:
        handle: The handle of the save.
        gate: The gate of the manifest. ``None`` in a process that leaves the manifest to process 0.
        place: The item's directory.
    """

    def __init__(self, handle: SaveHandle, gate: Gate | None, place: ItemPlace) -> None:
        self.handle = handle
        self.gate = gate
        self.place = place
        self.after: Callable[[], None] | None = None  # called when the save has ended
        self._is_cancelled = False
        if gate is not None:
            # Orbax runs this coroutine once it has created the directories of the step.
            self._opening = _open(gate)
            self._directory_created = CommitFutureAwaitingContractedSignals(
                self._opening, name="deltacheck-gate"
            )

    def abandon(self, reason: str) -> bool:
        """Give the save up if its directory does not exist yet; return whether it is given up."""
        if self.gate is None or not self.gate.abandon(reason):
            return False
        # Orbax's thread may wait minutes for the directory, and never runs the coroutine.
        self._opening.close()
        return True

    def result(self, timeout: float | None = None) -> None:
        """Wait for the commit; without ``timeout``, as long as the save makes progress.

        Raises what failed the save, or ``TimeoutError``.
        """
        try:
            deadline = Deadline.after(timeout)
            if self.gate is not None:
                self._await_gate(self.gate, timeout)
            self.handle.result(deadline.left)
        finally:
            if self.after is not None and self.handle.done():
                self.after()

    def _await_gate(self, gate: Gate, timeout: float | None) -> None:
        """Wait until the gate is decided; raise what kept Orbax from creating the directory."""
        deadline = Deadline.after(gate.timeout_seconds if timeout is None else timeout)
        # Not on Orbax's thread alone: that goes on waiting after the save was given up.
        while not gate.wait(min(0.1, deadline.left or 0.0)):
            try:
                self._directory_created.result(0.0)
            except TimeoutError:
                if not deadline.left:
                    raise
        if self._is_cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """Give the save up if its directory does not exist yet."""
        if self.gate is not None:
            self._is_cancelled = self.abandon("it was cancelled")
            self._directory_created.cancel()


async def _open(gate: Gate) -> None:
    gate.open()
