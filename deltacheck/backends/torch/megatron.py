"""Megatron-Core's own strategies on our DCP storage: what ``dist_checkpointing.save`` and ``load``
take as ``sharded_strategy``.

Imported only by those who have ``megatron.core`` (0.16 or newer). Its common part (numbers,
arguments) stays Megatron's: ``common.pt`` and ``metadata.json`` in the directory of the step,
beside which our root holds the tensors and objects of all steps.
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

_reading = threading.RLock()


class DeltaSaveStrategy(mcore.TorchDistSaveShardedStrategy):  # type: ignore[misc] # Megatron-Core has no types
    """``dist_checkpointing.save(state, directory, sharded_strategy=DeltaSaveStrategy(root))``: each
    save as changes to the one before.

    ``root``, ``options``: as of ``DeltaStorageWriter``. The step is the number that ``directory``
    ends in (``iter_0001200``). With ``async_sharded_save=True`` the tensors are copied to the host
    first, and written by a thread of this process (Megatron's own writers fork one, which could not
    keep what the next save is compared with); the finalization waits for it.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__("torch_dist", 1)
        self._root = root
        self._options = options
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, "deltacheck-megatron")

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save, and return when the step exists."""
        self._save(self._pytorch_state(sharded_state_dict, copied=False), checkpoint_dir)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Begin to save. The request has nothing to fork for; its finalization raises what failed
        the save.
        """
        state = self._pytorch_state(sharded_state_dict, copied=True)
        future: Future[None] = self._thread.submit(self._save, state, checkpoint_dir)
        return AsyncRequest(None, (), [future.result])

    def _pytorch_state(self, sharded_state_dict: dict[str, Any], copied: bool) -> dict[str, Any]:
        if self._group is None:  # beside the training's own collectives; every rank comes here
            self._group = dist.new_group(backend="gloo")
        by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        if copied:
            by_key = {key: [_copy(one) for one in of] for key, of in by_key.items()}
        state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(by_key, False)
        return state

    def _save(self, state: dict[str, Any], checkpoint_dir: str | Path) -> None:
        save(
            state,
            checkpoint_id=str(checkpoint_dir),
            storage_writer=DeltaStorageWriter(self._root, **self._options),
            planner=mcore.MCoreSavePlanner(flatten_state_dict=False),
            process_group=self._group,
        )


class DeltaLoadStrategy(mcore.TorchDistLoadShardedStrategy):  # type: ignore[misc] # as above
    """``dist_checkpointing.load(state, directory, sharded_strategy=DeltaLoadStrategy(root))``,
    under
    any parallelism.

    ``root``, ``options``: as of ``DeltaStorageReader``. The step is the number that ``directory``
    ends in. Megatron's objects (RNG states of NumPy, for one) may need ``allow_pickle=True``, or
    their classes ``torch.serialization.add_safe_globals``.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._root = root
        self._options = options

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Fill what the descriptors hold, and return the state."""
        with self._from(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """What tensors the step has, as descriptors without data."""
        with self._from(checkpoint_dir):
            return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """What the step has, as descriptors without data."""
        with self._from(checkpoint_dir):
            return super().load_sharded_metadata(checkpoint_dir)

    @contextlib.contextmanager
    def _from(self, checkpoint_dir: str | Path) -> Iterator[None]:
        """Inside, Megatron's loader reads from our root: it has no other place to be told of a
        reader.
        """
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


def _copy(one: Any) -> Any:
    """A descriptor with its tensor on the host, where training no longer changes it."""
    if isinstance(one.data, torch.Tensor):
        return dataclasses.replace(one, data=one.data.detach().to("cpu", copy=True))
    return one
