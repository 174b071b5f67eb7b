"""Leaves that a backend hands over to be saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from deltacheck.leaf.spec import LeafSpec


class Coded(NamedTuple):
    """Content to store in place of a leaf's own bytes.

    Args:
        spec: The form of the stored content. ``None``: nothing is stored for this leaf.
        data: The content, in the form that the codec takes. ``None``: the content that is already
            stored stays as it is.
    """

    spec: LeafSpec | None
    data: Any


@dataclass(frozen=True, slots=True)
class LeafSource:
    """One leaf of a save.

    Args:
        spec: Path, shape and dtype of the leaf.
        current: Return the leaf's present bytes in the form that the codec takes (uint8, 1-D), or a
            ``Coded`` to store instead.
        lazy: The caller promises not to change the bytes until the handle is ``captured``. True:
            they are read behind the training loop; false: they are read before ``save`` returns.
        recheck: Called after the capture. Raises ``SnapshotTorn`` if that promise was broken.
        whole: The leaf has no relation to earlier saves. True: it is encoded without a base, no
            copy of it is kept, and ``current`` must return host memory; false: it becomes a delta
            if a base exists.
    """

    spec: LeafSpec
    current: Callable[[], Any]
    lazy: bool = False
    recheck: Callable[[], None] | None = None
    whole: bool = False
