"""A ``CheckpointManager`` that knows our handler, and that finishes its last save when the program ends."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orbax import checkpoint as ocp

from deltacheck.backends.orbax.handler import DeltaCheckpointHandler, DeltaRestoreArgs, DeltaSaveArgs
from deltacheck.errors import Damaged, NotACheckpointRoot, StepNotFound
from deltacheck.policy import Policy
from deltacheck.store.root import describe_steps

log = logging.getLogger("deltacheck")

_open: weakref.WeakKeyDictionary[Any, DeltaCheckpointHandler] = weakref.WeakKeyDictionary()  # with their handlers


def manager(
    root: str | os.PathLike[str],
    options: Any = None,
    *,
    items: Iterable[str] = (),
    policy: Policy | None = None,
    host_cache_bytes: int = 256 << 20,
    grace_seconds: float = 60.0,
    io_timeout_seconds: float = 600.0,
    verify: str = "none",
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """An ``ocp.CheckpointManager`` whose steps are saved with ``DeltaSaveArgs`` and restored with ``DeltaRestoreArgs``.

    ``options``: ``ocp.CheckpointManagerOptions``. ``items``: names used with ``ocp.args.Composite``; any name can be saved and
    restored, those named here can also be restored and described without arguments by a process that has not saved them.
    ``metadata``: as ``CheckpointManager`` takes it. The others: as in ``DeltaCheckpointHandler``.

    A save under way when the interpreter exits is finished first; plain Orbax loses it.
    """
    path = Path(root).absolute()
    handler = DeltaCheckpointHandler(
        path,
        policy=policy,
        host_cache_bytes=host_cache_bytes,
        grace_seconds=grace_seconds,
        io_timeout_seconds=io_timeout_seconds,
        verify=verify,
        read_only=bool(options is not None and options.read_only),
    )
    registry = ocp.DefaultCheckpointHandlerRegistry()
    for item in dict.fromkeys((None, "default", *items)):  # None: any name that is not registered
        registry.add(item, DeltaSaveArgs, handler)
        registry.add(item, DeltaRestoreArgs, handler)
    made = ocp.CheckpointManager(path, options=options, handler_registry=registry, metadata=metadata)
    _finish_at_exit()
    _open[made] = handler
    return made


class Whole(NamedTuple):
    """What ``restore_whole`` gives: which step, and its tree."""

    step: int
    tree: Any


def restore_whole(manager: Any, args: Any = None, *, step: int | None = None) -> Whole:
    """``manager.restore(step, args=args)`` of a step (by default the newest), or of the newest before it that is whole.

    A training goes on, with older values, where it would have stopped: the result and warnings in the log say with which step. ``args``:
    ``DeltaRestoreArgs``, or a ``Composite`` of them. Raises ``StepNotFound`` where there is no step, and what the asked step raised where
    no earlier one restores either.
    """
    steps = sorted((found for found in manager.all_steps() if step is None or found <= step), reverse=True)
    if not steps or (step is not None and steps[0] != step):
        raise StepNotFound(
            f"{manager.directory} has no step {'at all' if step is None else step}. {describe_steps(manager.all_steps())}"
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
            log.warning("step %d is damaged: step %d of %s is restored in its place", steps[0], found, manager.directory)
        return Whole(found, tree)
    assert first is not None
    raise first


def handler_of(manager: Any) -> DeltaCheckpointHandler:
    """The handler of a manager that ``manager()`` made; ``ValueError`` for another."""
    try:
        return _open[manager]
    except (KeyError, TypeError):
        raise ValueError(f"{manager!r} was not made by deltacheck.backends.orbax.manager") from None


@functools.cache
def _finish_at_exit() -> None:
    # Not atexit: that comes after the executors are gone, and Orbax needs them for its renames. These callbacks come before.
    threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def _finish_all() -> None:
    for made in list(_open):
        try:
            made.wait_until_finished()
        except Exception:
            log.exception("at exit: the last save of %s failed", made.directory)
