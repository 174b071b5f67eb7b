"""Save and restore everything that a Hugging Face ``Accelerator`` has prepared.

Replace ``accelerator.save_state(folder)`` by ``engine.save(step, state_of(accelerator))``, and
``load_state`` by ``load_state(accelerator, engine.restore())``.
"""

from __future__ import annotations

from typing import Any

from deltacheck.backends.torch.state import rng
from deltacheck.errors import TreeMismatch
from deltacheck.leaf.external_errors import typed

# The keys of the saved tree. An accelerator holds these objects in private lists, in the order in
# which they were prepared or registered.
_PARTS = ("models", "optimizers", "schedulers", "custom")


@typed
def state_of(accelerator: Any) -> dict[str, Any]:
    """Return the state of everything that the accelerator has prepared, for ``Engine.save``.

    It has models, optimizers, schedulers, the gradient scaler, the objects registered for
    checkpointing and the random states. It does not have the data loaders. For the same order of
    data after a resume, use ``DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...)``,
    ``loader.set_epoch(epoch)`` before each epoch, and ``accelerator.skip_first_batches`` within
    one. A loader draws a number from torch's generator when it starts. Therefore numbers drawn
    after a resume are the same only from the end of an epoch on, as with
    ``accelerator.load_state``.

    Args:
        accelerator: The accelerator.

    Returns:
        The nested state.

    Raises:
        ValueError: The training has more than one process.
    """
    if accelerator.num_processes > 1:
        raise ValueError(
            f"a training of {accelerator.num_processes} processes cannot be saved whole from one of"
            " them"
        )
    state: dict[str, Any] = {
        part: {
            str(number): item.state_dict()
            for number, item in enumerate(_prepared(accelerator, part))
        }
        for part in _PARTS
    }
    state["scaler"] = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    state["step"] = accelerator.step
    state["rng"] = rng.states()
    return state


@typed
def load_state(accelerator: Any, state: dict[str, Any]) -> None:
    """Load a state into everything that the accelerator has prepared.

    Models, optimizers and so on must be prepared and registered in the same order as at the save.

    Args:
        accelerator: The accelerator.
        state: The state that ``engine.restore()`` returned.

    Raises:
        TreeMismatch: The accelerator has another number of models, optimizers or other objects.
    """
    for part in _PARTS:
        prepared = _prepared(accelerator, part)
        if len(prepared) != len(state[part]):
            raise TreeMismatch(
                f"the checkpoint has {len(state[part])} {part}, the accelerator has {len(prepared)}"
            )
    # In a loop of its own, after all counts were checked: a mismatch leaves every object as it was.
    for part in _PARTS:
        for number, item in enumerate(_prepared(accelerator, part)):
            item.load_state_dict(state[part][str(number)])
    # A run may continue in another precision, in which there is no scaler.
    if state["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.step = state["step"]
    # Last, so that nothing that is loaded before draws from the restored generators.
    rng.restore(state["rng"])


def _prepared(accelerator: Any, part: str) -> list[Any]:
    name = "_custom_objects" if part == "custom" else f"_{part}"
    objects: list[Any] = getattr(accelerator, name)
    return objects
