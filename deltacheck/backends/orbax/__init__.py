"""The Orbax backend: JAX checkpoints through ``ocp.CheckpointManager``."""

from deltacheck.backends.orbax.follow import applied
from deltacheck.backends.orbax.gradient_log import GradientLog
from deltacheck.backends.orbax.handler import DeltaCheckpointHandler, DeltaRestoreArgs, DeltaSaveArgs
from deltacheck.backends.orbax.load import load
from deltacheck.backends.orbax.manager import manager, restore_whole

__all__ = [
    "DeltaCheckpointHandler",
    "DeltaRestoreArgs",
    "DeltaSaveArgs",
    "GradientLog",
    "applied",
    "load",
    "manager",
    "restore_whole",
]
