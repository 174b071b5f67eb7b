"""Kill the process once, and describe how a training has ended."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path
from typing import Any

from tests.support.forked import digest

__all__ = ["digest", "kill_once", "write"]


def kill_once(folder: Path, step: int) -> None:
    marker = folder.parent / f"{folder.name}.killed"
    # Of several ranks, the last one.
    is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if os.environ.get("KILL_AT") == str(step) and is_last and not marker.exists():
        marker.touch()
        name = os.environ.get("KILL_BY", "SIGKILL")
        if name == "launcher":
            ask_launcher()
        else:
            os.kill(os.getpid(), signal.Signals[name])


def ask_launcher() -> None:
    """Send SIGTERM to the process that ``LAUNCHER`` names, and wait for what it makes of it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
    select.select([reading], [], [], 240)
    signal.set_wakeup_fd(before)


def write(file: str, result: Any) -> None:
    Path(file).write_text(json.dumps(result))
