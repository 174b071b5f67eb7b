"""The Orbax backend: JAX checkpoints through ``ocp.CheckpointManager``."""

from deltacheck.backends.orbax.handler import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
)
from deltacheck.backends.orbax.manager import manager, restore_whole
from deltacheck.backends.orbax.state.follow import applied
from deltacheck.backends.orbax.state.load import load

__all__ = [
    "DeltaCheckpointHandler",
    "DeltaRestoreArgs",
    "DeltaSaveArgs",
    "applied",
    "load",
    "manager",
    "restore_whole",
]
