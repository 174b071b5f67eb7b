"""A root that is opened to be written."""

from __future__ import annotations

from typing import NamedTuple

from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place, take_lease
from deltacheck.store.lock.lease import Lease
from deltacheck.store.root import Root, Store


class Opened(NamedTuple):
    """A root that this process may write to. ``lease``: ``None`` where another process holds it for
    this one, too.
    """

    store: Store
    lease: Lease | None
    next_seq: int


def open_alone(path: Place, durability: Durability) -> Opened:
    """Make or open a root and take it. Raises what ``Store.create`` and ``Lease`` raise."""
    store = Store.create(path, durability=durability)
    lease = take_lease(path)
    try:
        return Opened(store, lease, Root(path, store).next_seq())
    except BaseException:
        lease.release()
        raise
