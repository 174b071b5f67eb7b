"""Errors of the operating system and of the libraries below, as errors of ours.

Two functions do it. ``translated`` is the table: it returns our error for one of theirs. ``typed``
wraps the public classes and functions, so that a caller meets nothing else. The store and the saver
use the table where they know more than the caller: the file, or the step.

Errors are told apart by their built-in class and their text. No library is imported for it: device
memory that cannot be had is a ``RuntimeError`` of torch and another of JAX.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from deltacheck.errors import (
    BudgetExceeded,
    Damaged,
    DeltacheckError,
    StorageFailed,
    StorageTimeout,
)

_T = TypeVar("_T", bound=Callable[..., Any])

# The status that a message of TensorStore begins with (absl's codes).
_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS"
    "|PERMISSION_DENIED|RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED"
    "|INTERNAL|UNAVAILABLE|DATA_LOSS|UNAUTHENTICATED): "
)
# TensorStore has no class of its own. Subclasses belong to other libraries, or are of arguments.
_STATUS_CLASSES = (ValueError, RuntimeError, IndexError, OverflowError, NotImplementedError)
# Memory of a host or a device that cannot be had, in the words of torch, CUDA and XLA.
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory|RESOURCE_EXHAUSTED", re.I)
_NO_THREAD = re.compile("can't start new thread|Resource temporarily unavailable", re.I)
# They say nothing about the content of a file: another attempt may read it.
_TRANSIENT = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EINTR,
        errno.EAGAIN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    }
)
_REMEDIES = {
    errno.ENOSPC: "Free space on this file system, or delete steps (deltacheck prune)",
    errno.EDQUOT: "Free space within the quota, or delete steps (deltacheck prune)",
    errno.EMFILE: "Close files, or raise the limit of open files of this process (ulimit -n)",
    errno.ENFILE: "Close files, or raise the limit of open files of this machine",
    errno.EACCES: "Change the permissions, or run as the user that owns the root",
    errno.EPERM: "Change the permissions, or run as the user that owns the root",
    errno.EROFS: "Mount the file system for writing, or use another root",
    errno.EIO: "Look at the disk and at the kernel's log; a copy of the root may be needed",
    errno.ESTALE: "The file server has replaced the directory: mount it again, then open the root"
    " again",
    errno.ENOENT: "Check the path; another program may have removed it",
    errno.ENOMEM: "Free memory, then repeat the call",
}
_REMEDY = "Check access, space and the storage, then repeat the call"
_MEMORY_REMEDY = (
    "Free memory, or name fewer leaves in a restore; SaveOptions(shadow='host') takes less of a"
    " device"
)


def translated(
    error: BaseException, operation: str, place: object = None
) -> DeltacheckError | None:
    """Return an error of ours for a failure outside of this package.

    Args:
        error: The failure.
        operation: The call or the operation that failed.
        place: The file or the root that it concerned; ``None``: unknown. A file that the error
            itself names stays in the message.

    Returns:
        ``StorageFailed`` for the file system and TensorStore, ``BudgetExceeded`` for memory and
        threads that cannot be had. ``None`` if the error is one of ours already, a limit of time
        that the caller has set, or a mistake in the program, which keeps its class.
    """
    if isinstance(error, DeltacheckError) or not isinstance(error, Exception):
        return None
    where = f"{operation} ({place})" if place is not None else operation
    if is_out_of_memory(error):
        return BudgetExceeded(f"{where}: {_named(error)}. {_MEMORY_REMEDY}")
    if isinstance(error, RuntimeError) and _NO_THREAD.search(str(error)):
        return BudgetExceeded(
            f"{where}: {error}. Raise the limit of processes and threads (ulimit -u), or end some"
        )
    if isinstance(error, OSError):
        # The one that a caller's own ``timeout`` ends with. That of the system has a number.
        if isinstance(error, TimeoutError) and error.errno is None:
            return None
        return _storage_failed(error, where)
    if type(error) in _STATUS_CLASSES and _STATUS.match(str(error)):
        return StorageFailed(f"{where}: the storage refused: {error}. {_remedy_of(error)}")
    return None


def is_external(error: BaseException | None) -> bool:
    """Return whether ``translated`` has an error of ours for this one."""
    return error is not None and translated(error, "") is not None


def remedy(error: BaseException) -> str:
    """Return what the caller can do about a failure outside of this package, or an empty text."""
    if isinstance(error, DeltacheckError):
        return ""
    if is_out_of_memory(error):
        return f". {_MEMORY_REMEDY}"
    is_known = isinstance(error, OSError) or is_external(error)
    return f". {_remedy_of(error)}" if is_known else ""


def _remedy_of(error: BaseException) -> str:
    return _REMEDIES.get(system_error(error) or 0, _REMEDY)


def system_error(error: BaseException) -> int | None:
    """Return the system's number of an error; ``None`` if there is none.

    TensorStore has it in the text of its errors.
    """
    if isinstance(error, OSError):
        return error.errno
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a host or a device has no memory left for what was asked."""
    if isinstance(error, DeltacheckError):
        return False
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    )


