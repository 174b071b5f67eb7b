"""deltacheck: delta checkpoints for LLM post-training.

``open(root)`` reads any checkpoint without a framework; ``deltacheck.backends.torch.Engine`` and
``deltacheck.backends.orbax.manager`` write them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacheck.backends.profiler import Profiler
    from deltacheck.exits import finish_on_signal
    from deltacheck.follower import Follower, LeafChange, Update, follow
    from deltacheck.handle import SaveHandle
    from deltacheck.mirror import Mirror
    from deltacheck.policy import KeepBest, Policy
    from deltacheck.profile import Profile
    from deltacheck.reader import Checkpoints, open
    from deltacheck.records import LeafReport, LeafSpec, SaveReport
    from deltacheck.store.place import ObjectStore
    from deltacheck.tier import MemoryTier
    from deltacheck.verify import Finding

__version__ = "0.1.0"

# Public name -> module. Resolved on first use: `import deltacheck` alone must stay fast and pull in no framework.
_PUBLIC = {
    "Checkpoints": "deltacheck.reader",
    "Finding": "deltacheck.verify",
    "Follower": "deltacheck.follower",
    "LeafChange": "deltacheck.follower",
    "KeepBest": "deltacheck.policy",
    "LeafReport": "deltacheck.records",
    "LeafSpec": "deltacheck.records",
    "MemoryTier": "deltacheck.tier",
    "Mirror": "deltacheck.mirror",
    "ObjectStore": "deltacheck.store.place",
    "Policy": "deltacheck.policy",
    "Profile": "deltacheck.profile",
    "Profiler": "deltacheck.backends.profiler",
    "SaveHandle": "deltacheck.handle",
    "SaveReport": "deltacheck.records",
    "Update": "deltacheck.follower",
    "follow": "deltacheck.follower",
    "finish_on_signal": "deltacheck.exits",
    "open": "deltacheck.reader",
}

__all__ = [
    "Checkpoints",
    "Finding",
    "Follower",
    "KeepBest",
    "LeafChange",
    "LeafReport",
    "LeafSpec",
    "MemoryTier",
    "Mirror",
    "ObjectStore",
    "Policy",
    "Profile",
    "Profiler",
    "SaveHandle",
    "SaveReport",
    "Update",
    "errors",
    "finish_on_signal",
    "follow",
    "open",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("deltacheck.errors")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'deltacheck' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, "errors"])
