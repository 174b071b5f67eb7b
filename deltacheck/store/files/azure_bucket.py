"""A container of Azure Blob Storage, with the methods that ``ObjectPath`` calls of a ``KvStore``.

obstore makes the requests, on one event loop for the whole process. It is imported with this
module, and so only once an ``az://`` address is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorstore as ts
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore

from deltacheck.store.files.background import TIMEOUT_SECONDS, Task
from deltacheck.store.files.object_client import ABSENT, written

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig

    from deltacheck.store.files.object_path import ObjectStore


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that the end of the process waits for while a thread of obstore is in it.

    A thread that comes back to Python while the interpreter ends is unwound, which Rust answers
    with an abort.
    """

    def call_soon_threadsafe(  # type: ignore[override] # generic in its arguments
        self, *words: Any, **options: Any
    ) -> asyncio.Handle:
        visit = Task(lambda: None)
        try:
            return super().call_soon_threadsafe(*words, **options)
        finally:
            visit.carry_out()


# Made with the module, so that two threads cannot make two.
_LOOP = _Loop()
threading.Thread(target=_LOOP.run_forever, name="deltacheck-azure", daemon=True).start()
# Between retries, as TensorStore waits.
_BACKOFF: BackoffConfig = {
    "init_backoff": timedelta(milliseconds=200),
    "max_backoff": timedelta(seconds=8),
}


class _Stamp(NamedTuple):
    """The version of an object, with the name of TensorStore's; empty: a condition failed."""

    generation: bytes


class _Content(NamedTuple):
    """The result of a read, with the names of TensorStore's."""

    state: str
    value: bytes
    stamp: _Stamp


class AzureBucket:
    """A container.

    Args:
        container: A store of obstore.
        concurrency: Most requests under way.
        staging: The memory in which TensorStore makes the files of arrays, by the same keys.
    """

    def __init__(self, container: Any, concurrency: int, staging: ts.KvStore) -> None:
        self._container = container
        self._slots = asyncio.Semaphore(concurrency)
        self._staging = staging

    def read(
        self, key: str, *, if_not_equal: bytes | None = None, byte_range: slice | None = None
    ) -> _Request:
        """Begin to read an object, or a part of it that must be there."""
        return _Request(self._read(key, if_not_equal, byte_range))

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> _Request:
        """Begin to write an object, or to delete it."""
        return _Request(self._delete(key) if value is None else self._write(key, value, if_equal))

    def list(self, keys: ts.KvStore.KeyRange) -> _Request:
        """Begin to list the keys of a range within one directory."""
        return _Request(self._list(keys))

    def upload(self, commit: Any, keys: ts.KvStore.KeyRange) -> _Request:
        """Begin to move the files of an array from the staging memory to the container.

        Args:
            commit: The future of TensorStore's write.
            keys: The range of the array.
        """
        return _Request(self._upload(commit, keys))

    async def _read(self, key: str, known: bytes | None, part: slice | None) -> _Content:
        # Any object differs from none.
        options = {} if known in (None, ABSENT) else {"if_none_match": known.decode()}
        async with self._slots:
            try:
                with _translated(key):
                    e_tag, content = await self._get(key, part, options)
            except FileNotFoundError:
                return _Content("missing", b"", _Stamp(ABSENT))
            except NotModifiedError:
                return _Content("unspecified", b"", _Stamp(known or b""))
        return _Content("value", content, _Stamp(e_tag.encode()))

    async def _get(
        self, key: str, part: slice | None, options: dict[str, Any]
    ) -> tuple[str, bytes]:
        """Return the tag of an object and its content, or a part of it."""
        if part is None:
            result = await self._container.get_async(key, options=options)
            return result.meta["e_tag"], bytes(await result.bytes_async())
        begin, end = part.start, part.stop
        # Azure counts no ranges from the end of an object.
        if end is None:
            end = await self._size(key)
            begin += end
        content = b""
        if begin >= 0:
            try:
                result = await self._container.get_async(
                    key, options={**options, "range": (begin, end)}
                )
                content = bytes(await result.bytes_async())
            except BaseError:
                if await self._size(key) >= end:
                    raise
        if len(content) != end - begin:
            raise ValueError(f"OUT_OF_RANGE: {key} has no bytes from {begin} to {end}")
        return result.meta["e_tag"], content

    async def _size(self, key: str) -> int:
        return int((await self._container.head_async(key))["size"])

    async def _write(self, key: str, content: bytes, expected: bytes | None) -> _Stamp:
        async with self._slots:
            return await self._put(key, content, expected)

    async def _put(self, key: str, content: bytes, expected: bytes | None = None) -> _Stamp:
        mode: Any = "overwrite" if expected is None else "create"
        if expected not in (None, ABSENT):
            mode = {"e_tag": expected.decode()}
        try:
            with _translated(key):
                result = await self._container.put_async(
                    key, content, mode=mode, use_multipart=False
                )
        except (AlreadyExistsError, PreconditionError, FileNotFoundError) as error:
            if expected is None:
                raise ValueError(f"FAILED_PRECONDITION: {_said(error)}") from error
            return _Stamp(b"")
        written.add(len(content))
        return _Stamp(result["e_tag"].encode())

    async def _delete(self, key: str) -> _Stamp:
        async with self._slots:
            with contextlib.suppress(FileNotFoundError), _translated(key):
                await self._container.delete_async(key)
        return _Stamp(ABSENT)

    async def _list(self, keys: ts.KvStore.KeyRange) -> Sequence[bytes]:
        folder = keys.inclusive_min.rpartition(b"/")[0].decode()
        async with self._slots:
            with _translated(folder):
                entries = await self._container.list(folder or None).collect_async()
        # To the end of the directory: accounts with real directories have another order.
        names = (entry["path"].encode() for entry in entries)
        first, end = keys.inclusive_min, keys.exclusive_max
        return [name for name in names if name >= first and (not end or name < end)]

    async def _upload(self, commit: Any, keys: ts.KvStore.KeyRange) -> None:
        try:
            await commit
            names = await self._staging.list(keys)
            outcomes = await asyncio.gather(
                *(self._upload_file(name.decode()) for name in names), return_exceptions=True
            )
        finally:
            await self._staging.delete_range(keys)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _upload_file(self, key: str) -> None:
        async with self._slots:
            content = (await self._staging.read(key)).value
            # From here on, only the request holds the content.
            await self._staging.write(key, None)
            await self._put(key, content)


