"""A checkpoint manager for torchtitan, with its steps in a root of deltacheck.

This needs torchtitan 0.3 or newer.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from deltacheck import reader
from deltacheck.backends.torch.dcp.names import is_step, step_of
from deltacheck.backends.torch.dcp.storage_reader import DeltaStorageReader
from deltacheck.backends.torch.dcp.storage_writer import DeltaStorageWriter
from deltacheck.errors import NotACheckpointRoot
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Keep
from deltacheck.save.save_options import SaveOptions


@typed
class DeltaCheckpointManager(CheckpointManager):  # type: ignore[misc] # untyped
    """torchtitan's checkpoint manager, which saves each step as changes to the one before.

    Put ``DeltaCheckpointManager.Config(...)`` into the trainer's config in the place of
    ``CheckpointManager.Config(...)``. The root is in the checkpoint folder, beside a directory
    ``step-N`` for each step, which is empty. Hugging Face exports and initial loads of other
    formats are torchtitan's own.

    Args:
        config: The section of the trainer's config.
        **components: The parts of the trainer, as in ``CheckpointManager``.

    Raises:
        ValueError: The folder is remote, or an option has a value that it cannot have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc] # untyped
        """The config section: torchtitan's fields, and options of ``DeltaStorageWriter``.

        Attributes:
            root: The name of the root in the checkpoint folder.
            save_options: The memory, the durability and the checks of saves.
            keep_every: Keep the steps that this number divides besides the newest
                ``keep_latest_k``; 0: none. Smaller: more history; larger: less disk space.
        """

        root: str = "deltacheck"
        save_options: SaveOptions = field(default_factory=SaveOptions)
        keep_every: int = 0

    def __init__(self, config: Config, **components: Any) -> None:
        if config.enable:
            folder = filesystem.join(components.get("base_folder", ""), config.folder)
            if filesystem.is_remote(folder):
                raise ValueError(
                    f"checkpoint.folder {folder} is remote: use a local or shared directory, or"
                    " torchtitan's CheckpointManager"
                )
        super().__init__(config, **components)
        self._name = config.root
        self._options: dict[str, Any] = {
            "keep": Keep(last=config.keep_latest_k or None, every=config.keep_every or None),
            "options": config.save_options,
        }
        if config.enable and not config.load_only:
            # Wrong values are refused before the first step, not at the first save.
            DeltaStorageWriter(self._root(), **self._options)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | AsyncSaveResponse | None:
        """Save to the root. torchtitan's ``save`` calls this.

        Args:
            state_dict: The state.
            checkpoint_id: The directory of the step.
            async_mode: ``ASYNC``: copy the state to the host, and write it while training goes on;
                ``ASYNC_WITH_PINNED_MEM``: copy it meanwhile, too.
            enable_garbage_collection: Collect garbage afterwards.
            to_hf: ``True``: torchtitan writes a folder of Hugging Face, and nothing to the root.

        Returns:
            ``None``, or a future if the save is asynchronous.
        """
        if to_hf:
            exported: Future[None] | AsyncSaveResponse | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return exported
        # torchtitan removes the oldest directories, and looks for one before it loads a step.
        os.makedirs(checkpoint_id, exist_ok=True)
        arguments: dict[str, Any] = {
            "checkpoint_id": checkpoint_id,
            "storage_writer": DeltaStorageWriter(self._root(), **self._options),
        }
        result: Future[None] | AsyncSaveResponse | None = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, **arguments)
        else:
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                # By a thread, not a process as in torchtitan: a process would hold the root when
                # the last step is saved.
                arguments["async_stager"] = self.stager
            result = dcp.async_save(state_dict, process_group=self.pg, **arguments)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load from a root, or what torchtitan's own manager has saved. ``load`` calls this.

        Args:
            state_dict: The state to fill.
            checkpoint_id: The directory of the step. Its root is beside it.
            from_hf: ``True``: torchtitan reads a folder of Hugging Face.
            from_quantized: ``True``: that folder is quantized.

        Raises:
            FileNotFoundError: Neither the root nor the directory has the step.
        """
        if from_hf or not self._has(checkpoint_id):
            steps = _steps(self._root(checkpoint_id))
            if not from_hf and steps and not Path(checkpoint_id, ".metadata").exists():
                # The retention has removed the step, or a save of it was killed.
                raise FileNotFoundError(
                    f"--checkpoint.load_step={step_of(checkpoint_id)} not found: {checkpoint_id} is"
                    f" empty, and {self._root(checkpoint_id)} has steps {steps}"
                )
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        root = self._root(checkpoint_id)
        # Kept for the next save, which then writes changes. A run that starts from another run's
        # step writes to another root.
        resume = not self.load_only and root == self._root()
        dcp.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=DeltaStorageReader(root, resume=resume),
        )
        # Its tensors are at the top level of the state, so DCP has not called it.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            self._make_directory(step)
        return bool(super()._load(step))

    def _find_load_step(self, folder: str = "") -> int:
        # The root decides: a directory may be of a save that was killed.
        own: int = super()._find_load_step(folder)
        newest = max(
            _steps(self._root(filesystem.join(folder or self.folder, "step-0"))), default=-1
        )
        if newest > own:
            self._make_directory(newest, folder)
        return max(own, newest)

    def _make_directory(self, step: int, folder: str = "") -> None:
        """Create the directory of a step, which torchtitan looks for, if the root has the step."""
        checkpoint_id = self._create_checkpoint_id(step, folder)
        if self._has(checkpoint_id):
            os.makedirs(checkpoint_id, exist_ok=True)

    def _root(self, checkpoint_id: str = "") -> Path:
        """Return the root of a step's directory, by default of this run."""
        folder = Path(checkpoint_id).parent if checkpoint_id else Path(self.folder)
        return folder / self._name

    def _has(self, checkpoint_id: str) -> bool:
        return is_step(checkpoint_id) and step_of(checkpoint_id) in _steps(
            self._root(checkpoint_id)
        )


def _steps(root: Path) -> list[int]:
    try:
        return reader.open(root).steps()
    except NotACheckpointRoot:
        return []
