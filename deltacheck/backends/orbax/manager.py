"""A ``CheckpointManager`` that knows our handler, and that finishes its last save when the program
ends.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from orbax import checkpoint as ocp

from deltacheck.backends.orbax.handler import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
)
from deltacheck.backends.orbax.manager_root.durable import with_durable_steps
from deltacheck.backends.orbax.manager_root.orbax_internals import await_renames
from deltacheck.errors import Damaged, NotACheckpointRoot, StepNotFound
from deltacheck.policy import Policy
from deltacheck.save import exits
from deltacheck.store.deadline import Deadline
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.root import describe_steps

log = logging.getLogger("deltacheck")

_open: weakref.WeakKeyDictionary[Any, DeltaCheckpointHandler] = (
    weakref.WeakKeyDictionary()
)  # with their handlers
_last_saves: weakref.WeakKeyDictionary[Any, LastSave] = weakref.WeakKeyDictionary()


def manager(
    root: str | os.PathLike[str],
    options: Any = None,
    *,
    items: Iterable[str] = (),
    policy: Policy | None = None,
    host_cache_bytes: int = 1 << 30,
    grace_seconds: float = 60.0,
    io_timeout_seconds: float = 600.0,
    durability: str = "power",
    verify: str = "none",
    capture: str = "eager",
    exit_timeout_seconds: float = 120.0,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """An ``ocp.CheckpointManager`` whose steps are saved with ``DeltaSaveArgs`` and restored with
    ``DeltaRestoreArgs``.

    ``options``: ``ocp.CheckpointManagerOptions``. ``items``: names used with
    ``ocp.args.Composite``; any name can be saved and restored, those named here can also be
    restored and described without arguments by a process that has not saved them. ``metadata``: as
    ``CheckpointManager`` takes it. The others: as in ``DeltaCheckpointHandler``.

    In a run of several processes each of them makes a manager and the same calls. Each writes what
    lies on its devices, what they have alike is written once, and process 0 commits one step for
    all; a failure of one is raised in all. The policy must be exact; arrays must be of all
    processes, and NumPy arrays and numbers alike in each.

    ``root`` is a local directory: Orbax commits its steps there by renaming, which our handler
    follows. Raises ``StorageFailed`` for an address of an object store.

    ``durability``: what a step survives once ``wait_until_finished`` has returned (or, without
    Orbax's asynchronous saves, ``save``). ``"power"``: a power cut. Plain Orbax syncs neither its
    metadata nor the renames that make a step exist, and deletes older steps after them; here both
    are synced, the metadata before the rename and the rename before any deletion. Costs a flush of
    the disk's cache for each file and directory. ``"process"``: only the end of this process;
    nothing is synced, a power cut may take the last steps.

    A save under way when the interpreter exits is finished first; plain Orbax loses it. Where it
    fails then, or takes longer than ``exit_timeout_seconds``, that is said on stderr, and the exit
    status is 120; in the second case the process ends at once, since Orbax's threads would keep it.
    Longer: a slow storage gets the last save through; shorter: a dead one lets the process end.
    """
    path = storage.local(root, "a CheckpointManager with our handler").absolute()
    together = None if options is None else options.multiprocessing_options
    if (
        together is not None
        and jax.process_count() > 1
        and (together.primary_host != 0 or together.active_processes is not None)
    ):
        raise ValueError(
            "all processes of a run save together, and process 0 commits: give"
            " MultiprocessingOptions(primary_host=0) without active_processes"
        )
    handler = DeltaCheckpointHandler(
        path,
        policy=policy,
        host_cache_bytes=host_cache_bytes,
        grace_seconds=grace_seconds,
        io_timeout_seconds=io_timeout_seconds,
        durability=durability,
        verify=verify,
        capture=capture,
        read_only=bool(options is not None and options.read_only),
    )
    registry = ocp.DefaultCheckpointHandlerRegistry()
    for item in dict.fromkeys((None, "default", *items)):  # None: any name that is not registered
        registry.add(item, DeltaSaveArgs, handler)
        registry.add(item, DeltaRestoreArgs, handler)
    if Durability.of(durability).syncs:
        options = with_durable_steps(path, options)
    made = ocp.CheckpointManager(
        path, options=options, handler_registry=registry, metadata=metadata
    )
    _finish_at_exit()
    _open[made] = handler
    _last_saves[made] = saves = LastSave(made, exit_timeout_seconds)
    exits.finish_at_exit(saves, str(path), exit_timeout_seconds)
    return made


class Whole(NamedTuple):
    """What ``restore_whole`` gives: which step, and its tree."""

    step: int
    tree: Any


def restore_whole(manager: Any, args: Any = None, *, step: int | None = None) -> Whole:
    """``manager.restore(step, args=args)`` of a step (by default the newest), or of the newest
    before
    it that is whole.

    A training goes on, with older values, where it would have stopped: the result and warnings in
    the log say with which step. ``args``: ``DeltaRestoreArgs``, or a ``Composite`` of them. Raises
    ``StepNotFound`` where there is no step, and what the asked step raised where no earlier one
    restores either.
    """
    steps = sorted(
        (found for found in manager.all_steps() if step is None or found <= step), reverse=True
    )
    if not steps or (step is not None and steps[0] != step):
        raise StepNotFound(
            f"{manager.directory} has no step {'at all' if step is None else step}."
            f" {describe_steps(manager.all_steps())}"
        )
    first: Damaged | NotACheckpointRoot | None = None
    for found in steps:
        try:
            tree = manager.restore(found, args=DeltaRestoreArgs() if args is None else args)
        except (Damaged, NotACheckpointRoot) as error:  # the latter: a step whose manifest is gone
            first = first or error
            log.warning("%s", error)
            continue
        if first is not None:
            log.warning(
                "step %d is damaged: step %d of %s is restored in its place",
                steps[0],
                found,
                manager.directory,
            )
        return Whole(found, tree)
    assert first is not None
    raise first


def handler_of(manager: Any) -> DeltaCheckpointHandler:
    """The handler of a manager that ``manager()`` made; ``ValueError`` for another."""
    try:
        return _open[manager]
    except (KeyError, TypeError):
        raise ValueError(f"{manager!r} was not made by deltacheck.backends.orbax.manager") from None


class LastSave:
    """What ``exits`` needs to know of a manager, without keeping it alive."""

    def __init__(self, manager: Any, seconds: float) -> None:
        self._manager = weakref.ref(manager)
        self._owner = os.getpid()
        self.seconds = seconds

    def wait(self, timeout: float | None = None) -> None:
        """Wait until Orbax has done with the manager's last save; raises what failed it if this
        thread does not know yet, or ``TimeoutError``.
        """
        made, deadline = self._manager(), Deadline.after(timeout)
        if made is None or os.getpid() != self._owner:
            return
        if not await_renames(deadline):  # Orbax's own wait has no deadline
            raise TimeoutError(f"Orbax has not finished it after {timeout:g} s")
        made.wait_until_finished()

    close = wait  # the manager itself stays open: Orbax may be about to close it


@functools.cache
def _finish_at_exit() -> None:
    # Not atexit: that comes after the executors are gone, and Orbax needs them for its renames.
    # These callbacks come before.
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    deadlines = [
        (saves, made.directory, Deadline.after(saves.seconds))
        for made, saves in list(_last_saves.items())
    ]
    for saves, where, deadline in deadlines:
        message = f"{where}: the last save did not become a checkpoint"
        exits.forget(saves)
        try:
            saves.wait(deadline.left)
        except TimeoutError as error:
            exits.end_now(f"{message}. {error}")
        except BaseException as error:  # noqa: BLE001 - also a second Ctrl-C: it ends this wait, and must be told
            exits.fail(f"{message}. {error or type(error).__name__}")
