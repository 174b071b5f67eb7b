"""Collect the state of a trainer for a step, and load it again."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from deltacheck.backends.torch.state import rng
from deltacheck.errors import TreeMismatch

log = logging.getLogger("deltacheck")


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the state of this rank for the next step, without the files of its checkpoint.

    All ranks have parameters and optimizer. What may differ between ranks, such as buffers, is
    saved by rank 0, as ``Trainer`` does; random states are saved by each rank.
    """
    args = trainer.args
    is_first = args.process_index == 0
    state: dict[str, Any] = {"step": trainer.state.global_step}
    # DeepSpeed saves them.
    if not trainer.is_deepspeed_enabled:
        state["model"] = model_state(trainer.model)
    if "model" in state and not is_first:
        parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
        # In place, because all ranks need the same class of dict.
        for name in state["model"].keys() - parameters.keys():
            del state["model"][name]
    if not args.save_only_model:
        if not trainer.is_deepspeed_enabled:
            state["optimizer"] = optimizer_state(trainer)
        states = rng.states()
        key = rng.rank_key(args.process_index)
        state["rng"] = states if args.world_size == 1 else {key: states}
        if is_first:
            scaler = trainer.accelerator.scaler
            if not _has_deepspeeds_scheduler(trainer):
                state["scheduler"] = trainer.lr_scheduler.state_dict()
            state["scaler"] = None if scaler is None else scaler.state_dict()
    if is_first:
        # As bytes, because it grows with the log, and then only the new part is written.
        state["trainer_state"] = np.frombuffer(_trainer_state(trainer).encode(), dtype=np.uint8)
    return state


def restore_random_states(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Set the random generators to those of this rank in a step."""
    if saved.get("rng") is not None:
        rng.restore_rank(saved["rng"], trainer.args.process_index)


def load_optimizer(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Load the optimizer and the scheduler of a step, if it has them."""
    if trainer.is_deepspeed_enabled:
        if "scheduler" in saved:
            trainer.lr_scheduler.load_state_dict(saved["scheduler"])
        return
    if "optimizer" not in saved:
        log.warning(
            "step %d was saved with save_only_model=True, so the optimizer begins anew",
            saved["step"],
        )
        return
    optimizer = saved["optimizer"]
    if trainer.is_fsdp_enabled or any(isinstance(name, str) for name in optimizer["state"]):
        set_optimizer_state_dict(trainer.model, trainer.optimizer, optimizer)
    else:
        trainer.optimizer.load_state_dict(optimizer)
    trainer.lr_scheduler.load_state_dict(saved["scheduler"])


def optimizer_state(trainer: Any) -> dict[str, Any]:
    """Return the optimizer's state: under FSDP by names of parameters, otherwise by numbers.

    Numbers are what optimizers know. Names let any number of ranks, also one, load what is sharded.
    """
    if trainer.is_fsdp_enabled:
        by_name: dict[str, Any] = get_optimizer_state_dict(trainer.model, trainer.optimizer)
        return by_name
    by_number: dict[str, Any] = trainer.optimizer.state_dict()
    return by_number


def shards_of(trainer: Any, *, optimizer: bool) -> dict[str, Any]:
    """Return this rank's shards of weights and optimizer, to be filled from a step."""
    shards: dict[str, Any] = {"model": model_state(trainer.model)}
    if optimizer:
        shards["optimizer"] = optimizer_state(trainer)
    return shards


def export_callbacks(trainer: Any) -> None:
    """Take the states of callbacks into the trainer's, as ``Trainer`` does before it is written."""
    from transformers.trainer_callback import ExportableState

    state = trainer.state
    for exported in (*trainer.callback_handler.callbacks, trainer.control):
        if not isinstance(exported, ExportableState):
            continue
        states = state.stateful_callbacks[type(exported).__name__]
        if isinstance(states, list):
            states.append(exported.state())
        else:
            state.stateful_callbacks[type(exported).__name__] = exported.state()


def best_step(trainer: Any) -> int | None:
    """Return the step of the best checkpoint, if the trainer knows one."""
    path = trainer.state.best_model_checkpoint
    number = "" if path is None else Path(path).name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def model_state(model: torch.nn.Module) -> dict[str, Any]:
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


def load_model(model: torch.nn.Module, saved: Mapping[str, Any], step: int) -> None:
    """Load the weights of a step.

    Raises:
        TreeMismatch: The step has other names.
    """
    expected = model_state(model)
    for name in sorted(expected.keys() ^ saved.keys()):
        holder, counterpart = (
            ("the model", f"step {step}") if name in expected else (f"step {step}", "the model")
        )
        raise TreeMismatch(
            f"{name!r} of {holder} is not in {counterpart}; the run was begun with another model"
        )
    # Without the frozen parameters of a PEFT model a strict load would fail.
    model.load_state_dict(saved, strict=len(expected) == len(model.state_dict()))


def last_numbers(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the numbers of the last entry of the log, to keep with the step."""
    last = history[-1] if history else {}
    return {
        name: float(v)
        for name, v in last.items()
        if isinstance(v, int | float) and math.isfinite(v) and name != "step"
    }


def _has_deepspeeds_scheduler(trainer: Any) -> bool:
    """Return ``True`` if DeepSpeed drives the scheduler, and saves it."""
    if not trainer.is_deepspeed_enabled:
        return False
    from accelerate.utils import DeepSpeedSchedulerWrapper  # only if DeepSpeed is installed

    return isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper)


def _trainer_state(trainer: Any) -> str:
    return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"
