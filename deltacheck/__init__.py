"""Delta checkpoints for LLM post-training.

``open(root)`` reads all checkpoints without a framework. ``deltacheck.backends.torch.Engine`` and
``deltacheck.backends.orbax.manager`` write them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacheck.backends.hugging_face.publish.publisher import Publisher
    from deltacheck.backends.hugging_face.publish.receiver import Receiver
    from deltacheck.backends.profiler import Profiler
    from deltacheck.leaf.limits import Limits
    from deltacheck.leaf.spec import LeafReport, LeafSpec, SaveReport
    from deltacheck.maintain.memory_tier import MemoryTier
    from deltacheck.maintain.mirror import Mirror
    from deltacheck.maintain.verify import Finding
    from deltacheck.policy import Keep, KeepBest, Policy
    from deltacheck.profile import Profile
    from deltacheck.reader import Checkpoints, open
    from deltacheck.restore.follow.follower import Follower, LeafChange, Update, follow
    from deltacheck.save.exits import StopSignals, finish_on_signal
    from deltacheck.save.handle import SaveHandle
    from deltacheck.save.save_options import SaveOptions
    from deltacheck.store.files.object_path import ObjectStore

__version__ = "0.1.0"

# The module of each public name. Modules are imported at the first use of a name, because
# `import deltacheck` must be fast and must not import a framework.
_PUBLIC = {
    "Checkpoints": "deltacheck.reader",
    "Finding": "deltacheck.maintain.verify",
    "Follower": "deltacheck.restore.follow.follower",
    "LeafChange": "deltacheck.restore.follow.follower",
    "Keep": "deltacheck.policy",
    "KeepBest": "deltacheck.policy",
    "LeafReport": "deltacheck.leaf.spec",
    "LeafSpec": "deltacheck.leaf.spec",
    "Limits": "deltacheck.leaf.limits",
    "MemoryTier": "deltacheck.maintain.memory_tier",
    "Mirror": "deltacheck.maintain.mirror",
    "ObjectStore": "deltacheck.store.files.object_path",
    "Policy": "deltacheck.policy",
    "Profile": "deltacheck.profile",
    "Profiler": "deltacheck.backends.profiler",
    "Publisher": "deltacheck.backends.hugging_face.publish.publisher",
    "Receiver": "deltacheck.backends.hugging_face.publish.receiver",
    "SaveHandle": "deltacheck.save.handle",
    "SaveOptions": "deltacheck.save.save_options",
    "SaveReport": "deltacheck.leaf.spec",
    "StopSignals": "deltacheck.save.exits",
    "Update": "deltacheck.restore.follow.follower",
    "follow": "deltacheck.restore.follow.follower",
    "finish_on_signal": "deltacheck.save.exits",
    "open": "deltacheck.reader",
}

__all__ = [
    "Checkpoints",
    "Finding",
    "Follower",
    "Keep",
    "KeepBest",
    "LeafChange",
    "LeafReport",
    "LeafSpec",
    "Limits",
    "MemoryTier",
    "Mirror",
    "ObjectStore",
    "Policy",
    "Profile",
    "Profiler",
    "Publisher",
    "Receiver",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "StopSignals",
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
