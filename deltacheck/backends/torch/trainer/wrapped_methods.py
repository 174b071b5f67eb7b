"""Let a callback replace what ``Trainer`` does when it saves and loads checkpoints.

A callback learns when a checkpoint is due, but it neither knows the trainer nor can it replace the
checkpoint. Therefore methods of the class ``Trainer`` are wrapped, once. A trainer without the
callback behaves as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from transformers import Trainer

# The wrapped methods are not public, so the message names a version that has them.
_TESTED_VERSION = "5.23.0"  # of transformers

METHODS = (
    "train",
    "_run_epoch",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
# Methods that a subclass may replace without calling that of Trainer, by its package. They load
# nothing but what a step has (random states in Axolotl, weights), from files that it does not have,
# so that the callback's own take their place.
_REPLACEABLE = {
    "": ("_load_rng_state",),
    "sentence_transformers": ("_load_from_checkpoint", "_load_best_model"),
}
# Called for each step that is logged, evaluated or saved: what it calls may write to a checkpoint.
LAST_METHOD = "_maybe_log_save_evaluate"


def install(callback: type) -> None:
    """Wrap the methods of ``Trainer``, once.

    Args:
        callback: The class with the replacements, under the same names with one ``_`` in front.

    Raises:
        ImportError: This version of transformers lacks a method.
    """
    kind: Any = Trainer
    # A second wrapper around the first would open the root twice.
    if getattr(kind.train, "_deltacheck", False):
        return
    missing = [name for name in (*METHODS, LAST_METHOD) if not callable(getattr(kind, name, None))]
    if missing:
        raise ImportError(
            f"this version of transformers has no Trainer.{missing[0]}, by which DeltaCheckCallback"
            f" saves and resumes; {_TESTED_VERSION} has"
        )
    for name in METHODS:
        replacement = getattr(callback, name if name.startswith("_") else f"_{name}")
        setattr(kind, name, _routed(getattr(kind, name), replacement, callback))


def _routed(
    original: Callable[..., Any], replacement: Callable[..., Any], callback: type
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call, because callbacks may be added and removed during a training.
        callbacks = [c for c in trainer.callback_handler.callbacks if isinstance(c, callback)]
        if not callbacks:
            return original(trainer, *args, **kwargs)
        return replacement(callbacks[0], original, trainer, *args, **kwargs)

    method._deltacheck = True  # type: ignore[attr-defined]
    return method


@contextlib.contextmanager
def replaced(owner: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of one object for a while.

    Args:
        owner: The object.
        methods: The replacements by name. Each is called with the method of the class, bound, and
            the arguments.
    """
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, method in methods.items():
        setattr(owner, name, functools.partial(method, getattr(owner, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(owner, name)
        vars(owner).update(before)


def refuse_unsupported(trainer: Any, trial: object) -> None:
    """Raise ``ValueError`` for trainings that would not be saved whole.

    Args:
        trainer: The trainer.
        trial: The trial of a hyperparameter search; ``None``: there is none.
    """
    args = trainer.args
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = {name: getattr(parallelism, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp")}
    # Each of these would save only a part of the state, and the loss would show at the resume.
    for is_used, feature, remedy in (
        (
            trial is not None,
            "a hyperparameter search",
            "leave the callback out, and give it to the run with what was found",
        ),
        (
            trainer.is_deepspeed_enabled and args.save_only_model,
            "only the model of DeepSpeed (save_only_model=True)",
            "leave that out; deltacheck export takes the weights out of a step",
        ),
        (
            trainer.is_fsdp_xla_enabled
            or (trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2),
            "a model that FSDP1 or XLA shards",
            'use FSDP2: fsdp_config={"version": 2}, or fsdp_version: 2 in the file of accelerate',
        ),
        (
            getattr(trainer, "is_distributed_loading_by_transformers", False),
            "a model that is sharded at load time (tensor parallelism)",
            "use DDP, or a loop of your own with an Engine",
        ),
        (
            max(sizes.values()) > 1,
            f"tensor, context or sequence parallelism ({sizes})",
            "use DDP, or a loop of your own with an Engine",
        ),
        (
            args.world_size > 1 and not dist.is_initialized(),
            f"{args.world_size} processes without torch.distributed (XLA, SageMaker)",
            "start them with torchrun or accelerate launch",
        ),
        (
            args.world_size > 1 and args.save_on_each_node,
            "save_on_each_node=True, since all processes write one root",
            "leave it out, with an output_dir that all nodes share",
        ),
    ):
        if is_used:
            raise ValueError(f"DeltaCheckCallback cannot save {feature}; {remedy}")
    _refuse_overrides(type(trainer))


def _refuse_overrides(kind: type) -> None:
    """Raise ``ValueError`` if a subclass replaces a method without calling that of ``Trainer``."""
    replaceable = replaceable_methods(kind)
    for name in METHODS:
        parent = overriding_class(kind, name)
        if parent is not None and name not in replaceable:
            raise ValueError(
                f"DeltaCheckCallback cannot save a {kind.__qualname__}: its"
                f" {parent.__qualname__}.{name} does not call Trainer.{name}, by which the callback"
                " saves and resumes. Call it there, or leave the callback out and let an Engine"
                " save in that method"
            )


def replaceable_methods(kind: type) -> list[str]:
    """Return the methods of a subclass that the callback's own take the place of.

    Args:
        kind: The class of a trainer.
    """
    return [
        name
        for package, names in _REPLACEABLE.items()
        for name in names
        if (parent := overriding_class(kind, name)) is not None
        and package in ("", parent.__module__.partition(".")[0])
    ]


def overriding_class(kind: type, name: str) -> type | None:
    """Return the class that replaces a method without calling that of ``Trainer``, if one does.

    Args:
        kind: The class of a trainer.
        name: The method.
    """
    for parent in kind.__mro__[: kind.__mro__.index(Trainer)]:
        method = inspect.unwrap(vars(parent).get(name, _calls_nothing))
        code = getattr(method, "__code__", None)
        if method is not _calls_nothing and code is not None and name not in code.co_names:
            return parent
    return None


def _calls_nothing() -> None:
    """Stand for a method that a class does not define."""
