"""The PyTorch backend."""

from deltacheck.backends.torch.dropin import release, save
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.follow import apply
from deltacheck.backends.torch.gradient_log import GradientLog
from deltacheck.backends.torch.load import load

__all__ = ["Engine", "GradientLog", "apply", "load", "release", "save"]
