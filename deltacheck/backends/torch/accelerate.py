"""Save and restore everything that a Hugging Face ``Accelerator`` has prepared.

Replace ``accelerator.save_state(folder)`` by ``engine.save(step, state_of(accelerator))``, and
``load_state`` by ``load_state(accelerator, engine.restore())``.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler

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
    checkpointing, the random states, and the positions of data loaders that have one
    (``DataLoaderConfiguration(use_stateful_dataloader=True)``). For other loaders, save the
    position of ``ResumableLoader(accelerator.prepare(loader))`` beside it.

    Args:
        accelerator: The accelerator.

    Returns:
        The nested state.

    Raises:
        ValueError: The training has more than one process, or a loader with a position has a random
            order that is not part of it.
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
    state["loaders"] = {
        number: _position(loader) for number, loader in _positioned(accelerator).items()
    }
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
        TreeMismatch: The accelerator has another number of models, optimizers or other objects, or
            of data loaders with a position.
    """
    for part in _PARTS:
        prepared = _prepared(accelerator, part)
        if len(prepared) != len(state[part]):
            raise TreeMismatch(
                f"the checkpoint has {len(state[part])} {part}, the accelerator has {len(prepared)}"
            )
    # Steps of before have none, and then the loaders begin anew.
    loaders, positioned = state.get("loaders", {}), _positioned(accelerator)
    if loaders and loaders.keys() != positioned.keys():
        raise TreeMismatch(
            f"the checkpoint has positions of {len(loaders)} data loaders, the accelerator has"
            f" {len(positioned)} that take one: prepare the same loaders, with"
            " DataLoaderConfiguration(use_stateful_dataloader=True)"
        )
    # In a loop of its own, after all counts were checked: a mismatch leaves every object as it was.
    for part in _PARTS:
        for number, item in enumerate(_prepared(accelerator, part)):
            item.load_state_dict(state[part][str(number)])
    # A run may continue in another precision, in which there is no scaler.
    if state["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    for number, saved in loaders.items():
        positioned[number].load_state_dict(saved["position"])
        # Accelerate's own files lack it.
        positioned[number].iteration = saved["iteration"]
    accelerator.step = state["step"]
    # Last, so that nothing that is loaded before draws from the restored generators.
    rng.restore(state["rng"])


def _prepared(accelerator: Any, part: str) -> list[Any]:
    name = "_custom_objects" if part == "custom" else f"_{part}"
    objects: list[Any] = getattr(accelerator, name)
    return objects


def _positioned(accelerator: Any) -> dict[str, Any]:
    """Return the loaders that are part of the state, by their number."""
    return {
        str(number): loader
        for number, loader in enumerate(accelerator._dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }


def _position(loader: Any) -> dict[str, Any]:
    # Such a loader continues by skipping, in an order that a RandomSampler then draws anew.
    if type(getattr(loader.batch_sampler, "sampler", None)) is RandomSampler:
        raise ValueError(
            "the random order of a StatefulDataLoader under Accelerate is not part of its state, so"
            " samples would be skipped and repeated: use DataLoaderConfiguration("
            "use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=...)"
        )
    position = loader.state_dict()
    # The number of the epoch, by which samplers are seeded. Accelerate counts it after the loop.
    has_ended = bool(position.get("_iterator_finished"))
    return {"position": position, "iteration": loader.iteration + has_ended}
