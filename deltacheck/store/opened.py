"""Roots opened for writing."""

from __future__ import annotations

from typing import NamedTuple

from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.lock.lease import Lease
from deltacheck.store.root import Root, Store


class Opened(NamedTuple):
    """A root that this process may write to.

    Attributes:
        store: Its segments.
        lease: The right to write; ``None`` if another process holds it for this one.
        next_seq: The sequence number of the next save.
    """

    store: Store
    lease: Lease | None
    next_seq: int


def open_alone(path: Place, durability: Durability) -> Opened:
    """Create or open a root and take its lease.

    Raises what ``Store.create`` and ``take_lease`` raise.
    """
    store = Store.create(path, durability=durability)
    # The lease comes before the sequence number, which no other writer can then take.
    lease = take_lease(path)
    try:
        return Opened(store, lease, Root(path, store).next_seq())
    # Also after Ctrl-C: a lease that is left behind would keep the root from its next writer.
    except BaseException:
        lease.release()
        raise
