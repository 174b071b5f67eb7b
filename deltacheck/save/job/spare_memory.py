"""Memory of devices for copies of a state that a save can do without.

With a copy in the memory of its device, the training need not wait until the state is encoded.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

Device = TypeVar("Device")
Content = TypeVar("Content")


class Claim(Generic[Device]):
    """Device memory of one save. It ends when nothing refers to it any more."""

    def __init__(self, size: Counter[Device]) -> None:
        self.size = size


class SpareMemory(Generic[Device]):
    """The memory of the copies of all saves of one saver.

    Args:
        unused_bytes: Return the bytes of a device that nobody has taken yet; ``None``: unknown.
        most_bytes: The most bytes of copies on each device. ``None``: half of what is left of it,
            because the training may need the rest.
    """

    def __init__(
        self, unused_bytes: Callable[[Device], int | None], most_bytes: int | None = None
    ) -> None:
        self._unused_bytes = unused_bytes
        self._most_bytes = most_bytes
        self._claims: weakref.WeakSet[Claim[Device]] = weakref.WeakSet()
        # The most bytes that were claimed at once. Frameworks keep memory, so that it counts as
        # taken since then.
        self._kept_bytes: Counter[Device] = Counter()
        self._devices_seen: set[Device] = set()

    def claim(self, size: Mapping[Device, int]) -> Claim[Device] | None:
        """Claim memory, on all devices or on none.

        Args:
            size: The bytes of the copies on each device.

        Returns:
            The claim, which whoever uses the copies must refer to. ``None`` if there is not so much
            memory, and for the first save on a device, because its shadows do not exist yet.
        """
        is_first = not self._devices_seen.issuperset(size)
        self._devices_seen |= size.keys()
        total = sum((earlier.size for earlier in self._claims), Counter(size))
        if is_first or any(total[device] > self._room(device) for device in size):
            return None
        self._kept_bytes |= total
        claimed = Claim(Counter(size))
        self._claims.add(claimed)
        return claimed

    def _room(self, device: Device) -> int:
        unused = self._unused_bytes(device)
        if unused is None:
            return 0
        left_bytes = unused + self._kept_bytes[device]
        return left_bytes // 2 if self._most_bytes is None else min(left_bytes, self._most_bytes)


def while_claimed(claim: object, read: Callable[[], Content]) -> Content:
    """Return what ``read`` returns. The claim lasts as long as anything refers to the call."""
    return read()
