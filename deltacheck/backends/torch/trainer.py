"""Hugging Face's ``Trainer``, and what is built on it (TRL, PEFT), with
``callbacks=[DeltaCheckCallback()]`` and nothing else.

A callback is told when a checkpoint is due, but neither sees the trainer nor can it write the
checkpoint in its place. So the first ``DeltaCheckCallback`` puts itself before those methods of the
class ``Trainer`` that write and read checkpoints. A trainer without the callback goes on as before.
Nothing is written to ``checkpoint-N`` folders: all that they would hold is a step of one root.
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
from deltacheck.store.files import storage

log = logging.getLogger("deltacheck")

_TRIED = "5.23.0"  # the version of transformers that this was tried with
_STATE_FILE = "trainer_state.json"  # Trainer reads it by itself, and only from a file


class DeltaCheckCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer, scheduler, gradient scaler, random states and trainer state behind
    the
    training, and resumes from them.

    ``root``: where to (default: ``deltacheck`` in the trainer's ``output_dir``). ``every``: save
    after so many steps, beside the times that ``save_strategy`` says; more often: less work lost,
    more to write. ``resume``: ``trainer.train()`` goes on from the newest step of the root, where
    there is one; ``False``: only with ``trainer.train(resume_from_checkpoint=True)``, which also
    takes ``"checkpoint-N"`` for step N. All else: options of ``Engine``; ``keep_last`` is by
    default the trainer's ``save_total_limit``.

    Of a PEFT model only what is trained is saved, as ``Trainer`` does it. Frozen weights of any
    other are read behind the training, as ``Engine.guard`` has it; ``capture="eager"`` where a
    callback writes to them through ``.data``. A failed save is raised at the next one, as
    ``Engine`` has it. ``trainer.train`` returns when the last save is committed. ``push_to_hub``
    does not upload checkpoints, since there are no ``checkpoint-N`` folders.

    ``trainer.train`` raises ``ValueError`` for trainings of more than one process, FSDP, DeepSpeed,
    a hyperparameter search and ``save_only_model``.
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
        self._resumed: Mapping[str, Any] | None = (
            None  # until the first step has shown that it is not read again
        )
        self._resumed_path = ""
        self._saved_step = -1
        _install(Trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As ``Trainer`` calls it."""
        self._resumed = None
        if self._every is not None and state.global_step % self._every == 0:
            control.should_save = True

    # In the place of the trainer's methods; ``original`` is that method.

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
        if limit and not trainer.args.load_best_model_at_end:
            options.setdefault("keep_last", limit)
        root = self._folder or Path(trainer.args.output_dir, "deltacheck")
        with Engine(root, **options) as engine, tempfile.TemporaryDirectory() as folder:
            self._engine, self._saved_step = engine, -1
            try:
                path = self._take_up(engine, resume_from_checkpoint, Path(folder))
                return original(trainer, path, *args, **kwargs)
            finally:
                self._engine, self._resumed, self._resumed_path = None, None, ""

    def _take_up(self, engine: Engine, wanted: object, folder: Path) -> object:
        """Restore what is asked for, and give what the trainer is told instead."""
        steps = engine.steps()
        named = (
            re.fullmatch(r"checkpoint-(\d+)", Path(wanted).name)
            if isinstance(wanted, str | Path)
            else None
        )
        if named is not None and not Path(str(wanted)).exists() and int(named[1]) in steps:
            saved = engine.restore(int(named[1]))
        elif steps and (wanted is True or (wanted is None and self._resume)):
            saved = engine.restore()
        else:
            return wanted
        path = folder / f"checkpoint-{saved['step']}"
        path.mkdir()
        (path / _STATE_FILE).write_bytes(saved["trainer_state"].tobytes())
        self._resumed, self._resumed_path, self._saved_step = saved, str(path), saved["step"]
        log.info("training goes on from step %d of %s", saved["step"], engine.root)
        return str(path)

    def _run_epoch(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if (
            trainer.state.global_step >= trainer.state.max_steps
        ):  # a finished run that is started again: it would do one step more
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
        if state.global_step == self._saved_step:
            return
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
            kept = state.stateful_callbacks[type(exported).__name__]
            if isinstance(kept, list):
                kept.append(exported.state())
            else:
                state.stateful_callbacks[type(exported).__name__] = exported.state()
        told = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
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
            # Bytes: it grows with the log, and only what is added is written.
            "trainer_state": np.frombuffer(told.encode(), dtype=np.uint8),
        }
        engine.guard(trainer.model)
        engine.save(state.global_step, saved, metrics=_last_numbers(state.log_history))
        self._saved_step = state.global_step

    def _load_from_checkpoint(
        self, original: Callable[..., Any], trainer: Any, path: str, model: Any = None
    ) -> None:
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
    """Put ``DeltaCheckCallback`` before the methods of ``Trainer``, once."""
    if getattr(kind.train, "_deltacheck", False):
        return
    missing = [name for name in _METHODS if not callable(getattr(kind, name, None))]
    if missing:
        raise ImportError(
            f"this version of transformers has no Trainer.{missing[0]}, by which DeltaCheckCallback"
            f" saves and resumes; {_TRIED} has"
        )
    for name in _METHODS:
        ours = getattr(DeltaCheckCallback, name if name.startswith("_") else f"_{name}")
        setattr(kind, name, _routed(getattr(kind, name), ours))


def _routed(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        found = [c for c in trainer.callback_handler.callbacks if isinstance(c, DeltaCheckCallback)]
        if not found:
            return original(trainer, *args, **kwargs)
        return ours(found[0], original, trainer, *args, **kwargs)

    method._deltacheck = True  # type: ignore[attr-defined]
    return method


def _refuse(trainer: Any, trial: object) -> None:
    """Raise ``ValueError`` for what would not be saved whole."""
    args = trainer.args
    for found, what, way_out in (
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
        if found:
            raise ValueError(f"DeltaCheckCallback cannot save {what}; {way_out}")


def _is_exportable(value: object) -> bool:
    from transformers.trainer_callback import ExportableState

    return isinstance(value, ExportableState)


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """A model's state; of a PEFT model without its frozen parameters, which its base model
    holds.
    """
    whole = model.state_dict()
    if not hasattr(model, "peft_config"):
        return whole
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    return {name: value for name, value in whole.items() if name not in frozen}


def _load_model(model: torch.nn.Module, saved: Mapping[str, Any], step: int) -> None:
    expected = _model_state(model)
    for name in sorted(expected.keys() ^ saved.keys()):
        there, elsewhere = (
            ("the model", f"step {step}") if name in expected else (f"step {step}", "the model")
        )
        raise TreeMismatch(
            f"{name!r} of {there} is not in {elsewhere}; the run was begun with another model"
        )
    model.load_state_dict(saved, strict=len(expected) == len(model.state_dict()))


def _last_numbers(history: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of the last entry of the log, to be kept with the step."""
    last = history[-1] if history else {}
    return {
        name: float(v)
        for name, v in last.items()
        if isinstance(v, int | float) and math.isfinite(v) and name != "step"
    }
