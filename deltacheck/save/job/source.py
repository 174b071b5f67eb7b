"""Leaves that a backend hands over to be saved, and copies of them for a training that waits.

A copy takes less time than the encoding of a leaf, and training may go on after either.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import fingerprints, host_memory, memory
from deltacheck.codec.adam_law import Law
from deltacheck.codec.base import U8
from deltacheck.codec.fingerprints import fingerprint_of
from deltacheck.errors import SnapshotTorn
from deltacheck.leaf.spec import LeafSpec


class Coded(NamedTuple):
    """Content to store in place of a leaf's own bytes.

    Args:
        spec: The form of the stored content. ``None``: nothing is stored for this leaf.
        data: The content, in the form that the codec takes. ``None``: the content that is already
            stored stays as it is.
        is_new: The content has no relation to what is stored. True: it is encoded by itself, which
            begins a new chain; false: it becomes a delta if a base exists.
        law: Returns the law by which a group follows from its base; ``None``: it is no group.
    """

    spec: LeafSpec | None
    data: Any
    is_new: bool = False
    law: Callable[[Any], Law | None] | None = None


@dataclass(frozen=True, slots=True)
class LeafSource:
    """One leaf of a save.

    Args:
        spec: Path, shape and dtype of the leaf.
        current: Return the leaf's present bytes in the form that the codec takes (uint8, 1-D), or a
            ``Coded`` to store instead.
        lazy: The caller promises not to change the bytes until the handle is ``captured``. True:
            they are read behind the training loop; false: they are read before ``save`` returns.
        recheck: Called when the leaf was read. Raises ``SnapshotTorn`` if that promise was broken.
        check_content: Called with what was read, in the form of ``current``, after it was copied.
            Raises ``SnapshotTorn`` if that is not the content at ``save``.
        is_own: The content of a lazy leaf is a copy that the backend made for this save. True:
            training need not wait until it is read; false: it waits for ``captured``.
        is_view: True: ``current`` returns a view of host memory, in any order and on any thread, so
            that a training that waits may copy the leaf; false: only the encoder calls it.
        views: All views of host memory that ``current`` reads, of this leaf and of others. A
            training that waits may copy them. Empty: it reads other things, or is such a view.
    """

    spec: LeafSpec
    current: Callable[[], Any]
    lazy: bool = False
    recheck: Callable[[], None] | None = None
    check_content: Callable[[Any], None] | None = None
    is_view: bool = False
    is_own: bool = False
    views: tuple[ViewedLeaf, ...] = ()

    def check(self, content: Any, *, is_coded: bool = False) -> None:
        """Raise ``SnapshotTorn`` if ``content``, a copy of what was read, is not that of the save.

        Args:
            content: The copy, in the form of ``current``.
            is_coded: It was coded. Codes are made from a copy that was checked when it was made.
        """
        if self.recheck is not None:
            self.recheck()
        if self.check_content is not None and not is_coded:
            self.check_content(content)


class ViewedLeaf:
    """A leaf that is read in its place until it is copied, and from the copy from then on.

    One thread reads it, for one leaf that is stored or for several. Another one may copy it.

    Args:
        source: The leaf, a view of host memory.
    """

    def __init__(self, source: LeafSource) -> None:
        self._source = source
        self._copy: U8 | None = None
        self._error: Exception | None = None
        self._has_unchecked_read = False

    @property
    def bytes_to_copy(self) -> int:
        """The bytes that a copy takes; 0 if there is one."""
        return 0 if self._is_copied else self._source.spec.raw_bytes

    @property
    def _is_copied(self) -> bool:
        return self._copy is not None or self._error is not None

    def copy(self, out: U8) -> None:
        """Copy the leaf to ``out``, unless that was done before.

        If it is no longer that of the save, whoever reads it next raises the error, which fails the
        save.
        """
        if self._is_copied:
            return
        try:
            content = memory.copied(self._source.current(), out)
            self._source.check(content)
        except Exception as error:  # noqa: BLE001 - see above
            self._error = error
        else:
            self._copy = content

    def source(self) -> LeafSource:
        """Return the source that reads the leaf here."""
        return replace(
            self._source,
            current=self._current,
            recheck=self._recheck,
            check_content=self._check_content,
            is_view=False,
            views=(self,),
        )

    def _current(self) -> U8:
        if self._error is not None:
            raise self._error
        copy = self._copy  # one may be made meanwhile
        self._has_unchecked_read = copy is None
        content: U8 = self._source.current() if copy is None else copy
        return content

    # A copy was checked when it was made, and a read in place is checked once: another leaf may be
    # computed from it later, when a copy exists and the training has changed the leaf.

    def _recheck(self) -> None:
        if self._has_unchecked_read and self._source.recheck is not None:
            self._source.recheck()

    def _check_content(self, content: Any) -> None:
        if self._has_unchecked_read and self._source.check_content is not None:
            self._source.check_content(content)
        self._has_unchecked_read = False


class EarlyCopies:
    """The copies of one save.

    The encoder takes leaves from the front of the queue. Meanwhile, the thread that waits copies
    leaves from its end.

    Args:
        sources: The leaves that are captured behind the training loop.
        most_bytes: The most bytes of copies. Larger: training waits less; smaller: less memory.
    """

    def __init__(self, sources: deque[LeafSource], most_bytes: int) -> None:
        self._sources = sources
        self._bytes_left = most_bytes
        self._copies: deque[LeafSource] = deque()
        # Held by the one thread that copies. Nobody waits for it: a handler of a signal that has
        # interrupted a copy leaves the rest to the encoder.
        self._copying = threading.Lock()

    def make(self) -> None:
        """Copy leaves until none is left, memory is used up, or one is read from elsewhere.

        Do nothing if copies are being made already.
        """
        if not self._copying.acquire(blocking=False):
            return
        try:
            while self._make_one():
                pass
        finally:
            self._copying.release()

    def take(self) -> deque[LeafSource]:
        """Return the copied leaves, in the order of the queue.

        The caller has emptied the queue, and may have captured the first of them itself. A copy
        that is still under way is of such a leaf: each leaves the queue after it is complete.
        """
        return self._copies.copy()

    def _make_one(self) -> bool:
        try:
            source = self._sources[-1]
            views = source.views or ((ViewedLeaf(source),) if source.is_view else ())
            size = sum(view.bytes_to_copy for view in views)
            if not views or size > self._bytes_left:
                return False
            memories = [host_memory.empty(view.bytes_to_copy) for view in views]
        except (IndexError, MemoryError):
            return False
        self._bytes_left -= size
        for view, out in zip(views, memories, strict=True):
            view.copy(out)
        # Copied before it leaves the queue: if Ctrl-C ends the copy, the encoder reads the leaf.
        self._copies.appendleft(source if source.views else views[0].source())
        # Empty if the encoder has taken the leaf meanwhile.
        with contextlib.suppress(IndexError):
            self._sources.pop()
        return True


@dataclass(frozen=True, slots=True)
class LaterSources:
    """The leaves of a save whose sources are made behind the training loop.

    Every one of them may be read there.

    Args:
        specs: The leaves by path.
        make: Return their sources by path, in the order of ``specs``.
        is_own: As in ``LeafSource``, of all of them.
    """

    specs: Mapping[str, LeafSpec]
    make: Callable[[], Mapping[str, LeafSource]]
    is_own: bool = False


Sources: TypeAlias = Mapping[str, LeafSource] | LaterSources


def specs_of_sources(sources: Sources) -> Iterable[LeafSpec]:
    """Return the specs of the leaves of a save."""
    if isinstance(sources, LaterSources):
        return sources.specs.values()
    return [source.spec for source in sources.values()]


def itself(content: Any) -> Any:
    """Return the argument. With it, content that a backend has at hand is a ``current``."""
    return content


def torn_between_reads(path: str, before: str, after: str) -> SnapshotTorn:
    """Return the error for a leaf whose content changed between two reads of one save.

    Args:
        path: The leaf.
        before: Its digest at the first read.
        after: Its digest at the second read.
    """
    return SnapshotTorn(
        f"leaf {path!r} was written to after save() and before its capture had finished (digest"
        f" {before}, now {after}). Call engine.before_update() before such a write, or use"
        " SaveOptions(capture='eager')"
    )


def require_fingerprint(path: str, before: int, seed: int, content: NDArray[np.uint8]) -> None:
    """Raise ``SnapshotTorn`` if what was read is not the content at ``save``.

    Args:
        path: The leaf.
        before: Its fingerprint at ``save`` (``codec.fingerprints``).
        seed: The seed of the fingerprint.
        content: The bytes that were read.
    """
    after = fingerprint_of(content, seed)
    if after != before:
        raise torn_between_reads(path, f"{before:016x}", f"{after:016x}")


def content_check(
    path: str, sample: Any, seed: int, to_host: Callable[[Any], NDArray[np.uint8]]
) -> Callable[[Any], None]:
    """Return a check of a leaf's content for ``LeafSource``.

    Args:
        path: The leaf.
        sample: Its sampled bytes (``fingerprints.sampled``) as they are now: a view in host memory,
            or a copy on a device.
        seed: The seed of the sample.
        to_host: Return sampled bytes in host memory.
    """
    # A sample on a device comes to the host with the check, so that ``save`` does not wait for it.
    expected = fingerprints.digest(sample) if isinstance(sample, np.ndarray) else None

    def check(content: Any) -> None:
        before = expected or fingerprints.digest(to_host(sample))
        after = fingerprints.digest(to_host(fingerprints.sampled(content, seed)))
        if after != before:
            raise torn_between_reads(path, before, after)

    return check


def host_content_check(path: str, data: NDArray[np.uint8], seed: int) -> Callable[[Any], None]:
    """Return a check of a leaf's content, of memory of the host that is read later.

    Args:
        path: The leaf.
        data: Its bytes as they are now, uint8, 1-D.
        seed: The seed of the sample.
    """
    return content_check(path, fingerprints.sampled(data, seed), seed, lambda sample: sample)
