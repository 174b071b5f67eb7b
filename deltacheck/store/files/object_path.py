"""A prefix of an object store, with the methods of ``pathlib.Path`` that a root needs.

A bucket is a ``KvStore`` of TensorStore, or has the same ``read``, ``write`` and ``list``. Both
clients stay: TensorStore has no driver for Azure, and obstore, used there, reads no AWS profiles.

An object store has no directories, no renames, no fsync and no locks. Three properties replace
them. A *directory* is the set of keys that begin with its name. An object appears whole or not at
all, and is durable when its PUT is answered. One writer wins because a PUT can be conditional.
Every wait here has a deadline. An operation that the store refuses raises ``StorageFailed``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import tensorstore as ts

from deltacheck.errors import StorageFailed
from deltacheck.store.files.object_client import ABSENT

_FIRST_DELAY, _LONGEST_DELAY = "200ms", "8s"  # between retries
# Requests that are handed over together; ObjectStore.concurrency limits those under way.
_AT_ONCE = 64
# S3 allows 63 characters, Google 222 if the name has dots. The service checks the rest.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}\Z")

_SLOWEST_BYTES_PER_SECOND = 1_000_000  # a request of much data that is slower is given up


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Options of the access to an object store.

    Options that are not given come from the environment, by the names that the vendors' own tools
    use. ``docs/how-to/object-stores.md`` shows examples.

    Args:
        endpoint: The address of an S3-compatible store, or of an emulator of Azure. Default:
            ``AWS_ENDPOINT_URL_S3``, then ``AWS_ENDPOINT_URL``, then AWS; of Azure
            ``AZURE_STORAGE_ENDPOINT``.
        region: The region of the bucket. Default: ``AWS_REGION``, then ``AWS_DEFAULT_REGION``; AWS
            itself can be asked for it by one more request.
        credentials: The source of S3 credentials. ``"auto"`` takes ``AWS_ACCESS_KEY_ID`` and its
            companions if they are set, and otherwise looks where AWS's tools look. ``"default"``,
            ``"environment"``, ``"anonymous"``, ``"imds"`` and ``"ecs"`` name one source. ``gs://``
            always takes Google's default credentials, and ``az://`` the variables that begin with
            ``AZURE_``.
        retries: Retries of a request that fails in a way that may pass (5xx, throttling, a dropped
            connection). More: an outage of the store has to be longer to fail a save; fewer: a dead
            store is noticed sooner.
        concurrency: Most requests under way. More: faster, until the store throttles; fewer: slower
            and gentler to a small store.
        deadline_seconds: Longest wait for one small request, its retries included; reads of data
            have one second more for each megabyte. Longer: patience with a slow store; shorter: a
            store that hangs is an error sooner.
        lease_seconds: Time for which a silent writer keeps the root. Longer: a live writer keeps
            its root through a longer loss of the network; shorter: a run that died is replaced
            sooner.

    Raises:
        ValueError: An option is out of its range.
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: str = "auto"
    retries: int = 8
    concurrency: int = 32
    deadline_seconds: float = 120.0
    lease_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.retries < 0 or self.concurrency < 1:
            raise ValueError(
                f"retries must be at least 0 and concurrency at least 1, not {self.retries} and"
                f" {self.concurrency}"
            )
        if not (self.deadline_seconds > 0 and self.lease_seconds > 0):
            raise ValueError(
                "deadline_seconds and lease_seconds must be more than 0, not"
                f" {self.deadline_seconds} and {self.lease_seconds}"
            )
        sources = ("auto", "default", "environment", "anonymous", "imds", "ecs")
        if self.credentials not in sources:
            raise ValueError(
                f"credentials must be one of {', '.join(sources)}, not {self.credentials!r}"
            )

    def spec(self, scheme: str, bucket: str, path: str = "") -> dict[str, Any]:
        """Return TensorStore's description of a prefix of a bucket.

        Args:
            scheme: ``"s3"``, ``"gs"``, ``"az"`` or ``"memory"``.
            bucket: The bucket's name.
            path: The prefix; it ends in ``/`` or is empty.

        Returns:
            A key-value store specification. For ``"az"`` it is that of memory, in which arrays are
            encoded before they are uploaded.

        Raises:
            ValueError: The endpoint has no scheme.
        """
        driver = SERVICES[scheme].driver
        if driver == "memory":
            return {"driver": driver, "path": f"{bucket}/{path}"}
        spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": path}
        if scheme == "s3":
            endpoint = (
                self.endpoint
                or os.environ.get("AWS_ENDPOINT_URL_S3")
                or os.environ.get("AWS_ENDPOINT_URL")
            )
            region = (
                self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            )
            # Without it, TensorStore checks conditions by a read before the write, so that several
            # writers can win.
            spec["use_conditional_write"] = True
            if endpoint:
                if not endpoint.startswith(("http://", "https://")):
                    raise ValueError(
                        f"the endpoint {endpoint!r} must begin with https:// or http://: give"
                        f" ObjectStore(endpoint='https://{endpoint}'), or the same in"
                        " AWS_ENDPOINT_URL"
                    )
                spec["endpoint"] = endpoint.rstrip("/")
            # AWS itself can be asked for a region. Other services need not answer that, so they get
            # a default.
            if region or endpoint:
                spec["aws_region"] = region or "us-east-1"
        return spec

    def resources(self, scheme: str) -> dict[str, Any]:
        """Return TensorStore's resources for all requests of a scheme.

        Args:
            scheme: ``"s3"``, ``"gs"``, ``"az"`` or ``"memory"``.

        Returns:
            A context specification: retries, concurrency and credentials.
        """
        patience = {
            "max_retries": self.retries,
            "initial_delay": _FIRST_DELAY,
            "max_delay": _LONGEST_DELAY,
        }
        kind = SERVICES[scheme].driver
        if kind == "memory":
            return {"memory_key_value_store": {}}
        resources: dict[str, Any] = {
            f"{kind}_request_retries": patience,
            f"{kind}_request_concurrency": {"limit": self.concurrency},
        }
        if scheme == "s3":
            source = "environment" if os.environ.get("AWS_ACCESS_KEY_ID") else "default"
            resources["aws_credentials"] = {
                "type": source if self.credentials == "auto" else self.credentials
            }
        return resources


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A key of an object store, or all keys below it, with the methods of ``pathlib.Path``.

    Every method raises ``StorageFailed`` if the store does not answer, or answers with an error,
    until the deadline.
    """

    scheme: str
    bucket: str
    key: str  # no slash at either end
    store: ObjectStore = field(default_factory=ObjectStore)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{name}".strip("/"), self.store)

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, self.key.rpartition("/")[0], self.store)

    @property
    def parents(self) -> tuple[ObjectPath, ...]:
        return (self.parent, *self.parent.parents) if self.key else ()

    def absolute(self) -> ObjectPath:
        return self

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: there are no directories."""

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self.read()[1] != ABSENT

    def is_dir(self) -> bool:
        """Return whether there is any key below this one."""
        return bool(self.keys())

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the names directly below, ascending.

        The store lists every key below for it, a thousand with each request.
        """
        prefix = self._prefix
        for name in sorted({key[len(prefix) :].partition("/")[0] for key in self.keys()}):
            yield self / name

    def keys(self, first: str = "", last: str = "") -> list[str]:
        """Return every key below, in full, ascending. A listing may lag behind writes.

        Args:
            first: Only keys from this name on are listed.
            last: Only keys up to this name, and below it; empty: to the end.
        """
        keys = self._await(self._bucket.list(self._range(first, last)), "list")
        # Another program may have written keys that are not UTF-8. They must not break a listing.
        return sorted(key.decode("utf-8", "surrogateescape") for key in keys)

    def read_bytes(self, expected_bytes: int = 0) -> bytes:
        """Return the object's content; ``FileNotFoundError`` if it does not exist.

        Args:
            expected_bytes: As many may be expected; the deadline becomes longer with them.
        """
        content, generation = self.finish_read(self.start_read(), expected_bytes)
        if generation == ABSENT:
            raise FileNotFoundError(f"{self} does not exist")
        assert content is not None
        return content

    def read(self, unless: bytes = b"") -> tuple[bytes | None, bytes]:
        """Return the object's content and generation.

        Args:
            unless: A known generation. If the object still has it, no content is returned.

        Returns:
            The content, ``None`` if it was not read, and empty if there is no object; the
            generation, ``ABSENT`` if there is no object.
        """
        return self.finish_read(self.start_read(unless))

    def start_read(self, unless: bytes = b"", byte_range: slice | None = None) -> Any:
        """Begin ``read``, of a part of the content if a range is given; return the future."""
        return self._bucket.read(self.key, if_not_equal=unless or None, byte_range=byte_range)

    def start_look(self) -> Any:
        """Begin to read the first byte of an object that is not empty; return the future."""
        return self._bucket.read(self.key, byte_range=slice(0, 1))

    def finish_read(self, started: Any, most_bytes: int = 0) -> tuple[bytes | None, bytes]:
        """Return the result of the read that ``start_read`` has begun.

        Args:
            started: The result of ``start_read``.
            most_bytes: As many may be expected; the deadline becomes longer with them.
        """
        result = self._await(started, "read", most_bytes=most_bytes)
        # TensorStore's state of a read whose condition did not hold: the generation is still the
        # known one.
        content = None if result.state == "unspecified" else bytes(result.value)
        return content, bytes(result.stamp.generation)

    def create(self, content: bytes, timeout: float | None = None) -> bool:
        """Write the object if it is absent; return ``False`` if it has other content.

        No other writer may have the same content, so put a nonce into it. If a reply is lost, the
        content that is then found tells which writer has won.

        Args:
            content: The object's content.
            timeout: Longest wait in seconds; ``None``: the store's deadline.

        Raises:
            StorageFailed: The outcome is unknown. The object may exist, or appear later.
        """
        return self.swap(content, ABSENT, timeout) is not None

    def swap(self, content: bytes, generation: bytes, timeout: float | None = None) -> bytes | None:
        """Write the object if its generation is still the given one (compare and swap).

        Args:
            content: The new content. No other writer may have the same.
            generation: The expected generation; ``ABSENT``: there is no object.
            timeout: Longest wait in seconds; ``None``: the store's deadline.

        Returns:
            The new generation; ``None`` if another writer came first.

        Raises:
            StorageFailed: The outcome is unknown.
        """
        # TensorStore repeats requests. A failed condition and an error may therefore both follow a
        # first attempt that succeeded and whose reply was lost. The content decides, because it has
        # a nonce.
        failed: StorageFailed | None = None
        try:
            result = self._await(
                self._bucket.write(self.key, content, if_equal=generation), "write", timeout
            )
            if result.generation:
                return bytes(result.generation)
        except StorageFailed as error:
            failed = error
        try:
            content_now, generation_now = self.read()
        except StorageFailed as error:
            raise failed or error from error
        if generation_now != ABSENT and content_now == content:
            return generation_now  # ours: only its reply was lost
        # The object is as it was, so the write may still arrive.
        if failed is not None and generation_now == generation:
            raise failed
        return None

    def start_write(self, content: bytes) -> Any:
        """Begin to write the object, over an existing one too; return the future."""
        return self._bucket.write(self.key, content)

    def finish_write(self, started: Any, size: int) -> None:
        """Wait for the write of ``size`` bytes that ``start_write`` has begun."""
        self._await(started, "write", most_bytes=size)

    def write_bytes(self, content: bytes) -> int:
        self.finish_write(self.start_write(content), len(content))
        return len(content)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. A missing one is no error, whatever ``missing_ok`` says."""
        self._await(self._bucket.write(self.key, None), "delete")

    def remove_tree(self) -> None:
        """Delete every object below, one request each."""
        keys = self.keys()
        # In groups, so that few requests of a large root stand in TensorStore's queue at a time.
        for begin in range(0, len(keys), _AT_ONCE):
            for future in [self._bucket.write(key, None) for key in keys[begin : begin + _AT_ONCE]]:
                self._await(future, "delete")

    def stored(self, commit: Any) -> Any:
        """Return the future of the files of an array below.

        Args:
            commit: The future of TensorStore's write of the array to ``spec``.
        """
        return SERVICES[self.scheme].stored(self, commit)

    @property
    def spec(self) -> dict[str, Any]:
        """TensorStore's description of the keys below."""
        return self.store.spec(self.scheme, self.bucket, self._prefix)

    @property
    def context(self) -> ts.Context:
        return _context(self.scheme, self.store)

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    def _range(self, first: str = "", last: str = "") -> ts.KvStore.KeyRange:
        prefix = self._prefix
        return ts.KvStore.KeyRange(prefix + first, _after(f"{prefix}{last}/" if last else prefix))

    @property
    def _bucket(self) -> Any:
        return _open(self.scheme, self.bucket, self.store)

    def patience(self, size: int) -> float:
        """Return the longest wait for a request of ``size`` bytes, in seconds."""
        return self.store.deadline_seconds + size / _SLOWEST_BYTES_PER_SECOND

    def _await(
        self, future: Any, verb: str, timeout: float | None = None, most_bytes: int = 0
    ) -> Any:
        # A caller may shorten the store's deadline, but never extend it.
        wait = min(math.inf if timeout is None else timeout, self.patience(most_bytes))
        try:
            return future.result(timeout=wait)
        except TimeoutError:
            future.cancel()
            raise StorageFailed(f"{self}: no answer to a {verb} within {wait:.3g} s") from None
        # TensorStore has an exception of its own for status 501.
        except (ValueError, NotImplementedError) as error:
            text = brief(error)
            if "PERMISSION_DENIED" in text or "credentials" in text:
                text += SERVICES[self.scheme].remedy
            raise StorageFailed(f"{self}: the store refused a {verb}: {text}") from error


