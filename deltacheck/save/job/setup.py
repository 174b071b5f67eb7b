"""The parts that all saves of one saver share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltacheck.codec.base import Codec
from deltacheck.policy import Policy
from deltacheck.save.job.shadow_file import ShadowFile
from deltacheck.save.save_options import SaveOptions
from deltacheck.store.roots.store import Store


@dataclass(frozen=True, slots=True)
class Setup:
    """The store, the codec, the policy and the options of a saver.

    ``shadow_file``: the memory of new bases; ``None``: anonymous memory.
    """

    store: Store
    codec: Codec[Any]
    policy: Policy
    options: SaveOptions
    shadow_file: ShadowFile | None = None
