"""Save and resume a ``Trainer`` whose model DeepSpeed shards, with one step for both.

DeepSpeed's checkpoint engine of ``deltacheck.backends.torch.deepspeed`` saves weights and
optimizer. What the trainer itself would write lies beside them in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deltacheck.backends.torch.deepspeed.checkpoint_engine import attach
from deltacheck.backends.torch.deepspeed.configuration import engine_options
from deltacheck.backends.torch.deepspeed.publishing import PublishingEngine, write_pointers
from deltacheck.backends.torch.deepspeed.saved_state import TRAINER, TrainerPart
from deltacheck.backends.torch.engine import Engine
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest


class UnpublishedEngine(PublishingEngine):
    """An engine of ranks that DeepSpeed saves through, without folders of pointers."""

    def _publish(self, manifest: Manifest) -> None:
        """Leave the folders of the trainer as they are: it resumes from the root."""


class ZeroTraining:
    """The DeepSpeed engine of a trainer, while ``train`` runs.

    Args:
        engine: The engine that saves.
        options: The options that it was opened with, without the process group.
    """

    key = TRAINER  # of the steps' trees

    def __init__(self, engine: UnpublishedEngine, options: Mapping[str, Any]) -> None:
        self._engine = engine
        self._options = options
        self._attached: Any = None

    @classmethod
    def opened(
        cls, trainer: Any, folder: Place | None, default: Path, options: Mapping[str, Any]
    ) -> tuple[Engine, ZeroTraining]:
        """Open the engine of a trainer, with the options of DeepSpeed's configuration, too.

        Args:
            trainer: The trainer.
            folder: The root; ``None``: that of DeepSpeed's configuration.
            default: The root if neither has one.
            options: Options of ``Engine``, which precede those of the configuration.

        Raises:
            ValueError: An option is unknown or not supported.
            StorageFailed: The root is not local.
        """
        configuration = trainer.args.hf_deepspeed_config.config
        merged = engine_options(configuration, options)
        configured = merged.pop("root", None)
        root = storage.local(folder or configured or default, "a Trainer with DeepSpeed")
        engine = UnpublishedEngine(root, process_group=dist.group.WORLD, **merged)
        return engine, cls(engine, merged)

    def prepare(self, trainer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``accelerator.prepare``, and let the DeepSpeed engine that it makes save here.

        Raises:
            ValueError: As ``attach`` raises it.
        """
        result = inner(*args, **kwargs)
        wrapped = trainer.accelerator.deepspeed_engine_wrapped
        if wrapped is not None and wrapped.engine is not self._attached:
            checkpoints = attach(wrapped.engine, root=self._engine.folder, **self._options)
            checkpoints.use(self._engine)
            self._attached = wrapped.engine
        return result

    def save(
        self, trainer: Any, state: Mapping[str, Any], metrics: Mapping[str, float], folder: Path
    ) -> None:
        """Save a step with what the trainer keeps beside the model.

        Args:
            trainer: The trainer.
            state: The state of this rank beside that of DeepSpeed.
            metrics: Numbers to keep with the step.
            folder: The folder of the checkpoint, to which DeepSpeed copies scripts.
        """
        checkpoints = self._attached.checkpoint_engine
        step = trainer.state.global_step
        checkpoints.trainer_part = TrainerPart(step, state, metrics)
        # As Trainer: the base model has the frozen parameters.
        partly = (
            {"exclude_frozen_parameters": True} if hasattr(trainer.model, "peft_config") else {}
        )
        try:
            trainer.model_wrapped.save_checkpoint(str(folder), tag=f"global_step{step}", **partly)
        finally:
            checkpoints.trainer_part = None

    def write_pointers(self, manifest: Manifest, folder: Path) -> None:
        """Let DeepSpeed load a step from a folder."""
        write_pointers(self._engine.folder, manifest, folder, latest=True)
