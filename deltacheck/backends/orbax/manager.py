"""A ``CheckpointManager`` with this package's handler, whose last save is finished at exit."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from orbax import checkpoint as ocp

from deltacheck.backends.orbax.handler import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
)
from deltacheck.backends.orbax.manager_root.durable import with_durable_steps
from deltacheck.backends.orbax.manager_root.orbax_internals import (
    DEFAULT_ITEM,
    await_renames,
    await_renames_of,
    delete_by_rename,
    item_names,
)
from deltacheck.backends.orbax.orbax_args import RESTORE_ARGS, SAVE_ARGS
from deltacheck.errors import Damaged, NotACheckpointRoot, SaveFailed, StepNotFound
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Policy
from deltacheck.save import exits
from deltacheck.save.save_options import SaveOptions
from deltacheck.store.files import storage
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import postponed
from deltacheck.store.roots.wording import describe_steps

log = logging.getLogger("deltacheck")

# The handlers and the last saves of the managers that this module made.
_open: weakref.WeakKeyDictionary[Any, DeltaCheckpointHandler] = weakref.WeakKeyDictionary()
_last_saves: weakref.WeakKeyDictionary[Any, LastSave] = weakref.WeakKeyDictionary()


@typed
def manager(
    root: str | os.PathLike[str],
    options: Any = None,
    *,
    items: Iterable[str] = (),
    policy: Policy | None = None,
    save_options: SaveOptions | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Make an ``ocp.CheckpointManager`` for ``DeltaSaveArgs`` and ``DeltaRestoreArgs``.

    Orbax's ``PyTreeSave``, ``StandardSave``, ``PyTreeRestore`` and ``StandardRestore`` save and
    restore with deltacheck, too, so that a library's code can be given this manager.

    In a run of several processes each of them makes a manager and the same calls. Each writes what
    lies on its devices, replicated parts are written once, and process 0 commits one step for all.
    A failure of one process is raised in all. Arrays must then span all processes, and NumPy arrays
    and numbers must be equal in each. See ``docs/how-to/orbax.md``.

    A save under way when the interpreter exits is finished first; plain Orbax loses it.

    Args:
        root: A local directory: Orbax commits its steps by renaming.
        options: ``ocp.CheckpointManagerOptions``. Default: Orbax's.
        items: Names of trees for ``ocp.args.Composite``. Any name can be saved and restored; a
            process that has not saved an item named here can also restore and describe it without
            arguments. Items with another handler, such as grain's, must not be named here.
        policy: As for ``DeltaCheckpointHandler``. Longer chains: smaller saves; shorter: faster
            restores.
        save_options: All else, as for ``Engine``; those that Orbax decides are refused. With
            ``durability="power"``, which Orbax does not offer, its metadata is synced before the
            rename of a step, and the rename before any deletion.
        metadata: The metadata of the manager, as ``CheckpointManager`` takes it.

    Returns:
        The manager.

    Raises:
        StorageFailed: ``root`` is an address of an object store.
        NotACheckpointRoot: ``root`` is the root of an ``Engine``.
        ValueError: An option has a value that it cannot have, the options name another primary
            host or a subset of the processes, or ``on_error="log"`` in a run of several processes.
    """
    path = storage.local(root, "a CheckpointManager with our handler").absolute()
    processes = None if options is None else options.multiprocessing_options
    if (
        processes is not None
        and jax.process_count() > 1
        and (processes.primary_host != 0 or processes.active_processes is not None)
    ):
        raise ValueError(
            "all processes of a run save together, and process 0 commits: give"
            " MultiprocessingOptions(primary_host=0) without active_processes"
        )
    handler = DeltaCheckpointHandler(
        path,
        policy=policy,
        save_options=save_options,
        read_only=bool(options is not None and options.read_only),
    )
    settings = handler._settings
    is_tolerant = settings.options.on_error == "log"
    if is_tolerant and jax.process_count() > 1:
        raise ValueError(
            "on_error='log' is of one process: Orbax's barriers do not survive a save that fails"
        )
    registry = ocp.DefaultCheckpointHandlerRegistry()
    for item in dict.fromkeys((None, "default", *items)):  # None: any name that is not registered
        # Orbax's own, too: training libraries call their manager with those.
        for args in (DeltaSaveArgs, DeltaRestoreArgs, *SAVE_ARGS, *RESTORE_ARGS):
            registry.add(item, args, handler)
    # Orbax renames without a sync, so a committed step could be gone after a power cut.
    if settings.durability.syncs:
        options = with_durable_steps(path, options)
    manager_class = _TolerantManager if is_tolerant else _Manager
    new_manager = manager_class(path, options=options, handler_registry=registry, metadata=metadata)
    delete_by_rename(new_manager)
    # After Orbax was imported: these callbacks run in reverse order, before those of the executors.
    _finish_at_exit()
    _open[new_manager] = handler
    _last_saves[new_manager] = saves = LastSave(new_manager, settings.options.exit_timeout_seconds)
    # For ``finish_on_signal``, which waits for all saves registered there. At an ordinary exit
    # ``_finish_all`` comes first and takes the entry out.
    exits.finish_at_exit(saves, str(path), settings.options.exit_timeout_seconds)
    return new_manager


