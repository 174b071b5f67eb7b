"""The weight transfer backend ``deltacheck`` of vLLM: workers apply published versions.

The interface is that of vLLM 0.33.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from deltacheck.backends.hugging_face.publish.receiver import Receiver
from deltacheck.backends.torch.weight_transfer.tensors import tensor_of
from deltacheck.leaf.tree import plain_name
from deltacheck.restore.follow.follower import LeafChange, Update

# vLLM marks unchanged elements of a sparse patch by NaN, and copies them by ``Tensor.copy_``.
_SPARSE_TYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass
class FolderInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The place of the versions.

    Attributes:
        folder: The folder that ``deltacheck publish --to`` writes, as the workers see it.
    """

    folder: str


@dataclass
class VersionUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to apply.

    Attributes:
        version: Its number; ``None``: the newest.
    """

    version: int | None = None


class DeltaCheckWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's part of the transfer: it reads versions from a folder, and applies them.

    A version of changes becomes sparse patches, of names and flat indices of the checkpoint. The
    model's own loader maps them to the shards of the worker. A full version is loaded as a
    checkpoint, and so are changes that cannot be patched: of other than floating-point types,
    float8, and new values of NaN.

    Each worker holds a copy of all published weights in host memory.
    """

    init_info_cls = FolderInitInfo
    update_info_cls = VersionUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        # A loader that fails may have changed a part of the model. Then all of it is loaded anew.
        self._is_whole = False

    def init_transfer_engine(self, init_info: FolderInitInfo) -> None:
        """Open the folder of versions.

        Args:
            init_info: The folder.

        Raises:
            NotACheckpointRoot: It is no such folder.
        """
        self._receiver = Receiver(init_info.folder)
        self._is_whole = False

    def start_weight_update(self) -> None:
        """Do nothing: only the version tells if the model is patched or loaded anew."""

    def finish_weight_update(self) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: VersionUpdateInfo) -> None:
        """Read a version, verify it, and apply it to the model.

        Args:
            update_info: The version.

        Raises:
            RuntimeError: ``init_transfer_engine`` was not called, or nothing is published.
            Damaged: A file is damaged. The model was not changed.
            StepNotFound: There is no such version. The model was not changed.
        """
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("the folder is not known: call init_transfer_engine first")
        update = receiver.poll(update_info.version)
        if receiver.version is None:
            raise RuntimeError("the folder has no version yet: publish one, then update again")
        if update is None and self._is_whole:
            return
        is_sparse = self._is_whole and update is not None and _can_patch(update)
        self._is_whole = False
        if is_sparse:
            assert update is not None
            load_checkpoint_weight_patches(
                self.model,
                list(self._patches(update)),
                # Positions of an update are distinct.
                validate_unique_indices=False,
            )
        else:
            self._load(receiver)
        self._is_whole = True

    def shutdown(self) -> None:
        """Release the copy of the weights."""
        self._receiver = None

    def _patches(self, update: Update) -> Iterator[CheckpointWeightPatch]:
        for path, change in update.changes.items():
            values = tensor_of(change.values).to(self.device)
            indices = (
                torch.arange(values.numel())
                if change.positions is None
                else torch.from_numpy(change.positions.astype(np.int64))
            )
            yield CheckpointWeightPatch(
                plain_name(path), change.spec.shape, values.dtype, values, indices.to(self.device)
            )

    def _load(self, receiver: Receiver) -> None:
        """Load all weights as a checkpoint."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(
                (name, tensor_of(array).to(self.device)) for name, array in receiver.tensors.items()
            )
        except BaseException:
            # The loaders of the layers are wrapped until then.
            with contextlib.suppress(Exception):
                finalize_layerwise_reload(self.model, self.model_config)
            raise
        finalize_layerwise_reload(self.model, self.model_config)


def _can_patch(update: Update) -> bool:
    return update.since is not None and all(map(_is_patchable, update.changes.values()))


def _is_patchable(change: LeafChange) -> bool:
    return change.spec.dtype in _SPARSE_TYPES and not bool(np.isnan(change.values).any())
