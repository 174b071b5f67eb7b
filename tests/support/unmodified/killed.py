"""Kill the process once, and describe how a training has ended."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def kill_once(folder: Path, step: int) -> None:
    marker = folder.parent / f"{folder.name}.killed"
    if os.environ.get("KILL_AT") == str(step) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def digest(state: object) -> str:
    found = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                found.update(str(key).encode())
                add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            found.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


def write(file: str, result: Any) -> None:
    Path(file).write_text(json.dumps(result))
