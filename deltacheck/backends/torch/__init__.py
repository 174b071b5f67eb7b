"""The PyTorch backend."""

from typing import TYPE_CHECKING, Any

from deltacheck.backends.torch.dropin import release, save
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.follow import apply
from deltacheck.backends.torch.gradient_log import GradientLog
from deltacheck.backends.torch.load import load

if TYPE_CHECKING:
    from deltacheck.backends.torch.shards import Shard

__all__ = ["Engine", "GradientLog", "Shard", "apply", "load", "release", "save"]


def __getattr__(name: str) -> Any:
    if name == "Shard":  # on first use: not every torch has what distributes tensors, and it takes a while to import
        from deltacheck.backends.torch.shards import Shard

        return Shard
    raise AttributeError(f"module 'deltacheck.backends.torch' has no attribute {name!r}")