class MissingStep(StepNotFound, FileNotFoundError):
    """A ``StepNotFound`` that handlers of Orbax's ``FileNotFoundError`` catch, too."""


# For tracebacks and logs: callers know the class that it is derived from.
MissingStep.__name__ = MissingStep.__qualname__ = StepNotFound.__name__
MissingStep.__module__ = StepNotFound.__module__


class _Manager(ocp.CheckpointManager):  # type: ignore[misc] # orbax has no types
    """A manager whose calls raise errors of ours if the storage, memory or threads fail."""

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Save a step, and return false if it was not due."""
        _require_own(kwargs.get("args"), DeltaSaveArgs, *SAVE_ARGS)
        return bool(super().save(step, *args, **kwargs))

    def restore(self, step: int | None, *args: Any, **kwargs: Any) -> Any:
        """Restore a step."""
        _require_own(kwargs.get("args"), DeltaRestoreArgs, *RESTORE_ARGS)
        with self._naming_steps(step, kwargs.get("directory")):
            if kwargs.get("directory") is None:
                self._learn_items(step, kwargs.get("args"))
            await_renames_of(self)
            return super().restore(step, *args, **kwargs)

    def wait_until_finished(self) -> None:
        """Wait for the saves under way."""
        await_renames_of(self)
        super().wait_until_finished()

    def metadata(self, step: int | None = None) -> Any:
        """Return the metadata of a step, or of the manager."""
        with self._naming_steps(step):
            if step is not None:
                self._learn_items(step)
            return super().metadata(step)

    def delete(self, step: int) -> None:
        """Delete a step."""
        with self._naming_steps(step):
            super().delete(step)

    @contextlib.contextmanager
    def _naming_steps(self, step: int | None, directory: Any = None) -> Iterator[None]:
        """Return a context for a call about a step, which names the steps if that one is missing.

        Raises:
            StepNotFound: There is no such step.
            NotACheckpointRoot: Its folder has no item.
        """
        try:
            yield
        # Orbax has a class of its own for each way in which it misses a step.
        except (FileNotFoundError, KeyError, ValueError) as error:
            if directory is not None:
                raise
            self.reload()
            steps = self.all_steps()
            if step is None and not steps:
                raise MissingStep(f"{self.directory} has no step at all") from error
            if step is not None and step not in steps:
                raise MissingStep(
                    f"{self.directory} has no step {step}. {describe_steps(steps)}"
                ) from error
            step_directory = Path(self._get_read_step_directory(step or steps[-1], self.directory))
            if item_names(step_directory):
                raise
            raise NotACheckpointRoot(
                f"{step_directory} has no item: an interrupted deletion or another program has left"
                f" it. Remove it. {describe_steps([number for number in steps if number != step])}"
            ) from error

    def _learn_items(self, step: int | None, args: Any = None) -> None:
        """Decide whether the steps have one item without a name, before Orbax does.

        Orbax decides by the first folder that it reads, and an empty one, which an interrupted
        deletion has left, seems to have named items.
        """
        if args is not None:
            self._default_item.set_if_none(not isinstance(args, ocp.args.Composite))
        for candidate in (step, *reversed(self.all_steps())):
            if self._default_item.get() is not None:
                return
            if candidate in self.all_steps():
                directory = self._get_read_step_directory(candidate, self.directory)
                names = item_names(Path(directory))
                if names:
                    self._default_item.set(DEFAULT_ITEM in names)


def _require_own(args: Any, own: type, *others: type) -> None:
    """Raise ``ValueError`` if the arguments of the one item of a step are of another handler."""
    if args is None or isinstance(args, (own, *others, ocp.args.Composite)):
        return
    name = type(args).__name__.removesuffix("Args")
    raise ValueError(
        f"{name} is of a handler of Orbax, and this manager keeps the item 'default' with"
        f" deltacheck: give {own.__name__}(item), or name another item, which Orbax keeps:"
        f" Composite(NAME={name}(...))"
    )


def _undisturbed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Postpone the handlers of signals during a call: Orbax holds locks in it."""

    @functools.wraps(call)
    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        with postponed():
            return call(*args, **kwargs)

    return undisturbed


for _call in ("save", "wait_until_finished", "delete", "close"):
    setattr(_Manager, _call, _undisturbed(getattr(_Manager, _call)))
for _call in (
    "save",
    "restore",
    "metadata",
    "wait_until_finished",
    "delete",
    "reload",
    "all_steps",
    "close",
):
    setattr(_Manager, _call, typed(getattr(_Manager, _call)))