class _Request(Task[Any]):
    """A request under way.

    Args:
        work: The request, for the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        super().__init__(lambda: self._task.result())
        self._task: asyncio.Task[Any]
        _LOOP.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(lambda _: self.carry_out())

    def cancel(self) -> None:
        """End the request, of which nobody waits for the result."""
        _LOOP.call_soon_threadsafe(lambda: self._task.cancel())


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise the errors of obstore as those of TensorStore: ``ValueError``, the status first.

    Those of conditions and of missing objects pass.
    """
    try:
        yield
    except FileNotFoundError as error:
        if "ContainerNotFound" in str(error):
            raise ValueError(f"NOT_FOUND: {_said(error)}") from error
        raise
    except (AlreadyExistsError, NotModifiedError, PreconditionError):
        raise
    except BaseError as error:
        # Without a key, it asks for the token of a machine.
        is_denied = isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or (
            "token request" in str(error)
        )
        code = "PERMISSION_DENIED" if is_denied else "UNKNOWN"
        raise ValueError(f"{code}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the message of an error of obstore, without the dump of its internals."""
    return str(error).partition("\n\nDebug source:")[0]


def open_container(name: str, store: ObjectStore, staging: ts.KvStore) -> AzureBucket:
    """Open a container; nothing is asked of the service yet.

    Args:
        name: The name of the container.
        store: The options. ``region`` and ``credentials`` are of S3.
        staging: The memory in which TensorStore makes the files of arrays, by the same keys.

    Raises:
        ValueError: The environment names no account, or its variables do not fit together.
    """
    variables = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    endpoint = store.endpoint or next(filter(None, map(os.environ.get, variables)), "")
    client: ClientConfig = {"timeout": timedelta(seconds=TIMEOUT_SECONDS)}
    # Emulators have no certificates.
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    with _translated(name):
        container = AzureStore(
            name,
            config={"endpoint": endpoint} if endpoint else {},
            client_options=client,
            retry_config={
                "max_retries": store.retries,
                "retry_timeout": timedelta(seconds=store.deadline_seconds),
                "backoff": _BACKOFF,
            },
        )
    return AzureBucket(container, store.concurrency, staging)
