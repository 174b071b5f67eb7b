"""Save and restore everything that a Hugging Face ``Accelerator`` has prepared.

Replace ``accelerator.save_state(folder)`` by ``engine.save(step, state_of(accelerator))``, and
``load_state`` by ``load_state(accelerator, engine.restore())``. Several processes under DDP make
the same calls, with ``Engine(root, process_group=...)``.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler

from deltacheck.backends.torch.state import rng
from deltacheck.errors import TreeMismatch
from deltacheck.leaf.external_errors import typed

# The keys of the saved tree. An accelerator holds these objects in private lists, in the order in
# which they were prepared or registered.
_PARTS = ("models", "optimizers", "schedulers", "custom")
_REPLICATED = ("models", "optimizers")  # every process has them, and they are equal


@typed
def state_of(accelerator: Any) -> dict[str, Any]:
    """Return the state of everything that the accelerator has prepared, for ``Engine.save``.

    It has models, optimizers, schedulers, the gradient scaler, the objects registered for
    checkpointing, the random states, and the positions of data loaders that have one
    (``DataLoaderConfiguration(use_stateful_dataloader=True)``). For other loaders, save the
    position of ``ResumableLoader(accelerator.prepare(loader))`` beside it.

    Of several processes, all have parameters and optimizers, and each has its random states and
    positions of loaders. What else may differ is that of the first, as in Accelerate's own files.

    Args:
        accelerator: The accelerator.

    Returns:
        The nested state.

    Raises:
        ValueError: The processes share their model by another way than DDP, or a loader with a
            position has a random order that is not part of it.
    """
    if not _can_save(accelerator):
        raise ValueError(
            f"a training of the type {accelerator.distributed_type.value} is not DDP, and may have"
            " other parts on each process: save model and optimizer with Engine(root,"
            " process_group=...), or for DEEPSPEED with"
            " deltacheck.backends.torch.deepspeed.install()"
        )
    is_first = accelerator.process_index == 0
    # What only the first process has is left out by the others, whose values may differ.
    state: dict[str, Any] = {
        part: {
            str(number): _module_of(item).state_dict()
            for number, item in enumerate(_prepared(accelerator, part))
        }
        for part in (_PARTS if is_first else _REPLICATED)
    }
    if is_first:
        state["scaler"] = None if accelerator.scaler is None else accelerator.scaler.state_dict()
        state["step"] = accelerator.step
    else:
        _remove_buffers(accelerator, state["models"])
    own = {
        "loaders": {key: _position(loader) for key, loader in _positioned(accelerator).items()},
        "rng": rng.states(),
    }
    if accelerator.num_processes > 1:
        own = {key: {rng.rank_key(accelerator.process_index): v} for key, v in own.items()}
    return state | own


@typed
def load_state(accelerator: Any, state: dict[str, Any]) -> None:
    """Load a state into everything that the accelerator has prepared.

    Models, optimizers and so on must be prepared and registered in the same order as at the save.

    Args:
        accelerator: The accelerator.
        state: The state that ``engine.restore()`` returned.

    Raises:
        TreeMismatch: The accelerator has another number of models, optimizers or other objects, or
            of data loaders with a position, or of processes that have one.
    """
    for part in _PARTS:
        prepared = _prepared(accelerator, part)
        if len(prepared) != len(state[part]):
            raise TreeMismatch(
                f"the checkpoint has {len(state[part])} {part}, the accelerator has {len(prepared)}"
            )
    # Steps of before have none, and then the loaders begin anew.
    loaders, positioned = _own_loaders(accelerator, state), _positioned(accelerator)
    if loaders and loaders.keys() != positioned.keys():
        raise TreeMismatch(
            f"the checkpoint has positions of {len(loaders)} data loaders, the accelerator has"
            f" {len(positioned)} that take one: prepare the same loaders, with"
            " DataLoaderConfiguration(use_stateful_dataloader=True)"
        )
    # In a loop of its own, after all counts were checked: a mismatch leaves every object as it was.
    for part in _PARTS:
        for number, item in enumerate(_prepared(accelerator, part)):
            _module_of(item).load_state_dict(state[part][str(number)])
    # A run may continue in another precision, in which there is no scaler.
    if state["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    for key, saved in loaders.items():
        positioned[key].load_state_dict(saved["position"])
        # Accelerate's own files lack it.
        positioned[key].iteration = saved["iteration"]
    accelerator.step = state["step"]
    # Last, so that nothing that is loaded before draws from the restored generators.
    rng.restore_rank(state["rng"], accelerator.process_index)


def _can_save(accelerator: Any) -> bool:
    """Return whether every process has the whole model: it is alone, or they use DDP."""
    kind: str = accelerator.distributed_type.value
    return bool(accelerator.num_processes == 1) or kind.startswith("MULTI_")


def _prepared(accelerator: Any, part: str) -> list[Any]:
    name = "_custom_objects" if part == "custom" else f"_{part}"
    objects: list[Any] = getattr(accelerator, name)
    return objects


def _module_of(item: Any) -> Any:
    # Without the names of the wrapper, any number of processes loads the step.
    return item.module if isinstance(item, DistributedDataParallel) else item


def _remove_buffers(accelerator: Any, states: dict[str, Any]) -> None:
    """Remove what is no parameter, in place: all processes need the same class of dict."""
    for item, state in zip(accelerator._models, states.values(), strict=True):
        parameters = dict(_module_of(item).named_parameters(remove_duplicate=False))
        for name in state.keys() - parameters.keys():
            del state[name]


def _own_loaders(accelerator: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the saved positions of this process."""
    loaders = state.get("loaders", {})
    of_ranks = loaders if rng.rank_key(0) in loaders else {rng.rank_key(0): loaders}
    if any(of_ranks.values()) and len(of_ranks) != accelerator.num_processes:
        raise TreeMismatch(
            f"the checkpoint has the positions of data loaders of {len(of_ranks)} processes, and"
            f" {accelerator.num_processes} have other batches: start {len(of_ranks)}, or begin the"
            " epoch anew without the positions, del state['loaders']"
        )
    own: dict[str, Any] = of_ranks.get(rng.rank_key(accelerator.process_index), {})
    return own


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