@cache
def _context(scheme: str, store: ObjectStore) -> ts.Context:
    # One for the whole process: the context has the limit of requests and the credentials.
    return ts.Context(store.resources(scheme))


@cache
def _open(scheme: str, bucket: str, store: ObjectStore) -> Any:
    kvstore = ts.KvStore.open(store.spec(scheme, bucket), context=_context(scheme, store)).result(
        timeout=store.deadline_seconds
    )
    return SERVICES[scheme].open(kvstore, bucket, store)


def _open_azure(staging: ts.KvStore, bucket: str, store: ObjectStore) -> Any:
    try:
        from deltacheck.store.files import azure_bucket
    except ModuleNotFoundError as error:
        raise StorageFailed(
            f"az://{bucket} needs the package {error.name}: pip install 'deltacheck[azure]'"
        ) from error
    try:
        return azure_bucket.open_container(bucket, store, staging)
    except ValueError as error:
        raise StorageFailed(f"az://{bucket}: {error}{SERVICES['az'].remedy}") from error


class _Service(NamedTuple):
    """The access to the objects of a URL scheme.

    Attributes:
        driver: TensorStore's driver, through which arrays are written.
        remedy: What to check if access is refused.
        open: Returns the bucket of a name, given the driver's key-value store of it.
        stored: ``ObjectPath.stored``.
    """

    driver: str
    remedy: str
    open: Callable[[ts.KvStore, str, ObjectStore], Any] = lambda kvstore, bucket, store: kvstore
    stored: Callable[[ObjectPath, Any], Any] = lambda path, commit: commit


