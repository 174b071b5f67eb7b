"""Strategies of Megatron-Core's ``dist_checkpointing`` over deltacheck's DCP storage.

This needs ``megatron.core`` 0.16 or newer. Megatron keeps its common part (numbers, arguments) in
``common.pt`` and ``metadata.json`` in the directory of the step. The root holds the tensors and
objects of all steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.state_dict_saver import save

from deltacheck.backends.torch.dcp import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.dcp.names import step_of
from deltacheck.leaf.external_errors import typed

# Megatron's factory of readers is a global of its module, so only one load at a time may replace
# it. Reentrant, because one loading method may call another.
_reading = threading.RLock()


@typed
class DeltaSaveStrategy(mcore.TorchDistSaveShardedStrategy):  # type: ignore[misc] # untyped
    """Saves with ``dist_checkpointing.save(..., sharded_strategy=DeltaSaveStrategy(root))``.

    Each save writes the changes since the one before. The step is the number that the directory
    ends in (``iter_0001200``). With ``async_sharded_save=True`` the tensors are copied to the host
    first, and written by a thread of this process, for which the finalization waits. (Megatron's
    own writers fork a process, which could not keep the copy that the next save is compared with.)

    Args:
        root: The root, as in ``DeltaStorageWriter``.
        **options: Options of ``DeltaStorageWriter``.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        # Megatron writes this name and version to ``metadata.json``, and chooses its loader by
        # them.
        super().__init__("torch_dist", 1)
        self._root = root
        self._options = options
        self._group: dist.ProcessGroup | None = None
        # One thread, because the saves of one stream must not overlap.
        self._thread = ThreadPoolExecutor(1, "deltacheck-megatron")

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save, and return when the step exists.

        Args:
            sharded_state_dict: The state with Megatron's descriptors.
            checkpoint_dir: The directory of the step.
        """
        self._save(self._pytorch_state(sharded_state_dict, copied=False), checkpoint_dir)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Begin to save.

        Args:
            sharded_state_dict: The state with Megatron's descriptors.
            checkpoint_dir: The directory of the step.

        Returns:
            A request without a function to fork for. Its finalization raises the error of a failed
            save.
        """
        # Copied on this thread, because training changes the tensors as soon as this returns.
        state = self._pytorch_state(sharded_state_dict, copied=True)
        future: Future[None] = self._thread.submit(self._save, state, checkpoint_dir)
        return AsyncRequest(None, (), [future.result])

    def _pytorch_state(self, sharded_state_dict: dict[str, Any], copied: bool) -> dict[str, Any]:
        if self._group is None:  # apart from the training's collectives; every rank calls this
            self._group = dist.new_group(backend="gloo")
        by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        if copied:
            by_key = {key: [_copy(shard) for shard in shards] for key, shards in by_key.items()}
        state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(by_key, False)
        return state

    def _save(self, state: dict[str, Any], checkpoint_dir: str | Path) -> None:
        save(
            state,
            checkpoint_id=str(checkpoint_dir),
            storage_writer=DeltaStorageWriter(self._root, **self._options),
            # Megatron's keys are flat already.
            planner=mcore.MCoreSavePlanner(flatten_state_dict=False),
            process_group=self._group,
        )


@typed
class DeltaLoadStrategy(mcore.TorchDistLoadShardedStrategy):  # type: ignore[misc] # untyped
    """Loads with ``dist_checkpointing.load(..., sharded_strategy=DeltaLoadStrategy(root))``.

    Any parallelism may load a step. The step is the number that the directory ends in. Some of
    Megatron's objects (NumPy's random states, for example) need ``allow_pickle=True``, or their
    classes ``torch.serialization.add_safe_globals``.

    Args:
        root: The root, as in ``DeltaStorageReader``.
        **options: Options of ``DeltaStorageReader``.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._root = root
        self._options = options

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Fill the tensors of the descriptors, and return the state.

        Args:
            sharded_state_dict: The state with Megatron's descriptors.
            checkpoint_dir: The directory of the step.

        Returns:
            The state.
        """
        with self._from(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Return the tensors of the step as descriptors without data.

        Args:
            checkpoint_dir: The directory of the step.
            metadata: Not used.

        Returns:
            The descriptors by key.
        """
        with self._from(checkpoint_dir):
            return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the tensors and objects of the step as descriptors without data.

        Args:
            checkpoint_dir: The directory of the step.

        Returns:
            The descriptors by key.
        """
        with self._from(checkpoint_dir):
            return super().load_sharded_metadata(checkpoint_dir)

    @contextlib.contextmanager
    def _from(self, checkpoint_dir: str | Path) -> Iterator[None]:
        """Make Megatron's loader read from the root, inside the context.

        It has no parameter for a reader.
        """
        # Opened outside of the lock, because opening a root may wait for the storage.
        reader = DeltaStorageReader(self._root, step_of(str(checkpoint_dir)), **self._options)
        with _reading:
            before, mcore._get_filesystem_reader = (
                mcore._get_filesystem_reader,
                lambda *args, **kwargs: reader,
            )
            try:
                yield
            finally:
                mcore._get_filesystem_reader = before


def _copy(descriptor: Any) -> Any:
    """Return a descriptor with a copy of its tensor on the host, which training does not change."""
    if isinstance(descriptor.data, torch.Tensor):
        return dataclasses.replace(descriptor, data=descriptor.data.detach().to("cpu", copy=True))
    return descriptor
