"""Save and resume a Hugging Face ``Trainer``, or a subclass (TRL, PEFT), with one callback.

Pass ``callbacks=[DeltaCheckCallback()]`` and change nothing else. A callback learns when a
checkpoint is due, but it neither knows the trainer nor can it replace the checkpoint. Therefore the
first ``DeltaCheckCallback`` wraps the methods of the class ``Trainer`` that write and read
checkpoints. A trainer without the callback behaves as before. No ``checkpoint-N`` folder is
written: its content is a step of one root.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.state import rng
from deltacheck.errors import TreeMismatch
from deltacheck.leaf.external_errors import typed
from deltacheck.store.files import storage

log = logging.getLogger("deltacheck")

# The wrapped methods are not public, so the message names a version that has them.
_TESTED_VERSION = "5.23.0"  # of transformers
_STATE_FILE = "trainer_state.json"  # Trainer reads it only from a file


@typed
class DeltaCheckCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a training in the background, and resumes from its checkpoints.

    A checkpoint has model, optimizer, scheduler, gradient scaler, random states and trainer state.
    Of a PEFT model only the trained parameters are saved, as ``Trainer`` does. Frozen weights of
    any other model are read in the background, see ``Engine.guard``; pass ``capture="eager"`` if a
    callback writes to them past torch. The next save raises the error of a failed one.
    ``trainer.train`` returns after the last commit. ``push_to_hub`` does not upload checkpoints,
    because there are no ``checkpoint-N`` folders.

    ``trainer.train`` raises ``ValueError`` for trainings of more than one process, FSDP, DeepSpeed,
    a hyperparameter search and ``save_only_model``.

    Args:
        root: The root; ``None``: ``deltacheck`` in the trainer's ``output_dir``.
        every: Save every so many steps, in addition to ``save_strategy``. Smaller: less work is
            lost in a crash; larger: less to write. ``None``: only by ``save_strategy``.
        resume: ``True``: ``trainer.train()`` continues from the newest step of the root, if there
            is one. ``False``: only with ``trainer.train(resume_from_checkpoint=True)``, which also
            takes ``"checkpoint-N"`` for step N.
        **engine: Options of ``Engine``. The default of ``keep_last`` is the trainer's
            ``save_total_limit``.

    Raises:
        ValueError: ``every`` is less than 1.
        ImportError: This version of transformers lacks a method that is wrapped.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        every: int | None = None,
        resume: bool = True,
        **engine: Any,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._folder = None if root is None else storage.local(root, "the Trainer's callback")
        self._every = every
        self._resume = resume
        self._options = engine
        self._engine: Engine | None = None  # for as long as train() runs
        # Kept until the first step, because the trainer reads it in several methods.
        self._resumed: Mapping[str, Any] | None = None
        self._resumed_path = ""
        self._saved_step = -1
        # On the class, because a callback gets no reference to its trainer.
        _install(Trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint if one is due. ``Trainer`` calls this.

        Args:
            args: Not used.
            state: The trainer's state.
            control: The trainer's control.
            **kwargs: Not used.
        """
        # The state is loaded by now. This releases its memory.
        self._resumed = None
        if self._every is not None and state.global_step % self._every == 0:
            control.should_save = True

    # --- replacements of the trainer's methods; ``original`` is the method ------------------------

    def _train(
        self,
        original: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _refuse(trainer, args[0] if args else kwargs.get("trial"))
        options = dict(self._options)
        limit = trainer.args.save_total_limit
        # The best step may be older than the newest ``limit`` steps, and is loaded at the end.
        if limit and not trainer.args.load_best_model_at_end:
            options.setdefault("keep_last", limit)
        root = self._folder or Path(trainer.args.output_dir, "deltacheck")
        with Engine(root, **options) as engine, tempfile.TemporaryDirectory() as folder:
            self._engine, self._saved_step = engine, -1
            try:
                path = self._resume_from(engine, resume_from_checkpoint, Path(folder))
                return original(trainer, path, *args, **kwargs)
            finally:
                self._engine, self._resumed, self._resumed_path = None, None, ""

    def _resume_from(self, engine: Engine, request: object, folder: Path) -> object:
        """Restore the requested step, and return the argument for the trainer instead."""
        steps = engine.steps()
        match = (
            re.fullmatch(r"checkpoint-(\d+)", Path(request).name)
            if isinstance(request, str | Path)
            else None
        )
        # An existing folder is a checkpoint of ``Trainer`` itself, which loads it without this
        # callback.
        if match is not None and not Path(str(request)).exists() and int(match[1]) in steps:
            saved = engine.restore(int(match[1]))
        elif steps and (request is True or (request is None and self._resume)):
            saved = engine.restore()
        else:
            # There is nothing to resume from here, so ``Trainer`` decides as it does without the
            # callback.
            return request
        path = folder / f"checkpoint-{saved['step']}"
        path.mkdir()
        (path / _STATE_FILE).write_bytes(saved["trainer_state"].tobytes())
        self._resumed, self._resumed_path, self._saved_step = saved, str(path), saved["step"]
        log.info("training goes on from step %d of %s", saved["step"], engine.root)
        return str(path)

    def _run_epoch(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # A finished run that is started again would do one more step.
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return
        original(trainer, *args, **kwargs)

    def _save_checkpoint(
        self, original: Callable[..., Any], trainer: Any, model: Any, trial: Any
    ) -> None:
        engine, state = self._engine, trainer.state
        if engine is None:  # outside of train()
            original(trainer, model, trial)
            return
        # ``every`` and ``save_strategy`` may request the same step, and a resumed step exists
        # already.
        if state.global_step == self._saved_step:
            return
        # From here to ``trainer_state``: what ``Trainer`` itself does before it writes its state.
        trainer.store_flos()
        if state.best_global_step and state.best_global_step in (
            state.global_step,
            *engine.steps(),
        ):
            state.best_model_checkpoint = str(
                Path(trainer.args.output_dir, f"checkpoint-{state.best_global_step}")
            )
        for exported in [
            c for c in (*trainer.callback_handler.callbacks, trainer.control) if _is_exportable(c)
        ]:
            states = state.stateful_callbacks[type(exported).__name__]
            if isinstance(states, list):
                states.append(exported.state())
            else:
                state.stateful_callbacks[type(exported).__name__] = exported.state()
        trainer_state = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
        saved = {
            "step": state.global_step,
            "model": _model_state(trainer.model),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": (
                None
                if trainer.accelerator.scaler is None
                else trainer.accelerator.scaler.state_dict()
            ),
            "rng": rng.states(),
            # As bytes, because it grows with the log, and then only the new part is written.
            "trainer_state": np.frombuffer(trainer_state.encode(), dtype=np.uint8),
        }
        # At every save, because a callback may replace the model. A second call has no effect.
        engine.guard(trainer.model)
        engine.save(state.global_step, saved, metrics=_last_numbers(state.log_history))
        self._saved_step = state.global_step

    def _load_from_checkpoint(
        self, original: Callable[..., Any], trainer: Any, path: str, model: Any = None
    ) -> None:
        # Another path is a checkpoint of ``Trainer`` itself.
        if self._resumed is None or path != self._resumed_path:
            original(trainer, path, model)
            return
        _load_model(
            trainer.model if model is None else model, self._resumed["model"], self._resumed["step"]
        )

    def _load_optimizer_and_scheduler(
        self, original: Callable[..., Any], trainer: Any, path: str | None
    ) -> None:
        if self._resumed is None or path != self._resumed_path:
            original(trainer, path)
            return
        trainer.optimizer.load_state_dict(self._resumed["optimizer"])
        trainer.lr_scheduler.load_state_dict(self._resumed["scheduler"])

    def _load_scaler(self, original: Callable[..., Any], trainer: Any, path: str | None) -> None:
        if self._resumed is None or path != self._resumed_path:
            original(trainer, path)
        elif self._resumed["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(self._resumed["scaler"])

    def _load_rng_state(self, original: Callable[..., Any], trainer: Any, path: str | None) -> None:
        if self._resumed is None or path != self._resumed_path:
            original(trainer, path)
        else:
            rng.restore(self._resumed["rng"])

    def _load_best_model(self, original: Callable[..., Any], trainer: Any) -> None:
        engine, best = self._engine, trainer.state.best_global_step
        # The best step may have been saved by ``Trainer`` before the callback was added.
        if engine is None or best not in engine.steps():
            original(trainer)
            return
        _load_model(trainer.model, engine.restore(best)["model"], best)


_METHODS = (
    "train",
    "_run_epoch",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)


def _install(kind: Any) -> None:
    """Wrap the methods of ``Trainer``, once."""
    # A second wrapper around the first would open the root twice.
    if getattr(kind.train, "_deltacheck", False):
        return
    missing = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    if missing:
        raise ImportError(
            f"this version of transformers has no Trainer.{missing[0]}, by which DeltaCheckCallback"
            f" saves and resumes; {_TESTED_VERSION} has"
        )
    for name in _METHODS:
        replacement = getattr(DeltaCheckCallback, name if name.startswith("_") else f"_{name}")
        setattr(kind, name, _routed(getattr(kind, name), replacement))


def _routed(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call, because callbacks may be added and removed during a training.
        callbacks = [
            c for c in trainer.callback_handler.callbacks if isinstance(c, DeltaCheckCallback)
        ]
        if not callbacks:
            return original(trainer, *args, **kwargs)
        return ours(callbacks[0], original, trainer, *args, **kwargs)

    method._deltacheck = True  # type: ignore[attr-defined]
    return method


def _refuse(trainer: Any, trial: object) -> None:
    """Raise ``ValueError`` for trainings that would not be saved whole."""
    args = trainer.args
    # Each of these would save only a part of the state, and the loss would show at the resume.
    for is_used, feature, remedy in (
        (
            args.world_size > 1,
            f"a training of {args.world_size} processes",
            "leave the callback out",
        ),
        (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
            "a sharded model",
            "leave the callback out",
        ),
        (
            trial is not None,
            "a hyperparameter search",
            "leave the callback out, and give it to the run with what was found",
        ),
        (args.save_only_model, "save_only_model=True, since it could not resume", "leave that out"),
    ):
        if is_used:
            raise ValueError(f"DeltaCheckCallback cannot save {feature}; {remedy}")


def _is_exportable(value: object) -> bool:
    from transformers.trainer_callback import ExportableState

    return isinstance(value, ExportableState)


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state.

    The frozen parameters of a PEFT model are left out, because its base model has them.
    """
    complete = model.state_dict()
    if not hasattr(model, "peft_config"):
        return complete
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    return {name: value for name, value in complete.items() if name not in frozen}


def _load_model(model: torch.nn.Module, saved: Mapping[str, Any], step: int) -> None:
    expected = _model_state(model)
    for name in sorted(expected.keys() ^ saved.keys()):
        holder, counterpart = (
            ("the model", f"step {step}") if name in expected else (f"step {step}", "the model")
        )
        raise TreeMismatch(
            f"{name!r} of {holder} is not in {counterpart}; the run was begun with another model"
        )
    # Without the frozen parameters of a PEFT model a strict load would fail.
    model.load_state_dict(saved, strict=len(expected) == len(model.state_dict()))


def _last_numbers(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of the last entry of the log, to keep with the step."""
    last = history[-1] if history else {}
    return {
        name: float(v)
        for name, v in last.items()
        if isinstance(v, int | float) and math.isfinite(v) and name != "step"
    }
