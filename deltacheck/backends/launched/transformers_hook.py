"""Give a Hugging Face ``Trainer`` the callback when it begins to train."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from deltacheck.backends.launched.launch_options import (
    STOP_SIGNALS,
    LaunchOptions,
    TrainingRoots,
    say,
    say_begin,
)
from deltacheck.backends.torch.trainer.callback import DeltaCheckCallback
from deltacheck.backends.torch.trainer.wrapped_methods import overriding_class
from deltacheck.policy import Keep

_roots = TrainingRoots()


class LaunchedCallback(DeltaCheckCallback):
    """The callback of a training that ``deltacheck run`` has started.

    Args:
        options: The options of the launcher.
        root: As in ``DeltaCheckCallback``.
        trainer: The name of the trainer's class.
    """

    def __init__(self, options: LaunchOptions, root: str | None, trainer: str) -> None:
        engine = options.engine()
        if options.keep is not None:
            engine["keep"] = Keep(last=options.keep)
        super().__init__(root, every=options.every, stop_on=STOP_SIGNALS, **engine)
        self._launch_options = options
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say where the training is saved, and which step it continues from."""
        super().on_train_begin(args, state, control, **kwargs)
        assert self._engine is not None
        if not state.is_world_process_zero:
            return
        say_begin(self._launch_options, self._trainer, str(self._engine.root), state.global_step)
        if self._every is None and args.save_strategy == "no":
            say("save_strategy is 'no', so nothing is saved: add --every N, or change it")


def init(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``Trainer.__init__``: say at once what cannot be saved."""
    original(trainer, *args, **kwargs)
    parent = overriding_class(type(trainer), "train")
    if parent is not None and trainer.is_world_process_zero():
        say(
            f"{type(trainer).__name__} is not saved, because {parent.__qualname__}.train does not"
            " call Trainer.train; save with an Engine"
        )


def train(
    original: Callable[..., Any],
    trainer: Any,
    resume_from_checkpoint: object = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace ``Trainer.train``: add the callback, unless the script has added one."""
    options = LaunchOptions.of_environment()
    options.record("process", pid=os.getpid())
    name = type(trainer).__name__
    present = [c for c in trainer.callback_handler.callbacks if isinstance(c, DeltaCheckCallback)]
    if present:
        if not isinstance(present[0], LaunchedCallback):
            options.record("own", trainer=name)
        return original(trainer, resume_from_checkpoint, *args, **kwargs)
    # Scripts pass an option of their own on, whose default may be false. So it asks for nothing.
    request = resume_from_checkpoint or None
    base = options.root or str(Path(trainer.args.output_dir, "deltacheck").absolute())
    root = _roots.root(base, continues=request is not None)
    # Without a root of its own, that of DeepSpeed's configuration counts.
    is_default = options.root is None and root == base
    callback = LaunchedCallback(options, None if is_default else root, name)
    trainer.add_callback(callback)
    try:
        # Of the class: the first callback has replaced the method again.
        result = Trainer.train(trainer, request, *args, **kwargs)
    finally:
        trainer.remove_callback(callback)
    _roots.end(base)
    return result
