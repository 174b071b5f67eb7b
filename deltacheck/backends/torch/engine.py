"""The PyTorch engine: save and restore any nested state, asynchronously and bit for bit."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from deltacheck.backends.torch.capture.guard import Guarded
from deltacheck.backends.torch.capture.offload import Offload
from deltacheck.backends.torch.group.arrival import Arrival, RestoreHandle
from deltacheck.backends.torch.group.base_model import BaseModel, begin_from
from deltacheck.backends.torch.group.engine_session import OpenSession, Session
from deltacheck.backends.torch.group.restores import RestoreRequest
from deltacheck.backends.torch.state.repeated import KnownFlat
from deltacheck.errors import DeltacheckError, StepNotFound
from deltacheck.leaf import tree
from deltacheck.leaf.external_errors import is_external, typed
from deltacheck.leaf.spec import SaveReport
from deltacheck.maintain.memory_tier import MemoryTier
from deltacheck.policy import Keep, Policy
from deltacheck.restore.values import StepReader
from deltacheck.save import exits
from deltacheck.save.exits import StopSignals
from deltacheck.save.handle import SaveHandle, progress_of, skipped
from deltacheck.save.save_options import (
    SaveOptions,
    Settings,
    metric_numbers,
    step_number,
    step_or_tag,
)
from deltacheck.store.files import storage as place
from deltacheck.store.files.object_path import ObjectPath, ObjectStore
from deltacheck.store.files.storage import Place
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import Turn
from deltacheck.store.roots import tagging, tags

log = logging.getLogger("deltacheck")


@typed
class Engine:
    """The checkpoints of one training run, in a directory or under a prefix of an object store.

    ``engine.restored_step`` is the training step of the last ``restore``, or ``None``. The guide
    ``docs/how-to/pytorch.md`` explains when the state is read, ``docs/how-to/every-step.md`` the
    memory tier and ``docs/how-to/several-ranks.md`` process groups. An engine that nobody refers to
    any more closes itself, and the saves that it has begun are finished.

    Args:
        root: A directory, or an address (``s3://``, ``gs://``, ``az://``). It is made if it does
            not exist. In a path, ``~`` is the home directory.
        policy: The contract of each leaf and the length of chains. Longer chains: smaller saves;
            shorter: faster restores. Default: ``Policy.exact()``.
        keep: The steps, and the leaves of old steps, that stay after each save. Default: all.
            ``Keep(full_last=...)`` does not go with ``memory``.
        options: The memory, the durability, the checks and the patience of saves.
        memory: A directory in memory, or a ``MemoryTier``. Steps are committed there and copied to
            ``root`` behind the training. Saves end sooner and survive a killed process, but a
            power cut takes the steps that are not copied yet (``persist``), and memory is used.
            ``durability`` and ``keep`` then apply to ``root``.
        process_group: The ranks that save together (``torch.distributed.group.WORLD``). The state
            may then hold DTensors and ``Shard``; each rank writes its own parts, and rank 0 commits
            one step for all. Every rank makes the same calls, and a failure of one rank is raised
            on all. Needs ``max_pending=1``. Default: this process alone.
        base: The model that the run begins from: a model folder of Hugging Face, or a root. The
            first save of ``root`` is then stored as changes to it, in files that all runs beside
            each other share. A folder is imported once, beside ``root``
            (``docs/how-to/integrations.md``). Not with ``memory`` or ``process_group``. Default:
            the first save writes whole leaves.
        storage: The access to an object store. Default: from the environment.

    Raises:
        RootBusy: Another process, which the message names, writes to ``root``.
        ForeignMemory: ``memory`` holds steps that are not the newest of this run.
        RankFailed: The ranks of ``process_group`` differ in an option, do not see the same folder,
            or one of them failed or did not come in time.
        NotACheckpointRoot: ``root`` holds something else.
        UnsupportedFormat: A newer version wrote ``root``.
        StorageFailed: ``root`` cannot be written (it is an ``OSError``, too), or the object store
            does not answer or has no conditional writes.
        FileNotFoundError: ``base`` does not exist, or lacks a file.
        Damaged: ``base`` is damaged. The message names leaf or file.
        ValueError: An option has a value that it cannot have.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ObjectPath,
        *,
        policy: Policy | None = None,
        keep: Keep | None = None,
        options: SaveOptions | None = None,
        memory: MemoryTier | str | os.PathLike[str] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        base: str | os.PathLike[str] | None = None,
        storage: ObjectStore | None = None,
    ) -> None:
        settings = Settings.of(policy, keep, options)
        if memory is not None and not settings.keep.all_leaves:
            raise ValueError(
                "Keep(full_last=...) cannot be given with memory: call `deltacheck prune"
                " --full-last N --compact` between two jobs of the run"
            )
        if base is not None and (memory is not None or process_group is not None):
            raise ValueError(
                "base cannot be given with memory or process_group: import the model with"
                " `deltacheck import`, `deltacheck branch` it to the root, and restore it"
            )
        # Two threads, or a handler of a signal, may call at the same time.
        self._turn = Turn()
        # Absolute, because the process may change its working directory while the engine is open.
        path = place.of(root, storage).absolute()
        self._is_eager = settings.options.is_eager
        # It must not refer to the engine: torch's global hook refers to it.
        self._open = OpenSession(
            settings,
            lambda settle_reads: _session(path, settings, settle_reads, memory, process_group),
        )
        self._session, self._saver = self._open.session, self._open.saver
        self._root, self._writer = self._session.root, self._session.writer
        self._offload = Offload(self._saver)
        self._base = None if base is None else self._begin_from(os.fspath(base))
        self.restored_step: int | None = None
        # The hook is global in torch. It is registered after everything that may raise, because
        # nobody could remove it from an engine that was not made.
        self._guard = self._open.watch()
        exits.finish_at_exit(self._open, str(path), settings.options.exit_timeout_seconds)
        weakref.finalize(self, self._open.end_unattended).atexit = False

    def _begin_from(self, base: str) -> BaseModel | None:
        try:
            return begin_from(base, self._root, self._saver)
        except BaseException:
            # Nobody could release the root of an engine that was not made.
            self._session.close(None)
            raise

    @property
    def root(self) -> Path | ObjectPath:
        """The place of the checkpoints: a directory, or a prefix of an object store."""
        return self._root.path

    def save(
        self, step: int, state: object, *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle:
        """Begin to save a state as a checkpoint, and return while it is written.

        Args:
            step: The training step, 0 or more.
            state: Nested containers of tensors, NumPy arrays, numbers, text, bytes and ``None``, as
                state dicts are. Tied tensors are stored once and tied again by a restore. Instances
                of a class of yours are kept if ``torch.serialization.add_safe_globals`` names it.
            metrics: Numbers kept with the step.

        Returns:
            The handle of the save. A failure of this save is on the handle and in the log, and the
            next call raises it.

        Raises:
            UnsupportedLeaf: A leaf cannot be kept exactly, or leaves are away (``offload``).
            DuplicatePath: Two leaves have the same path.
            SaveFailed: This state cannot be captured, such as for want of memory, or an earlier
                save failed and no call has raised it. This step is not saved.
            ValueError: ``step`` is not an integer of at least 0.
        """
        # It writes to the state, whose version counters are read with its structure.
        self._open.await_arrival()
        with self._turn.of("save", postpones=True):
            begin = time.perf_counter()
            self._offload.require_none()
            flat = self._session.flatten(state)
            flattening_seconds = time.perf_counter() - begin
            handle = self._save(step, flat, metrics)
            # The handle did not exist yet when the state was flattened.
            progress_of(handle).blocking_seconds += flattening_seconds
            return handle

    def _save(self, step: int, flat: tree.Flat, metrics: Mapping[str, float] | None) -> SaveHandle:
        """Save a flattened state."""
        step = step_number(step)
        self._open.await_arrival()
        begin = time.perf_counter()
        numbers = metric_numbers(metrics)
        attempt = self._session.begin(step, flat, numbers)
        # A rank is busy, and all ranks skip the save. Nothing has begun.
        if attempt is None:
            return skipped(step)
        try:
            # If nothing is guarded, every leaf is read or copied before ``save`` returns.
            tensors = attempt.flat.tensors if isinstance(attempt.flat, KnownFlat) else None
            sources = self._open.capture.sources(
                attempt.flat,
                lambda: Guarded() if self._is_eager else self._guard.guarded(tensors),
                # Ranks that save together need the chains of this save at once.
                may_be_later=attempt.agreed is None and not self._is_eager,
            )
            if not self._session.make_room(step, sources):
                return skipped(step)
            note = "" if self._base is None else self._base.remark(attempt.flat.leaves)
            self._base = None
            planning_seconds = time.perf_counter() - begin
            handle = self._saver.save(
                step,
                attempt.flat.skeleton,
                sources,
                attempt.commit,
                metrics=numbers,
                note=note,
                agreed=attempt.agreed,
            )
        except BaseException as error:
            # The other ranks have begun the save, and wait for what this one reports.
            if attempt.agreed is not None and attempt.agreed.abandon is not None:
                attempt.agreed.abandon(error)
            # Memory of the host or a device, the storage, or threads.
            if is_external(error):
                return self._saver.fail(step, error)
            raise
        progress_of(handle).blocking_seconds += planning_seconds
        return handle

    def before_update(self) -> None:
        """Wait until the saves under way have read the state, and an overlapped restore is done.

        The engine calls it before every torch optimizer step. Call it before any other write.

        Raises:
            Damaged: An overlapped restore has failed, with this or another error of ``restore``.
        """
        self._open.before_update()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Return a context for updates of the state that no save under way sees.

        Returns:
            The context manager.
        """
        self.before_update()
        # There is nothing to undo. Saves begin on the training thread only, so none begins inside.
        yield

    def guard(self, owner: torch.optim.Optimizer | torch.nn.Module) -> None:
        """Let saves read the tensors of an optimizer or a module behind the training loop.

        Of a module, these are the parameters that need no gradient and that no torch operation has
        written to since the last save. Saves then return sooner, and do not copy frozen weights on
        a GPU without spare memory. In return, a write to them must wait for the capture
        (``before_update``). The section "When is the state read?" of ``docs/how-to/pytorch.md``
        says what happens if it does not.

        Args:
            owner: An optimizer before its first step, or a module. The engine does not keep it
                alive.
        """
        self._guard.add(owner)

    def offload(self, state: object = None) -> None:
        """Move a state and what the engine holds of it from its devices to host memory.

        Saves under way are encoded first; they are written while others use the devices. The
        tensors stay the same objects, without content until ``reload``. Gradients belong to no
        state: ``zero_grad`` frees them. With ``process_group``, every rank calls this.

        Args:
            state: A state as for ``save``, or a part of one. Tensors in host memory stay as they
                are. Default: none; the engine's own memory goes, and another library moves the
                tensors.

        Raises:
            UnsupportedLeaf: A leaf cannot be freed: its memory belongs to another library, or is
                away already. Everything is as it was.
            BudgetExceeded: There is too little host memory. Everything is as it was.
            SaveFailed: The engine is closed, or the storage hangs in a save.
        """
        self._open.await_arrival()
        with self._turn.of("offload"):
            self._offload.offload(self._session.tensors({} if state is None else state))

    def reload(self) -> None:
        """Bring everything back that ``offload`` has moved, bit for bit.

        It also does so after ``close``. If it raises, it may be called again, and nothing is lost.
        What the engine held comes back with the next save.

        Raises:
            TreeMismatch: A tensor has got memory since ``offload``. Nothing is changed.
            BudgetExceeded: A device has too little free memory. What is back already stays.
        """
        with self._turn.of("reload"):
            self._offload.reload()

    def on_commit(self, listener: Callable[[SaveReport], object]) -> None:
        """Call a function with the report of each save that is committed from now on.

        Args:
            listener: The function. It is called on the thread of the commit, which a slow one
                delays, and with several ranks in each process, for its own part. An error of it is
                logged, and the step exists.
        """
        self._saver.pipeline.save_log.listen(listener)

    def signal_to_stop(self, signals: StopSignals) -> int:
        """Return the signal on which the training is to save this step and end.

        With ``process_group``, every rank calls this at the same steps, and gets the same answer: a
        signal to any rank. That takes one small exchange on the host.

        Args:
            signals: The signals of this process.

        Returns:
            The number of the signal; 0: there is none.

        Raises:
            RankFailed: A rank was lost or did not come in time.
        """
        group = self._session.group
        return signals.number if group is None else group.highest(signals.number)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save under way is committed; with ``memory``, in memory.

        Args:
            timeout: The longest wait, in seconds. Default: as long as the saves get on.

        Raises:
            SaveFailed: A save failed and no call has raised it.
            TimeoutError: The time ran out.
            StorageTimeout: Nothing has happened for twice ``io_timeout_seconds``.
        """
        deadline = Deadline.after(timeout)
        self._open.await_arrival(timeout)
        self._session.wait(deadline.left)

    def persist(self, timeout: float | None = None) -> None:
        """Wait until the newest step is in ``root``, as durable as ``durability`` says.

        Args:
            timeout: The longest wait, in seconds. Default: as long as the saves get on.

        Raises:
            SaveFailed: A save failed, or its step cannot be copied from memory.
            TimeoutError: The time ran out.
            StorageTimeout: Nothing has happened for twice ``io_timeout_seconds``.
        """
        deadline = Deadline.after(timeout)
        self._open.await_arrival(timeout)
        self._session.persist(deadline.left)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; with ``memory``, those in memory too.

        Returns:
            The training steps.
        """
        return self._session.roots.steps()

    def latest_step(self) -> int | None:
        """Return the step that ``restore()`` restores: the newest save.

        It is not the highest number if the run has gone back and on from an earlier step.

        Returns:
            The training step; ``None``: there is no step yet.

        Raises:
            Damaged: A manifest that cannot be read may be that of the newest step.
        """
        try:
            return self._session.roots.find(None)[1].step
        except StepNotFound:
            return None

    def tag(self, step: int | str | None, name: str, *, move: bool = False) -> None:
        """Name a committed step, which then stays until the tag is removed.

        The tag means this save, even if a resumed run saves the number of the step again. A step
        that is only in memory is copied to ``root`` first.

        Args:
            step: The number of the step or another tag of it. ``None``: the newest step.
            name: The tag.
            move: Take the tag from the step that has it. Default: raise ``RootBusy``.

        Raises:
            ValueError: ``name`` cannot be a tag.
            StepNotFound: There is no such step.
            RootBusy: Another step has the tag.
        """
        step = step_or_tag(step)
        self._session.run_once(lambda: self._session.roots.tag(step, name, move=move))

    def untag(self, name: str) -> None:
        """Remove a tag.

        Args:
            name: The tag.

        Raises:
            StepNotFound: There is no such tag.
        """
        self._session.run_once(lambda: tagging.remove(self._root, name))

    def tags(self) -> dict[str, int]:
        """Return the tags and their training steps.

        Returns:
            The training step of each tag.
        """
        return {name: tag.step for name, tag in tags.read_all(self._root.store.path)[0].items()}

    def delete(self, step: int) -> None:
        """Delete a committed step. Other steps stay whole, whatever they share with it.

        Args:
            step: The training step.

        Raises:
            StepNotFound: There is no such step.
            StepTagged: The step has a tag.
        """
        self._open.await_arrival()
        step = step_number(step)
        self._session.run_once(lambda: self._session.roots.delete(step))

    def restore(
        self,
        step: int | str | None = None,
        into: object = None,
        *,
        contract: str | None = None,
        max_bytes: int | None = None,
        fallback: bool = False,
        expected_digest: str | None = None,
        overlap: bool = False,
        leaves: str | Iterable[str] | None = None,
    ) -> Any:
        """Restore a committed step, every byte verified. The next save continues its chains.

        Args:
            step: The number of the step, or a tag. Default, or ``"latest"``: the newest step.
            into: A state of the same structure, whose tensors are filled in place on whatever
                device. Nothing is written before all that has a digest is verified. Default: new
                tensors on the host.
            contract: The weakest contract that a leaf may have, ``"exact"`` or ``"bounded"``.
                Default: any.
            max_bytes: The most bytes to allocate. Default: no limit.
            fallback: If the step is damaged, restore the newest whole step before it. Training goes
                on with older values; ``restored_step`` and a warning name the step. Default: raise.
            expected_digest: The digest that the manifest of the step must have, from the report of
                the save or ``deltacheck show``. Default: any.
            overlap: Return once the weights are restored. The state of the optimizers arrives
                during the first forward and backward pass: ``into`` has the optimizers themselves
                in the places of their state dicts, and their next step waits. Training begins
                sooner, but damage may be found after it has begun, and a training that keeps all
                cores busy may end its first step later. Not with ``process_group`` or ``memory``.
                Default: return when all is restored.
            leaves: Restore only these: leaf paths, subtrees (``"model"``) or patterns
                (``"*/exp_avg"``; ``*`` also matches ``/``). Less to read; the next save goes on as
                if nothing had been restored. Not with ``into``, ``overlap`` or ``process_group``.
                Default: the whole tree.

        Returns:
            ``into`` with restored numbers and text, or new containers. It is the ``state`` of a
                ``RestoreHandle`` if ``overlap`` is true. With ``leaves`` a flat dict of tensors on
                the host by leaf path (``"model/weight"``), without numbers and text.

        Raises:
            StepNotFound: There is no such step.
            LeafNotFound: The step has none of the leaves that a name of ``leaves`` means.
            ContractNotMet: A leaf has a weaker contract; the message names the leaves.
            TreeMismatch: A leaf of ``into`` differs from the step.
            Damaged: The step is damaged. The message names leaf, file and whole steps.
            ChainBroken: A segment that the step needs is missing.
            BudgetExceeded: The restore would allocate more than ``max_bytes``.
            UnsupportedLeaf: A value is of a class that this process has not named.
            ValueError: ``overlap`` or ``leaves`` cannot be given with another argument or option.
        """
        if leaves is not None and (into is not None or overlap):
            raise ValueError("leaves= cannot be given with into= or overlap=True")
        names = (leaves,) if isinstance(leaves, str) else leaves
        request = RestoreRequest(
            step_or_tag(step),
            into,
            contract,
            max_bytes,
            fallback,
            expected_digest,
            None if names is None else tuple(names),
        )
        # The next save goes on from this step, so no other thread may begin one meanwhile.
        with self._turn.of("restore"):
            # A failed one is the usual reason for another restore.
            if (earlier := self._open.arrival) is not None:
                earlier.join()
            arrival: Arrival | None = None
            if overlap:
                manifest, state, arrival = self._session.restores.restore_overlapped(request)
            else:
                manifest, state = self._session.restores.restore(request)
            if earlier is not None:
                earlier.release()
            self._open.arrival = arrival
            self.restored_step = manifest.step
            return state if arrival is None else RestoreHandle(state, arrival)

    def _continue_from(self, reader: StepReader) -> None:
        """Let the next save continue a step of the root that was read before the engine was made.

        Args:
            reader: Has read the whole step. Its arrays belong to the engine from now on.
        """
        self._session.restores.adopt(self._root, reader.manifest, reader.chains, reader.stored)

    def close(self, timeout: float | None = None) -> None:
        """Finish the saves under way and give the root back. A second call does nothing.

        If the time runs out, the saves go on as long as the process lives, and the root is given
        back after them. An overlapped restore is waited for first; if the time runs out then, the
        engine stays open. In a forked child the saves of the parent are not touched. An engine that
        is dropped without this call does the same behind the program; a failure that nobody has
        seen then sets the exit status of the process to 120.

        Args:
            timeout: The longest wait, in seconds. Default: as long as the saves get on.

        Raises:
            SaveFailed: A save failed and no call has raised it.
            TimeoutError: The time ran out.
            StorageTimeout: Nothing has happened for twice ``io_timeout_seconds``.
        """
        self._open.end(timeout)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy would write to the root under the same lease, and reuse sequence numbers.
        raise TypeError(
            "an Engine cannot be pickled or copied: it holds its root. Save in the process that"
            " opened it, or open another root there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DeltacheckError:
            # The error of the training is the cause to see, so the failure of a save does not
            # replace it.
            if error is None:
                raise
            log.exception("a save failed while another error ended the training")


def _session(
    path: Place,
    settings: Settings,
    settle_reads: Callable[[], None],
    memory: MemoryTier | str | os.PathLike[str] | None,
    process_group: torch.distributed.ProcessGroup | None,
) -> Session:
    """Open the session of an engine."""
    tier = None if memory is None else MemoryTier.of(memory)
    if tier is not None and settings.options.on_error == "log":
        raise ValueError(
            "a memory tier that cannot copy its steps fills up and must stop the run:"
            " on_error='log' and memory cannot be given together"
        )
    group = None
    if process_group is not None:
        # torch.distributed.tensor takes long to import, and most processes save alone.
        from deltacheck.backends.torch.group.collective import RankGroup

        group = RankGroup(process_group, settings.options.io_timeout_seconds)
    return Session(path, settings, settle_reads, group=group, memory=tier)
