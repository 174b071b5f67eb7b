"""The PyTorch backend."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files.dropin import release, save
from deltacheck.backends.torch.files.load import load
from deltacheck.backends.torch.group.arrival import RestoreHandle
from deltacheck.backends.torch.state.follow import apply

if TYPE_CHECKING:
    from deltacheck.backends.torch.dcp import DeltaStorageReader, DeltaStorageWriter
    from deltacheck.backends.torch.state.data_position import ResumableLoader
    from deltacheck.backends.torch.state.shards import Shard

__all__ = [
    "DeltaStorageReader",
    "DeltaStorageWriter",
    "Engine",
    "RestoreHandle",
    "ResumableLoader",
    "Shard",
    "apply",
    "load",
    "release",
    "save",
]

# Names of the public interface -> modules that are imported at their first use.
_LATER = {
    "DeltaStorageReader": "dcp",
    "DeltaStorageWriter": "dcp",
    "ResumableLoader": "state.data_position",
    "Shard": "state.shards",
}  # some import much of torch


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
