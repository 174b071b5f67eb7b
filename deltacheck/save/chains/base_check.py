"""Find stored segments that another program has removed or cut under a live writer.

Purges of scratch file systems go by the age of each file, so a table may outlive the data beside
it. The tables are looked at before every commit. Looking at each data file of a long chain may cost
more than a small save, so the segments take turns, the oldest first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from deltacheck.store.manifest import SegmentRef
from deltacheck.store.roots.store import Store

# The time for the look, as a share of the time that the save has taken so far. Larger: a lost file
# is found sooner; smaller: cheaper saves. All tables and two segments are looked at in any case.
SHARE = 0.005
# Keys that an object store lists with one request.
_KEYS_PER_REQUEST = 1000


class BaseCheck:
    """The looks of one writer at the segments that its saves go on from."""

    def __init__(self) -> None:
        # Segment -> bytes of its files: as they were written, or as they were seen first, since a
        # repair may have given a committed segment other redundant files.
        self._sizes: dict[str, int] = {}
        # Segment -> number of the turn in which its files were seen last.
        self._turns: dict[str, int] = {}
        self._turn = 0
        # Segment -> keys of its objects, as an object store has listed them.
        self._objects: Mapping[str, Set[str]] = {}
        # Looks until the next listing of an object store.
        self._pause = 0

    def wrote(self, ref: SegmentRef) -> None:
        """Record the size of a segment that this writer has made durable."""
        self._sizes[ref.id] = ref.stored_bytes

    def lost(
        self, store: Store, names: Iterable[str], seconds: float = 0.0, acknowledged: str = ""
    ) -> list[str]:
        """Return the segments that have lost their table, or files beside it, ascending.

        Args:
            store: The segments of the root.
            names: The segments.
            seconds: The time for the look. Longer: the data files of more segments.
            acknowledged: A segment that was written just now. An object store has acknowledged each
                of its objects.
        """
        if not isinstance(store.path, Path):
            return self._lost_objects(store, set(names) - {acknowledged})
        names = sorted(names)
        if not names:
            return []
        deadline = time.perf_counter() + seconds
        lost = set(store.missing_segments(names))
        self._turn += 1
        # The oldest always, since a purge by age takes it first; the others in turn.
        rest = sorted(names[1:], key=lambda name: (self._turns.get(name, 0), name))
        for number, name in enumerate([names[0], *rest]):
            if number > 1 and time.perf_counter() >= deadline:
                break
            self._turns[name] = self._turn
            if name not in lost:
                size = store.segment_bytes(name)
                if size is None or size != self._sizes.setdefault(name, size):
                    lost.add(name)
        # Names sort by age, and no later save goes on from an older segment than these.
        self._turns = {name: turn for name, turn in self._turns.items() if name >= names[0]}
        self._sizes = {name: size for name, size in self._sizes.items() if name >= names[0]}
        return sorted(lost)

    def _lost_objects(self, store: Store, names: Iterable[str]) -> list[str]:
        """Return the segments of an object store that have lost their table, or objects beside it.

        The objects are those that an earlier look has seen. A listing of many objects takes several
        requests. The next looks then do without, so that there is at most one request a look on
        average.

        Args:
            store: The segments of the root, on an object store.
            names: The segments.
        """
        if self._pause > 0:
            self._pause -= 1
            return []
        lost, self._objects = store.listed_losses(sorted(names), self._objects)
        count = sum(map(len, self._objects.values()))
        self._pause = max(0, -(-count // _KEYS_PER_REQUEST) - 1)
        return lost
