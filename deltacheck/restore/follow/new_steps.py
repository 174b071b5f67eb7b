"""Find the steps of a run that a consumer has not seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Brief
from deltacheck.store.roots.root import Errors, Root, StepRef

_Result = TypeVar("_Result")


def polled(
    poll: Callable[[], _Result | None], poll_seconds: float, timeout: float | None
) -> Iterator[_Result]:
    """Yield what a call returns, again and again, until it has returned nothing for some time.

    Args:
        poll: The call. ``None`` or an empty result: there is nothing new.
        poll_seconds: The wait after nothing new.
        timeout: End after so many seconds with nothing new. ``None``: never end.
    """
    begin = time.monotonic()
    while True:
        if result := poll():
            yield result
            # The time that the consumer took is not part of the timeout.
            begin = time.monotonic()
        elif timeout is not None and time.monotonic() - begin >= timeout:
            return
        else:
            time.sleep(poll_seconds)


class NewSteps:
    """The committed steps of a root after a save.

    Args:
        root: The root of the run.

    Attributes:
        seq: The number of the newest save that was consumed; -1: none.
    """

    def __init__(self, root: Root) -> None:
        self.seq = -1
        self._root = root
        # Manifests when nothing newer was left. While they stay the same, none is read.
        self._known_paths: list[Place] = []
        # Unreadable manifests whose errors were raised. They must not block the steps after them.
        self._reported: set[Place] = set()

    def next(self, newest_only: bool, *, repeat: bool = False) -> StepRef | None:
        """Return the step to consume next, at first the newest; ``None``: there is no new one.

        Args:
            newest_only: Skip all new steps but the newest.
            repeat: Return the newest step if there is no new one.

        Raises:
            Damaged: A manifest that is not skipped cannot be read. Raised once for each.
            UnsupportedFormat: A newer version of deltacheck has written it.
        """
        paths = self._root.manifest_paths()
        if paths == self._known_paths and not repeat:
            return None
        manifests, damaged = self._root.manifests()
        steps = [StepRef(path, Brief.of(manifest)) for path, manifest in manifests.items()]
        skips_all = newest_only or self.seq < 0
        passed = [ref.manifest_path for ref in steps if skips_all or ref.seq <= self.seq]
        self._refuse_damaged(damaged, paths, passed)
        newer = [ref for ref in steps if ref.seq > self.seq]
        if repeat and not newer:
            newer = steps[-1:]
        if len(newer) <= 1 or skips_all:
            self._known_paths = paths
        if not newer:
            return None
        return newer[-1] if skips_all else newer[0]

    def _refuse_damaged(
        self, damaged: Errors, paths: Sequence[Place], passed: Iterable[Place]
    ) -> None:
        """Raise the error of an unreadable manifest behind all that are passed, once for each."""
        # A step that was committed after the listing comes after all others.
        position = {path: number for number, path in enumerate(paths)}
        last = max((position.get(path, len(paths)) for path in passed), default=-1)
        for path in sorted(damaged.keys() - self._reported):
            self._reported.add(path)
            if position.get(path, len(paths)) > last:
                raise damaged[path]