SERVICES = {
    "s3": _Service(
        "s3",
        ". Check the access to the bucket and the credentials: AWS_ACCESS_KEY_ID and"
        " AWS_SECRET_ACCESS_KEY, or the source that ObjectStore(credentials=...) names",
    ),
    "gs": _Service(
        "gcs",
        ". Check the access to the bucket and Google's default credentials:"
        " GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    ),
    # Without a driver of TensorStore: arrays are encoded in memory, and uploaded from there.
    "az": _Service(
        "memory",
        ". Check the access to the container and the credentials: AZURE_STORAGE_ACCOUNT_NAME with"
        " AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN (AZURE_STORAGE_ENDPOINT, if it is an"
        " emulator)",
        _open_azure,
        lambda path, commit: path._bucket.upload(commit, path._range()),
    ),
    "memory": _Service("memory", ""),
}


def _after(prefix: str) -> str:
    """Return the first key after all that begin with ``prefix``; empty if there is none."""
    # A key range excludes its end, so this is the least key that no longer has the prefix.
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""


def brief(error: Exception) -> str:
    """Return TensorStore's message on one line.

    The status code stands first; the page that the server sent with it is cut off.
    """
    return " ".join(str(error).split())[:400]


def parse(text: str, scheme: str, rest: str, store: ObjectStore | None) -> ObjectPath:
    """Return the path that an address names; ``ValueError`` if it names none.

    Args:
        text: The whole address, for errors.
        scheme: A key of ``SERVICES``.
        rest: The part behind ``://``.
        store: Options of the service; ``None``: the defaults.
    """
    bucket, _, prefix = rest.partition("/")
    names = prefix.strip("/").split("/") if prefix.strip("/") else []
    # Such names are legal keys, but a tool that treats keys as paths would name other objects, and
    # Azure takes a backslash for a slash.
    if not _BUCKET.match(bucket) or any(
        name in ("", ".", "..") or not name.isprintable() or "\\" in name for name in names
    ):
        raise ValueError(
            f"{text!r} does not name a bucket of two letters or more and a prefix:"
            f" {scheme}://BUCKET/PREFIX, without empty names, '.', '..' and backslashes"
        )
    return ObjectPath(scheme, bucket, "/".join(names), store or ObjectStore())


def existing(paths: Iterable[ObjectPath]) -> list[ObjectPath]:
    """Return those of some objects that exist, asked for by name and not by a listing."""
    # All requests are under way before the first is waited for. One byte tells as much as all.
    reads = [(path, path.start_look()) for path in paths]
    return [path for path, read in reads if path.finish_read(read)[1] != ABSENT]
