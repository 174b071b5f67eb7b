"""The PyTorch backend."""

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.load import load

__all__ = ["Engine", "load"]
