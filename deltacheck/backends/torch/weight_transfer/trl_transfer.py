"""Weight transfer for TRL's asynchronous trainers: ``weight_transfer=PublishedWeights(...)``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch

from deltacheck.backends.hugging_face.publish.tensor_publisher import TensorPublisher
from deltacheck.backends.hugging_face.publish.version_folder import Version
from deltacheck.backends.torch.weight_transfer.tensors import published
from deltacheck.leaf.external_errors import typed

log = logging.getLogger("deltacheck")

_OWNER = "weights of TRL"


class Server(Protocol):
    """The calls to an inference server, as TRL's ``VLLMClient`` has them."""

    def wait_for_server_ready(self) -> None:
        """Wait until the server answers."""

    def pause(self) -> None:
        """Pause generation."""

    def resume(self) -> None:
        """Resume generation."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell the workers the folder of the versions."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers apply a version."""

    def finish_weight_update(self) -> None:
        """End an update."""


@typed
class PublishedWeights:
    """A ``WeightTransferProtocol`` of TRL that publishes each set of weights as a version.

    TRL calls it on the main process. A version holds what has changed since the one before. A copy
    of the weights is held in host memory.

    Args:
        folder: The folder of versions, on storage that the inference workers see: new, empty, or of
            this class.
        server: TRL's ``VLLMClient`` for a vLLM server with the backend ``deltacheck``. ``None``:
            only publish; the engines pull versions themselves.
        files: A folder with configuration and tokenizer for full versions; ``None``: none.
        full_every: The most versions from one full version to the next. Larger: fewer bytes;
            smaller: late workers read less.
        encoding: ``"compact"``: fewer bytes, for ``Receiver`` and the backend ``deltacheck`` of
            vLLM. ``"slime"``: the engines of slime and miles read the versions, too.

    Raises:
        NotACheckpointRoot: ``folder`` has other content, or versions of a run.
        RootBusy: Another process publishes to ``folder``.
        StorageFailed: An object store does not answer, refuses, or has no conditional writes.
        ValueError: An option has a value that it cannot have.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        server: Server | None = None,
        *,
        files: str | os.PathLike[str] | None = None,
        full_every: int = 20,
        encoding: Literal["slime", "compact"] = "compact",
    ) -> None:
        self._publisher = TensorPublisher(
            folder, owner=_OWNER, files=files, full_every=full_every, encoding=encoding
        )
        self._server = server
        self._count = 0

    def init_weight_transfer(self) -> None:
        """Tell the inference workers the folder. TRL calls this once, before the first weights."""
        if self._server is not None:
            self._server.wait_for_server_ready()
            self._server.init_weight_transfer_engine({"folder": str(self._publisher.folder)})

    def pause(self) -> None:
        """Pause generation."""
        if self._server is not None:
            self._server.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish weights, and let the inference workers apply the version.

        Args:
            iterator: Names and whole tensors.

        Raises:
            UnsupportedLeaf: A tensor is not dense, or safetensors lacks its type. No version was
                published.
            RootBusy: Another process publishes to the folder.
        """
        self._count += 1
        version: Version = self._publisher.publish(self._count, published(iterator))
        log.info("version %d has %d bytes", version.number, version.file_bytes)
        if self._server is not None:
            self._server.start_weight_update()
            self._server.update_weights({"version": version.number})
            self._server.finish_weight_update()

    def resume(self) -> None:
        """Resume generation."""
        if self._server is not None:
            self._server.resume()

    def destroy(self) -> None:
        """Give the folder back. TRL calls this at the end of the training."""
        self._publisher.close()
