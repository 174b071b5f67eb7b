"""Let ``Accelerator.save_state`` write steps of a root, and ``load_state`` read them.

The loop is the script's, so it is the script that says when to save and to load. A folder that it
saves to gets a pointer to the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deltacheck.backends.launched.launch_options import LaunchOptions, say, say_begin
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.accelerate import _can_save, state_of
from deltacheck.backends.torch.accelerate import load_state as load
from deltacheck.backends.torch.files import pointer
from deltacheck.policy import Keep

_POINTER = "deltacheck.json"  # in a folder that a script saves to
_engines: dict[str, Engine] = {}


def save_state(
    original: Callable[..., Any], accelerator: Any, output_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """Replace ``Accelerator.save_state``: save a step, durable when the call returns."""
    if not _is_covered(accelerator, output_dir):
        return original(accelerator, output_dir, *args, **kw)
    folder = Path(output_dir).expanduser().absolute()
    options = LaunchOptions.of_environment()
    # Beside the folder of all checkpoints, because scripts look for the newest folder in it.
    engine = _opened(accelerator, options.root or f"{folder.parent}.deltacheck", options)
    number = re.search(r"(\d+)\D*\Z", folder.name)
    newest = engine.latest_step()
    step = int(number[1]) if number else 0 if newest is None else newest + 1
    report = engine.save(step, state_of(accelerator)).result()
    if report is not None and accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        pointer.write(folder / _POINTER, pointer.Pointer(engine.root, report.step, report.seq))
    # Afterwards the folder exists for every process.
    accelerator.wait_for_everyone()
    accelerator.project_configuration.iteration += 1
    return str(folder)


def load_state(
    original: Callable[..., Any], accelerator: Any, input_dir: Any = None, *args: Any, **kw: Any
) -> Any:
    """Replace ``Accelerator.load_state``: restore the step of a folder, if it has a pointer."""
    file = None if input_dir is None else Path(input_dir).expanduser() / _POINTER
    if file is None or not file.exists():
        return original(accelerator, input_dir, *args, **kw)
    root, manifest = pointer.opened(file)
    engine = _opened(accelerator, str(root.path), LaunchOptions.of_environment())
    load(accelerator, engine.restore(manifest.step))
    return None


def _is_covered(accelerator: Any, output_dir: Any) -> bool:
    if output_dir is None or accelerator.project_configuration.automatic_checkpoint_naming:
        reason = "automatic_checkpoint_naming is on"
    elif not _can_save(accelerator):
        reason = f"it is a training of the type {accelerator.distributed_type.value}"
    else:
        return True
    if accelerator.is_main_process:
        say(f"Accelerate writes its own checkpoints, because {reason}")
    return False


def _opened(accelerator: Any, root: str, options: LaunchOptions) -> Engine:
    """Return the engine of a root, which stays open until the process ends."""
    if root not in _engines:
        keep = None if options.keep is None else Keep(last=options.keep)
        group = dist.group.WORLD if accelerator.num_processes > 1 else None
        engine = Engine(root, keep=keep, process_group=group, **options.engine())
        _engines[root] = engine
        if accelerator.is_main_process:
            say_begin(options, "Accelerator", root, engine.latest_step() or 0)
    return _engines[root]
