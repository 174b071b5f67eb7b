"""The chain of one item over the steps of a manager."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from deltacheck.backends.orbax.capture.array_codec import leaf_codec
from deltacheck.backends.orbax.capture.batch import planned
from deltacheck.backends.orbax.capture.device_copies import DeviceCopies
from deltacheck.backends.orbax.manager_root.commit_gate import Commit, Gate, Notes
from deltacheck.backends.orbax.manager_root.item_writer import Guest, Writer, holders, writer_of
from deltacheck.backends.orbax.manager_root.orbax_internals import ItemPlace
from deltacheck.backends.orbax.state import leaves, pieces
from deltacheck.backends.orbax.state.load import Restored
from deltacheck.backends.orbax.state.repeated import ArrayFlattener
from deltacheck.errors import DeltacheckError, ReceiptFailed, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import is_external
from deltacheck.leaf.tree import Flat
from deltacheck.save.chains.chain_state import Numbers
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.save.job.save_log import FailureCount
from deltacheck.save.progress import as_save_failed
from deltacheck.save.ranks.joint import stored_names
from deltacheck.save.ranks.rank_setup import RankSetup
from deltacheck.save.save_options import Settings
from deltacheck.save.saver import Saver
from deltacheck.store.files.background import Background
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.manager_steps import MANAGER_STORE

if TYPE_CHECKING:
    from deltacheck.backends.orbax.group.collective import RankGroup

log = logging.getLogger("deltacheck")


def require_json(value: Any) -> Any:
    """Return a value that JSON keeps; raise ``UnsupportedLeaf`` for another one."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedLeaf(
            f"custom_metadata cannot be kept as JSON: {error}. Put arrays and objects into the item"
        ) from error
    return copy


