"""Hugging Face Accelerate: all that an ``Accelerator`` has prepared, as one state for
``Engine.save``,
and back.

Where ``accelerator.save_state(folder)`` stood, ``engine.save(step, state_of(accelerator))``; where
``load_state`` stood, ``load_state(accelerator, engine.restore())``.
"""

from __future__ import annotations

from typing import Any

from deltacheck.backends.torch.state import rng
from deltacheck.errors import TreeMismatch

_PARTS = ("models", "optimizers", "schedulers", "custom")


def state_of(accelerator: Any) -> dict[str, Any]:
    """Models, optimizers, schedulers, gradient scaler, what was registered for checkpointing, and
    random states.

    Not the data loaders. For the same order after a resume:
    ``DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...)``,
    ``loader.set_epoch(epoch)`` before each epoch, and within one
    ``accelerator.skip_first_batches``. A loader draws a number from torch's generator when it
    starts, so that what is drawn after a resume is the same only from the end of an epoch on; it is
    so with ``accelerator.load_state``, too.

    Raises ``ValueError`` for trainings of more than one process.
    """
    if accelerator.num_processes > 1:
        raise ValueError(
            f"a training of {accelerator.num_processes} processes cannot be saved whole from one of"
            " them"
        )
    state: dict[str, Any] = {
        part: {str(number): one.state_dict() for number, one in enumerate(_of(accelerator, part))}
        for part in _PARTS
    }
    state["scaler"] = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    state["step"] = accelerator.step
    state["rng"] = rng.states()
    return state


def load_state(accelerator: Any, state: dict[str, Any]) -> None:
    """Put everything back. REQUIRES: prepared and registered in the same order as at the save.
    Raises ``TreeMismatch`` where it is not.
    """
    for part in _PARTS:
        mine = _of(accelerator, part)
        if len(mine) != len(state[part]):
            raise TreeMismatch(
                f"the checkpoint has {len(state[part])} {part}, the accelerator has {len(mine)}"
            )
    for part in _PARTS:
        for number, one in enumerate(_of(accelerator, part)):
            one.load_state_dict(state[part][str(number)])
    if state["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["step"]
    rng.restore(state["rng"])


def _of(accelerator: Any, part: str) -> list[Any]:
    found: list[Any] = getattr(accelerator, "_custom_objects" if part == "custom" else f"_{part}")
    return found
