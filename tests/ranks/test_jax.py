"""The Orbax handler in two processes of two devices each."""

from __future__ import annotations

import multiprocessing
import socket
import time
from pathlib import Path
from typing import Any

import jax_run
import numpy as np
import pytest
from launch import launch

import deltacheck
from deltacheck.backends.orbax import load
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch import load as torch_load

TILES = ["arrays/columns%@0,0", "arrays/columns%@0,64", "arrays/rows%@0,0", "arrays/rows%@2048,0", "arrays/spread%@0", "arrays/spread%@2097156"]


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that a test starts."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