class Item:
    """The chain of one item.

    Nothing is written and no lease is taken before the first save, so a process that only restores
    locks no other process out.

    Args:
        root: The manager's directory.
        name: The name of the item.
        settings: The settings of all saves.
    """

    def __init__(self, root: Path, name: str, settings: Settings) -> None:
        self.root = root
        self._name = name
        self._settings = settings
        self._flatten = ArrayFlattener()
        self._copies = DeviceCopies()
        self._saver: Saver | None = None
        self._last: Commit | None = None
        self._base: tuple[Restored, Manifest] | None = None
        self.writer: Writer | Guest | None = None
        self._group: RankGroup | None = None
        # Registered before the first save: the segments of a restored step must already be safe
        # from the collections of other items of this process.
        holders.add(self)

    @property
    def failures(self) -> FailureCount | None:
        """The failed saves since the last commit; ``None`` before the first save."""
        return None if self._saver is None else self._saver.pipeline.failures

    @contextlib.contextmanager
    def sharing_failure(self) -> Iterator[None]:
        """Return a context in which a failure of this process fails the save in all processes.

        The caller must call ``begin`` afterwards.
        """
        if jax.process_count() == 1:
            yield
            return
        if self._group is None:
            from deltacheck.backends.orbax.group.collective import RankGroup

            # Every process constructs this in its first save of the item, so their keys in the
            # service match.
            self._group = RankGroup(self._name, self._settings.options.io_timeout_seconds)
        with self._group.sharing_failure():
            yield

    @contextlib.contextmanager
    def _counting_failure(self, step: int) -> Iterator[None]:
        """Return a context for the begin of a save, which fails if memory or the storage fails."""
        try:
            yield
        except Exception as error:
            if not is_external(error):
                raise
            failure = as_save_failed(step, error)
            log.error("%s", str(failure))
            if self.failures is not None:
                self.failures.add(failure)
            raise failure from error

    def flatten(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state to save."""
        if jax.process_count() > 1:
            return tree.flatten(state, pieces.describe, leaves.expand)
        return self._flatten(state)

    def begin(
        self,
        place: ItemPlace,
        flat: Flat,
        notes: Notes,
        start_time: float,
    ) -> Commit:
        """Begin a save, and return once all that is not read lazily is captured.

        ``flat``: the flattened state. ``start_time``: the time (``perf_counter``) at which the
        training thread began to wait for this save.
        """
        with self._counting_failure(place.step):
            with leaves.own_rules():
                handle, gate = (
                    self._begin_alone(place, flat, notes)
                    if self._group is None
                    else self._begin_in_group(self._group, place, flat, notes)
                )
            try:
                self._last = Commit(handle, gate, place)
            except BaseException:
                # Nothing would open the gate, and the committer thread would wait for its whole
                # timeout.
                if gate is not None:
                    gate.abandon("Orbax could not wait for it")
                raise
            progress_of(handle).blocking_seconds += max(
                0.0, time.perf_counter() - start_time - handle.blocking_seconds
            )
            return self._last

    def _begin_alone(
        self, place: ItemPlace, flat: Flat, notes: Notes
    ) -> tuple[SaveHandle, Gate | None]:
        """Begin a save of this process."""
        saver = self._open()
        self._settle(saver)
        gate = Gate.of(place, self._settings, notes)
        handle = saver.save(
            place.step,
            flat.skeleton,
            planned(flat, self._settings.options, self._copies),
            gate.write_manifest,
            metrics=notes.metrics,
        )
        return handle, gate

    def _begin_in_group(
        self, group: RankGroup, place: ItemPlace, flat: Flat, notes: Notes
    ) -> tuple[SaveHandle, Gate | None]:
        """Begin a save with the other processes.

        A failure of one process before the save has begun is raised in all of them.
        """
        # The calls on ``group`` below are exchanges. Each process must make all of them in this
        # order, or report a failure in the place of one.
        with group.sharing_failure():
            # Without a saver there was no save before that could be lost.
            is_committed = self._saver is None or self._last_step_exists()
            if self._saver is not None:
                self._saver.raise_unseen()
        saver = self._saver or self._open_in_group(group)
        # Used up even if another process has restored something else: after this save, the
        # restored step is behind the newest one.
        base, self._base = self._base, None
        opened = group.agree(
            flat, "" if base is None else base[1].nonce, self._take_number, is_committed
        )
        if not opened.resumes:
            base = None
        with group.sharing_failure():
            # Process 0 decides for all: a step is no base for some processes only.
            if not opened.is_committed:
                saver.chains.drop()
            if base is not None:
                # Before the signals: they are of the run that goes on.
                saver.resumed(base[1])
            held = None if saver.is_exact else pieces.held_state(flat, notes.metrics)
        if base is not None:
            # Before the plan: the tiles are cut as in the restored step, so that their chains
            # continue.
            group.joint.resume(base[1], None)
        attempt = group.begin_joint(
            saver, place.step, opened.seq, pieces.held(flat), flat.skeleton, held
        )
        assert attempt is not None  # no process is busy: Orbax has waited for the save before
        tiles, is_eager = attempt.save.tiles, self._settings.options.is_eager
        try:
            if base is not None:
                # After the plan: only now this process knows which of the tiles it writes.
                self._continue_from(saver, (base[0].of(stored_names(tiles)), base[1]))
            # Process 0 alone writes the manifest.
            gate = Gate.of(place, self._settings, notes) if group.joint.is_first else None
            make = group.maker(
                None if gate is None else gate.write_manifest, self.root / MANAGER_STORE
            )
            handle = saver.save(
                place.step,
                attempt.save.tree,
                pieces.sources(flat, tiles, None if is_eager else self._copies.of),
                partial(attempt.commit, make),
                metrics=notes.metrics,
                agreed=attempt.agreed,
            )
        except Exception as error:
            # The other processes have begun the save, and wait for what this one reports.
            # On a thread of its own, because the report waits for the other processes.
            Background(1, "deltacheck-abandon").start(partial(attempt.abandon, error))
            raise
        return handle, gate

    def _take_number(self) -> int:
        """Take the number of the next save, on process 0."""
        assert isinstance(self.writer, Writer)
        return self.writer.numbers.take(self._settings.numbers_of_save)

    def _open_in_group(self, group: RankGroup) -> Saver:
        """Open the root with the other processes, of which process 0 takes the lease."""
        store, durability = self.root / MANAGER_STORE, self._settings.durability
        writer = group.open_together(
            store,
            RankSetup.of(store, self._settings),
            partial(writer_of, self.root, self, durability),
            partial(Guest, self.root, durability),
            lambda writer: writer.release(self),
        )
        with group.sharing_failure():
            saver = self._saver_of(writer)
        group.joint.groups = saver.groups
        group.joint.compactions = saver.chains.compactions
        return saver

    def adopt(self, restored: Restored, manifest: Manifest) -> None:
        """Continue from a restored step, so that the next save is a delta to it."""
        # Without the tree: it is the caller's and may be large.
        self._base = (restored._replace(tree=None), manifest)
        # Several processes continue only once they agree on the next save.
        if self._saver is not None and self._group is None:
            self._settle(self._saver)
            self._continue_from(self._saver, self._take_base())

    def close(self) -> None:
        """Finish the save under way, stop the threads and give the root back.

        A failure has been raised through Orbax, or is logged here.
        """
        self._base = None
        # From here on, no save can build on the segments.
        holders.discard(self)
        if self.writer is None:
            return
        if self._last is not None:
            # If Orbax has not created the directory by now, it never will.
            self._last.abandon("the manager was closed")
        try:
            if self._saver is not None:
                self._saver.close(self._settings.options.io_timeout_seconds)
        except (DeltacheckError, TimeoutError) as error:
            log.error("while closing: %s", str(error))
        finally:
            if self._saver is None:
                self.writer.release(self)
            # A forked child has no part in the lease of its parent.
            elif self._saver.is_ours():
                # The root stays locked until the last thread has ended: a thread that hangs may
                # still write.
                self._saver.pipeline.when_stopped(partial(self.writer.release, self))

    def _open(self) -> Saver:
        if self._saver is None or not isinstance(self.writer, Writer):
            self.writer = writer_of(self.root, self, self._settings.durability)
            self._continue_from(self._saver_of(self.writer), self._take_base())
        assert self._saver is not None
        return self._saver

    def _saver_of(self, writer: Writer | Guest) -> Saver:
        if self._saver is None:
            self.writer = writer
            is_alone = jax.process_count() == 1
            self._saver = Saver(
                writer.store,
                leaf_codec(),
                self._settings,
                # All items of a root share one store. Processes agree on the number of each save.
                Numbers(0, writer.numbers if is_alone and isinstance(writer, Writer) else None),
            )
        return self._saver

    def _settle(self, saver: Saver) -> None:
        """Drop the base of the next save if the step of the last save does not exist.

        Orbax has finished with the last save.
        """
        if not self._last_step_exists():
            saver.chains.drop()

    def _last_step_exists(self) -> bool:
        """Wait for the last save. Return ``False`` if Orbax did not commit its step."""
        last, self._last = self._last, None
        if last is None:
            return True
        # Without effect if the gate is open. Otherwise the wait below would last for the whole
        # timeout, because Orbax has failed before it created the directory.
        last.abandon("Orbax gave the step up")
        error = last.handle.exception(self._settings.options.io_timeout_seconds)
        if isinstance(error, ReceiptFailed):
            # Orbax raises failed saves only; the save that is about to begin raises this one.
            progress_of(last.handle).unsee_error()
        # After an error nothing is left to do here: the saver has dropped the chains of a failed
        # save itself.
        if error is None and not last.place.is_committed():
            log.warning(
                "step %d was never committed by Orbax: the next save writes whole leaves",
                last.handle.step,
            )
            return False
        return True

    def _take_base(self) -> tuple[Restored, Manifest] | None:
        base, self._base = self._base, None
        return base

    def _continue_from(self, saver: Saver, base: tuple[Restored, Manifest] | None) -> None:
        """Make a restored step the base of the next save, if its segments still exist."""
        if base is None or self.writer is None:
            return
        restored, manifest = base
        refs = manifest.segments
        if self._group is not None:  # this process builds on the segments of its tiles only
            own_segments = {
                name
                for chain in restored.chains.values()
                for name in (chain.key[0].id, *chain.delta_segments)
            }
            refs = tuple(ref for ref in refs if ref.id in own_segments)
        try:
            for ref in refs:
                # Since the restore, Orbax may have deleted the step, and another process may have
                # collected its segments.
                self.writer.store.segment(ref)
        except DeltacheckError as error:
            log.warning(
                "the next save writes whole leaves: the restored step has lost its segments since"
                " (%s)",
                str(error),
            )
            return
        saver.adopt(restored.chains, restored.stored, manifest)

    def protected(self) -> set[str]:
        """Return the segments that the next save may build on."""
        segments = set() if self._saver is None else self._saver.chains.protected_segments()
        if self._group is not None and self.writer is not None:
            segments |= self._group.protected(self.writer.store)
        # Read once: this runs on the collector thread, and a save may clear the attribute
        # meanwhile.
        base = self._base
        return segments if base is None else segments | {ref.id for ref in base[1].segments}
