"""The PyTorch backend."""

from deltacheck.backends.torch.engine import Engine

__all__ = ["Engine"]
