"""The checkpoint engine ``deltacheck`` of verl: weights go through a folder of versions.

verl imports this module if ``custom_backend_module`` of its checkpoint engine names it. The
interface is that of verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from deltacheck.backends.hugging_face.publish import version_folder
from deltacheck.backends.hugging_face.publish.receiver import Receiver
from deltacheck.backends.hugging_face.publish.tensor_publisher import TensorPublisher
from deltacheck.backends.torch.weight_transfer.tensors import published, tensor_of
from deltacheck.errors import StorageTimeout
from deltacheck.leaf.tree import escape_key
from deltacheck.store.files import storage
from deltacheck.store.lock.deadline import Deadline

_OWNER = "weights of verl"
_POLL_SECONDS = 0.05


@CheckpointEngineRegistry.register("deltacheck")
class DeltaCheckCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A transfer through a folder that trainer and rollout workers see.

    The master, which is rank 0 of the trainer, publishes versions of what has changed. Each rollout
    worker brings its copy in host memory to the version of the present update, verified, and yields
    tensors of it.

    Args:
        bucket_size: Not used: tensors are yielded one at a time.
        is_master: Whether this process publishes.
        folder: The folder of versions (``engine_kwargs.deltacheck.folder``): new, empty, or made by
            this class.
        full_every: The most versions from one full version to the next.
        timeout_seconds: The longest wait of a rollout worker for the version. Longer: slow trainers
            get through; shorter: a trainer that has failed is reported sooner.
        changed_only: ``True``: yield only tensors that changed since the last update of this
            worker: less to load. The weights must have stayed on the device meanwhile. ``False``:
            yield all tensors each time.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        folder: str | os.PathLike[str],
        full_every: int = 20,
        timeout_seconds: float = 600.0,
        changed_only: bool = False,
    ) -> None:
        self._folder = storage.of(folder)
        self._is_master = is_master
        self._full_every = full_every
        self._timeout_seconds = timeout_seconds
        self._changed_only = changed_only
        self._publisher: TensorPublisher | None = None
        self._receiver: Receiver | None = None
        self._version = 0
        self._is_whole = False

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version, on the master.

        Returns:
            ``{"version": number}``, and nothing on other processes.
        """
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = TensorPublisher(
                str(self._folder), owner=_OWNER, full_every=self._full_every, encoding="compact"
            )
        return {"version": self._publisher.newest + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of ``init_process_group``.

        Args:
            actor_wg_world_size: The number of trainer processes.
            rollout_world_size: The number of rollout workers.
            metadata: The results of ``prepare``, those of the trainer first.

        Returns:
            The arguments for the trainer and for the rollout workers.
        """
        number = metadata[0]["version"]
        return {"version": [number] * actor_wg_world_size}, {
            "version": [number] * rollout_world_size
        }

    def init_process_group(self, version: int) -> None:
        """Learn the version of the present update.

        Args:
            version: Its number.
        """
        self._version = version

    def finalize(self) -> None:
        """Do nothing: copies stay, because the next version continues them."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Publish weights as the version of the present update.

        Args:
            weights: Names and whole tensors. All processes read them, and the master publishes.
            global_steps: The training step.

        Raises:
            UnsupportedLeaf: A tensor is not dense, or safetensors lacks its type.
        """
        if self._publisher is None:
            # To make a tensor whole is a collective call of all trainer processes.
            for _ in weights:
                pass
            return
        step = self._version if global_steps is None else global_steps
        self._publisher.publish(step, published(weights))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the version of the present update, and yield its tensors.

        Args:
            global_steps: Not used: the version has the step.

        Yields:
            Name and tensor in host memory.

        Raises:
            StorageTimeout: The version did not appear in time.
            Damaged: A file is damaged. Nothing was yielded.
        """
        receiver = await self._await_version()
        is_whole, self._is_whole = self._is_whole, False
        update = receiver.poll(self._version)
        changed = None
        if self._changed_only and is_whole and (update is None or update.since is not None):
            changed = (
                set()
                if update is None
                else {path for path, source in update.names.items() if source in update.changes}
            )
        for name, array in receiver.tensors.items():
            if changed is None or escape_key(name) in changed:
                yield name, tensor_of(array)
        # A consumer that fails does not come here, and gets all tensors the next time.
        self._is_whole = True

    async def _await_version(self) -> Receiver:
        deadline = Deadline.after(self._timeout_seconds)
        while not version_folder.is_complete(self._folder, self._version):
            if deadline.left == 0:
                raise StorageTimeout(
                    f"version {self._version} has not appeared in {self._folder} within"
                    f" {self._timeout_seconds:g} s. See why the trainer has not published it, or"
                    " raise engine_kwargs.deltacheck.timeout_seconds"
                )
            await asyncio.sleep(_POLL_SECONDS)
        if self._receiver is None:
            self._receiver = Receiver(str(self._folder))
        return self._receiver
