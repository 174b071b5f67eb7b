"""Orbax's v1 interface on deltacheck roots.

Orbax makes a new v1 handler for every call, and does not close it. So the chains are kept by one
``DeltaCheckpointHandler`` for each context, and the v1 handlers call that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from deltacheck.backends.orbax.handler import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
)
from deltacheck.backends.orbax.manager_root import v1_internals
from deltacheck.backends.orbax.manager_root.commit_gate import Commit
from deltacheck.backends.orbax.manager_root.durable import on_thread
from deltacheck.backends.orbax.manager_root.orbax_internals import (
    ItemPlace,
    await_renames,
    is_foreign,
    remove_unused,
)
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.metadata import described
from deltacheck.errors import DeltacheckError, UnsupportedLeaf
from deltacheck.leaf import containers, tree
from deltacheck.store.files import storage
from deltacheck.store.lock.deadline import Deadline
from deltacheck.store.lock.interrupts import Flag, Lock

__all__ = ["context"]

log = logging.getLogger("deltacheck")


@contextlib.contextmanager
def context(
    root: str | os.PathLike[str], base: Any = None, *, cast: bool = False, **options: Any
) -> Iterator[Any]:
    """Enter an Orbax v1 context whose trees are saved in a deltacheck root.

    Inside, ``training.Checkpointer(root)`` and the functions (``save``, ``load``,
    ``save_checkpointables``, ...) of ``orbax.checkpoint.v1`` work as usual. The functions take
    steps of the root, ``root/NAME``, whose name ends in the step number. Trees that plain Orbax has
    saved are loaded too. Other objects (JSON, ``StatefulCheckpointable``) are Orbax's. Contexts
    that are made inside, by you or by a library such as Tunix, save trees in the root, too, with
    their options. See ``docs/how-to/orbax.md``.

    Leaving the context finishes saves under way, and gives the root back.

    Args:
        root: The local directory of the steps.
        base: An ``orbax.checkpoint.v1.Context``, made before, whose options apply inside. Default:
            those of the contexts inside, or of Orbax.
        cast: Convert what is loaded to the dtypes of the target, as Orbax does. ``False``: only if
            every saved value is kept, so that none is rounded unnoticed.
        **options: Options of ``DeltaCheckpointHandler``, by name.

    Returns:
        The context, which can also be given to ``training.Checkpointer``.

    Raises:
        StorageFailed: ``root`` is an address of an object store.
        ValueError: An option has a value that it cannot have, or ``base`` asks for something that
            deltacheck does not do. The message names it. The same is raised by a save or load
            inside, before anything is written.
    """
    path = storage.local(root, "Orbax's v1 interface with our handler").absolute()
    session = _Session(DeltaCheckpointHandler(path, **options), cast)
    orbax_context = ocp.Context(base)
    _refuse_options(orbax_context)
    # Made here, because Orbax makes handlers without arguments. Steps name their handler: with the
    # name of the v0 handler, each interface reads the steps of the other.
    handler = type(
        "DeltaCheckpointHandler", (_Handler,), {"session": session, "__module__": "deltacheck"}
    )
    registry = orbax_context.checkpointables.registry
    orbax_context.checkpointables.registry = v1_internals.with_handler(registry, handler)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(v1_internals.for_new_contexts(handler))
            stack.enter_context(v1_internals.without_plain_saves(path))
            # Only if it has options: an active context takes precedence over that of a
            # ``Checkpointer``, and over one inside after its first call (0.12.8).
            if base is not None:
                # Not ``with orbax_context``: a call of a ``Checkpointer`` enters the active context
                # again, which ends the first entry.
                stack.enter_context(orbax_context.__contextmanager__())
            yield orbax_context
    finally:
        session.close()


def _refuse_options(orbax_context: Any) -> None:
    """Raise ``ValueError`` if a context asks for something that this handler does not do."""
    saving, loading = orbax_context.array.saving, orbax_context.array.loading
    processes = orbax_context.multiprocessing
    unsupported = {
        "array.saving.storage_options": saving.storage_options != type(saving.storage_options)()
        and "leaves keep their dtype, and are cut into chunks of deltacheck's own",
        "array.saving.scoped_storage_options_creator": saving.scoped_storage_options_creator
        is not None
        and "leaves keep their dtype, and are cut into chunks of deltacheck's own",
        "array.loading.enable_padding_and_truncation": loading.enable_padding_and_truncation
        and "an array is restored with its saved shape, and can be padded or cut afterwards",
        "checkpoint_layout": orbax_context.checkpoint_layout.name not in ("ORBAX", "AUTO")
        and "files of another layout are read by Orbax alone, outside of this context",
        "multiprocessing": jax.process_count() > 1
        and (processes.primary_host != 0 or processes.active_processes is not None)
        and "all processes of a run save together, and process 0 commits",
    }
    for name, reason in unsupported.items():
        if reason:
            raise ValueError(
                f"deltacheck does not support the option {name} of this context: {reason}"
            )


class _Session:
    """The v0 handler of a context, and its saves under way."""

    def __init__(self, delta: DeltaCheckpointHandler, cast: bool) -> None:
        self.delta = delta
        self.cast = cast
        self._lock = Lock()
        self._pending: set[_Save] = set()

    def begin(self, directory: Any, checkpointable: Any) -> _Finish:
        """Begin a save, and return the awaitable of its end.

        If an earlier save of an item of the same name is under way, wait for its end first: only
        then it is known whether that step exists, and the next one may build on it.
        """
        is_of_manager = v1_internals.is_of_manager(directory)
        for earlier in self._under_way():
            if earlier.directory.path.name == directory.path.name:
                earlier.wait(self.delta._settings.options.io_timeout_seconds)
        commit = self.delta._begin_save(
            directory.path, DeltaSaveArgs(checkpointable), creating=is_of_manager
        )
        save = _Save(commit, directory, is_of_manager)
        with self._lock:
            self._pending.add(save)
        return _Finish(self, save)

    async def finish(self, save: _Save) -> None:
        """Wait until a save is durable, and remove the segments that no step needs."""
        v1_internals.at_end_of_tasks(partial(self._forget, save))
        try:
            await save.directory.await_creation()
        except BaseException:
            save.commit.abandon(_NOT_CREATED)
            raise
        # On threads: the event loop is Orbax's.
        await on_thread(save.commit.result)
        await on_thread(self.delta.finalize, save.directory.path)

    def give_up(self, save: _Save) -> None:
        """Give up a save whose rest Orbax does not run."""
        save.commit.abandon("Orbax gave it up")
        self._forget(save)

    def close(self) -> None:
        """Finish the saves under way and give the root back."""
        timeout = self.delta._settings.options.io_timeout_seconds
        # A ``Checkpointer`` that nobody closes ends its saves on threads, which the end of the
        # process does not wait for.
        if self._under_way() and not await_renames(Deadline.after(timeout)):
            log.error("while closing: Orbax has not finished a save after %g s", timeout)
        for save in self._under_way():
            save.wait(timeout)
            try:
                save.commit.result()
            except (DeltacheckError, TimeoutError) as error:
                log.error("while closing: %s", str(error))
        self.delta.close()

    def _forget(self, save: _Save) -> None:
        with self._lock:
            self._pending.discard(save)
        save.ended.set()

    def _under_way(self) -> list[_Save]:
        with self._lock:
            return list(self._pending)


@dataclass(frozen=True, eq=False)
class _Save:
    """A save under way.

    Attributes:
        commit: Its commit.
        directory: The item's directory, a ``PathAwaitingCreation`` of Orbax.
        is_of_manager: A ``Checkpointer`` saves. It waits for its earlier saves itself.
        ended: Set once Orbax has committed the step or given it up.
    """

    commit: Commit
    directory: Any
    is_of_manager: bool
    ended: Flag = field(default_factory=Flag)

    def wait(self, timeout: float) -> None:
        """Wait until Orbax has committed the step or given it up, ``timeout`` seconds at most."""
        deadline = Deadline.after(timeout)
        while not self.is_of_manager and deadline.left and not self.ended.wait(0.05):
            # If the creation fails, Orbax does not run the rest of the save.
            if v1_internals.is_creation_ended(self.directory) and not self.directory.path.exists():
                self.commit.abandon(_NOT_CREATED)
                break


_NOT_CREATED = "Orbax could not create its directory"


class _Finish:
    """The awaitable of a save, which Orbax runs in the background.

    If Orbax gives the save up before that, the save is given up, too.
    """

    def __init__(self, session: _Session, save: _Save) -> None:
        self.commit_futures = [save.commit]  # for Orbax, which cancels these
        self._start: Callable[[], Any] = partial(session.finish, save)
        self._drop = weakref.finalize(self, session.give_up, save)

    def __await__(self) -> Generator[Any, None, None]:
        self._drop.detach()
        return self._start().__await__()  # type: ignore[no-any-return]


class _Handler:
    """A v1 ``CheckpointableHandler``. Its subclasses have the session of a context."""

    session: _Session

    def __init__(self) -> None:
        self._context = v1_internals.active_context()

    async def save(self, directory: Any, checkpointable: Any) -> _Finish:
        """Capture and encode a tree. The awaitable ends when its manifest is durable."""
        try:
            self._refuse(directory, checkpointable)
            return self.session.begin(directory, checkpointable)
        except BaseException:
            v1_internals.drop_creation(directory)
            raise

    def _refuse(self, directory: Any, checkpointable: Any) -> None:
        """Raise ``ValueError`` for a save that this handler does not support."""
        try:
            _refuse_options(self._context)
            if v1_internals.is_partial_save(checkpointable):
                raise ValueError(
                    "deltacheck does not support orbax.checkpoint.v1.partial.save: a step is saved"
                    " with all its leaves at once. Unchanged leaves take no space in a later step"
                )
        except ValueError:
            remove_unused(directory.path)
            raise

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Restore a tree at once, and return an awaitable of it.

        An error that Orbax's background raised would come as an error of Orbax.
        """
        if is_foreign(ItemPlace.of(directory)):
            return await self._foreign().load(directory, abstract_checkpointable)
        _refuse_options(self._context)
        restored = self.session.delta.restore(
            directory,
            DeltaRestoreArgs(
                abstract_checkpointable,
                partial_restore=self._context.pytree.loading.partial_load,
                cast=self.session.cast,
            ),
        )
        return _done(restored)

    async def metadata(self, directory: Any) -> Any:
        """Return the saved tree with shapes and dtypes in the place of its arrays."""
        if is_foreign(ItemPlace.of(directory)):
            return await self._foreign().metadata(directory)
        return described(self.session.delta._manifest_at(directory))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether an object is a tree. A leaf of it may still be refused, with its path."""
        return v1_internals.is_partial_save(checkpointable) or _is_tree(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether an object is the target of a tree."""
        return _is_tree(abstract_checkpointable)

    def _foreign(self) -> Any:
        return ocp.handlers.PyTreeHandler(context=self._context)


async def _done(value: Any) -> Any:
    return value


def _is_tree(value: Any) -> bool:
    if isinstance(value, ocp.StatefulCheckpointable):
        return False
    try:
        return (
            leaves.describe_target(value) is not None
            or tree.scalar_node(value, "") is not None
            or containers.level_of(value) is not None
            or leaves.expand(value) is not None
        )
    except UnsupportedLeaf:
        return True  # ``save`` raises it again, with the path
