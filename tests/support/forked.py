"""Many short trainings with one import of a slow package, each in a forked process.

The parent has imported the package and started no thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def run_all(scenarios: Mapping[str, Callable[[Path], object]], folder: Path) -> None:
    """Run each scenario in its own folder and process, and print the results as a line of JSON."""
    told: dict[str, object] = {}
    for name, scenario in scenarios.items():
        (folder / name).mkdir()
        told[name] = forked(lambda scenario=scenario, name=name: scenario(folder / name))  # type: ignore[misc]
    print("\n" + json.dumps(told))


def forked(do: Callable[[], object]) -> Any:
    """Run a function in a forked process, and return its result as JSON.

    A process that ends early gives ``{"killed": signal}`` or ``{"error": text}``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            value = do()
        except BaseException:  # noqa: BLE001 - told to the parent
            value = {"error": traceback.format_exc()[-3000:]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(value, pipe)
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return {"killed": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(text)


def example(name: str, *arguments: object) -> str:
    """Run an example, and return the last line that it prints."""
    program = Path(__file__).parents[2] / "examples" / name
    sys.argv = [str(program), *map(str, arguments)]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(program), run_name="__main__")
    return text.getvalue().splitlines()[-1]


def digest(state: object) -> str:
    """Return a digest of all tensors and numbers of a nested state."""
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
            # A rank has only its own shard of some tensors.
            value = getattr(value, "_local_tensor", value)
            found.update(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()