class _TolerantManager(_Manager):
    """A manager that raises failed saves only if its handler says so.

    Orbax waits for the last save in ``save``, ``wait_until_finished`` and ``close``, each time with
    the second method below.
    """

    def save(self, *args: Any, **kwargs: Any) -> bool:
        """Save a step, and return false if it was not due or, without asynchrony, has failed."""
        try:
            return bool(super().save(*args, **kwargs))
        except SaveFailed as error:
            self._tolerate(error)
            return False

    def wait_until_finished(self) -> None:
        """Wait for the saves under way."""
        try:
            super().wait_until_finished()
        except SaveFailed as error:
            self._tolerate(error)

    def _tolerate(self, error: SaveFailed) -> None:
        if not handler_of(self)._tolerates(error):
            raise error
        # Orbax has taken the steps that this save would have replaced off its list already.
        self.reload()


class Whole(NamedTuple):
    """A step that ``restore_whole`` has restored, and its tree."""

    step: int
    tree: Any


@typed
def restore_whole(manager: Any, args: Any = None, *, step: int | None = None) -> Whole:
    """Restore a step, or the newest whole step before it.

    The training then continues with older values instead of stopping. Warnings in the log name the
    damaged steps.

    Args:
        manager: A manager that ``manager()`` made.
        args: ``DeltaRestoreArgs``, or a ``Composite`` of them. Default: ``DeltaRestoreArgs()``.
        step: The newest step to try. Default: the newest of all.

    Returns:
        The restored step, and its tree.

    Raises:
        StepNotFound: There is no such step.
        Damaged: Neither the step nor an earlier one can be restored. This is the error of the step.
        NotACheckpointRoot: As ``Damaged``, for a step whose manifest is lost.
    """
    steps = sorted(
        (candidate for candidate in manager.all_steps() if step is None or candidate <= step),
        reverse=True,
    )
    if not steps or (step is not None and steps[0] != step):
        raise StepNotFound(
            f"{manager.directory} has no step {'at all' if step is None else step}."
            f" {describe_steps(manager.all_steps())}"
        )
    # The error of the requested step is the one that is raised, not that of the last attempt.
    first: Damaged | NotACheckpointRoot | None = None
    for candidate in steps:
        try:
            tree = manager.restore(candidate, args=DeltaRestoreArgs() if args is None else args)
        except (Damaged, NotACheckpointRoot) as error:  # the latter: its manifest is lost
            first = first or error
            log.warning("%s", str(error))
            continue
        if first is not None:
            log.warning(
                "step %d is damaged: step %d of %s is restored in its place",
                steps[0],
                candidate,
                manager.directory,
            )
        return Whole(candidate, tree)
    assert first is not None
    raise first


def handler_of(manager: Any) -> DeltaCheckpointHandler:
    """Return the handler of a manager that ``manager()`` made; ``ValueError`` for another one."""
    try:
        return _open[manager]
    # ``TypeError``: an object that cannot be a weak key.
    except (KeyError, TypeError):
        raise ValueError(f"{manager!r} was not made by deltacheck.backends.orbax.manager") from None


class LastSave:
    """The last save of a manager, for ``exits``. It does not keep the manager alive."""

    def __init__(self, manager: Any, seconds: float) -> None:
        self._manager = weakref.ref(manager)
        self._owner = os.getpid()
        self.seconds = seconds

    def wait(self, timeout: float | None = None) -> None:
        """Wait until Orbax has finished the last save of the manager.

        Raises the failure of the save if this thread has not seen it yet, or ``TimeoutError``.
        """
        open_manager, deadline = self._manager(), Deadline.after(timeout)
        # A forked child has none of Orbax's threads, so its wait would never end.
        if open_manager is None or os.getpid() != self._owner:
            return
        if not await_renames(deadline):  # Orbax's own wait has no deadline
            raise TimeoutError(f"Orbax has not finished it after {timeout:g} s")
        open_manager.wait_until_finished()
        handler_of(open_manager)._raise_lost()

    close = wait  # the manager itself stays open: Orbax may be about to close it


@functools.cache
def _finish_at_exit() -> None:
    # Not ``atexit``: its callbacks run after the executors are gone, and Orbax needs those for its
    # renames. These callbacks run before.
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    # All times run from now, so that several managers do not add up their timeouts.
    deadlines = [
        (saves, open_manager.directory, Deadline.after(saves.seconds))
        for open_manager, saves in list(_last_saves.items())
    ]
    for saves, directory, deadline in deadlines:
        message = f"{directory}: the last save did not become a checkpoint"
        # Else the ``atexit`` hook would wait for the same save again.
        exits.forget(saves)
        try:
            saves.wait(deadline.left)
        except TimeoutError as error:
            # Not ``fail``: the interpreter would join Orbax's thread, which hangs.
            exits.end_now(f"{message}. {error}")
        except BaseException as error:  # noqa: BLE001 - a second Ctrl-C ends this wait, too
            exits.fail(f"{message}. {error or type(error).__name__}")