def unreadable(path: object, error: OSError, verb: str = "read") -> Damaged | StorageFailed:
    """Return the error of a file or directory that is there and cannot be looked at.

    It is damage, not absence, unless the reason has nothing to do with the content: no descriptor
    left, or a file server that has gone. A restore must not go on with an older step for that.
    """
    if error.errno in _TRANSIENT:
        return _storage_failed(error, f"{path} cannot be {verb}")
    return Damaged(f"{path} cannot be {verb}: {error}", file=path)


def walk(path: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Return ``os.walk`` of a directory that must be complete.

    ``os.walk`` itself leaves out what cannot be listed: a copy or a sync would lack it silently.
    """

    def fail(error: OSError) -> None:
        raise error

    return os.walk(path, onerror=fail)


def typed(subject: _T) -> _T:
    """Let a public function, or all public methods of a class, raise errors of ours only.

    Failures of the operating system and of libraries become what ``translated`` returns; they stay
    attached as ``__cause__``. A class and its signatures stay as they are. What ``__enter__`` and
    generators do later is not wrapped.
    """
    if not isinstance(subject, type):
        # A user meets the public name of a class that is derived here.
        wrapped: _T = _wrapped(subject, subject.__qualname__.lstrip("_"))
        return wrapped
    for name, member in list(vars(subject).items()):
        if name.startswith("_") and name not in ("__init__", "__next__", "__exit__"):
            continue
        label = subject.__name__ if name == "__init__" else f"{subject.__name__}.{name}"
        if inspect.isfunction(member):
            setattr(subject, name, _wrapped(member, label))
        elif isinstance(member, (classmethod, staticmethod)):
            setattr(subject, name, type(member)(_wrapped(member.__func__, label)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(
                subject,
                name,
                property(_wrapped(member.fget, label), member.fset, member.fdel, member.__doc__),
            )
    return subject


def _wrapped(function: Any, label: str) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except Exception as error:
                raise_typed(error, label, args)
                raise

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise_typed(error, label, args)
            raise

    return call


def raise_typed(error: Exception, operation: str, args: tuple[Any, ...] = ()) -> None:
    """Raise what ``translated`` returns for a call; return if it returns ``None``.

    Args:
        error: The failure.
        operation: The call.
        args: Its arguments, which may name the root.
    """
    # Before the arguments are looked at: properties of an object may be wrapped themselves.
    if is_external(error):
        raise translated(error, operation, _place(args)) or error from error


def _place(args: tuple[Any, ...]) -> object:
    """Return the root that a public call concerns, as far as its arguments say so."""
    for value in args[:2]:
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        for name in ("root", "path", "directory"):
            # An object that is only half made has none of them.
            place = getattr(value, name, None)
            if isinstance(place, (str, os.PathLike)) or type(place).__name__ == "ObjectPath":
                return place
    return None


def _storage_failed(error: OSError, where: str) -> StorageFailed:
    message = f"{where}: {str(error).rstrip('.')}. {_remedy_of(error)}"
    failure = (
        StorageTimeout(message)
        if isinstance(error, TimeoutError)
        else _class_like(type(error))(message)
    )
    # Not ``filename``, with which an ``OSError`` would print other text than this message.
    failure.errno = error.errno
    return failure


# By the built-in class.
_classes: dict[type[OSError], type[StorageFailed]] = {OSError: StorageFailed}


def _class_like(kind: type[OSError]) -> type[StorageFailed]:
    """Return a ``StorageFailed`` that handlers of a built-in class catch, too."""
    built_in = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    if built_in not in _classes:
        _classes[built_in] = type(
            StorageFailed.__name__,
            (StorageFailed, built_in),
            {
                "__doc__": StorageFailed.__doc__,
                "__module__": StorageFailed.__module__,
                # Its name leads to the base, and a rank sends its error to the others.
                "__reduce__": lambda self: (_again, (built_in, self.args, self.errno)),
            },
        )
    return _classes[built_in]


def _again(kind: type[OSError], args: tuple[Any, ...], number: int | None) -> StorageFailed:
    failure = _class_like(kind)(*args)
    failure.errno = number
    return failure


def _named(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else "there is no memory left"
