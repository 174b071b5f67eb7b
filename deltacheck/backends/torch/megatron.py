"""Strategies of Megatron-Core's ``dist_checkpointing`` over deltacheck's DCP storage.

This needs ``megatron.core`` 0.16 or newer. The root holds the tensors, the objects and the common
part (numbers, arguments) of all steps. The directory of a step holds what Megatron reads by itself:
``common.pt`` with the common part, and ``metadata.json``, which completes the directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import package_info
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from deltacheck import reader
from deltacheck.backends.torch.dcp import DeltaStorageReader, DeltaStorageWriter
from deltacheck.backends.torch.dcp.names import path_of, step_of
from deltacheck.errors import Damaged, LeafNotFound, SaveFailed
from deltacheck.leaf.external_errors import typed
from deltacheck.store.files import arrays, storage
from deltacheck.store.files.durability import Durability

_OLDEST = (0, 16)
_VERSION = (package_info.MAJOR, package_info.MINOR)
_BACKEND = "torch_dist", 1  # of ``metadata.json``, by which Megatron chooses its loader
_COMMON_FILE = "common.pt"
# From version 0.19 on, Megatron passes the common part to the strategy as an object of this key.
# Its loader looks for the file before it looks for the object, and has no parameter for a reader.
_COMMON_KEY = "common_state"
# Permanent: the name in DCP of the leaf with the bytes of the file, in every version.
_COMMON_NAME = "common_state/shard_0_1"
# The private names of Megatron that this module calls or replaces.
_NEEDED = (
    "MCoreSavePlanner",
    "_get_filesystem_reader",
    "_replace_state_dict_keys_with_sharded_keys",
    "mcore_to_pyt_state_dict",
)

# Megatron's factory of readers is a global of its module, so only one load at a time may replace
# it. Reentrant, because one loading method may call another.
_reading = threading.RLock()
# The markers of the asynchronous saves that this process has begun.
_markers: set[str] = set()
# A program that waits for the end of a save or of the process that saves.
_WAITING = """
import os, sys, time
while os.path.exists(sys.argv[1]) and os.getppid() == int(sys.argv[2]):
    time.sleep(0.02)
"""


@typed
class DeltaSaveStrategy(mcore.TorchDistSaveShardedStrategy):  # type: ignore[misc] # untyped
    """Saves with ``dist_checkpointing.save(..., sharded_strategy=DeltaSaveStrategy(root))``.

    Each save writes the changes since the one before. The step is the number that the directory
    ends in (``iter_0001200``). With ``async_sharded_save=True`` the tensors are copied to the host
    first, and written by a thread of this process. (Megatron's own writers fork a process, which
    could not keep the copy that the next save is compared with.)

    The first save raises ``SaveFailed`` and writes nothing if the installed version of
    Megatron-Core could not load the step.

    Args:
        root: The root, as in ``DeltaStorageWriter``.
        **options: Arguments of ``DeltaStorageWriter``.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(*_BACKEND)
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
        _require_support()
        common = _common_of(sharded_state_dict, checkpoint_dir)
        state = self._pytorch_state(sharded_state_dict, copied=False)
        self._save(state, common, checkpoint_dir)

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Begin to save.

        Args:
            sharded_state_dict: The state with Megatron's descriptors.
            checkpoint_dir: The directory of the step.
            async_strategy: The package whose queue receives the request, ``"mcore"`` or
                ``"nvrx"`` (nvidia-resiliency-ext, if it is installed).

        Returns:
            A request. Its function only waits for the thread that writes, so that the queue can
            tell when the save is done. Its finalization raises the error of a failed save.
        """
        _require_support()
        common = _common_of(sharded_state_dict, checkpoint_dir)
        # Copied on this thread, because training changes the tensors as soon as this returns.
        state = self._pytorch_state(sharded_state_dict, copied=True)
        descriptor, marker = tempfile.mkstemp(prefix="deltacheck-saving-")
        os.close(descriptor)
        _markers.add(marker)

        def write() -> None:
            try:
                self._save(state, common, checkpoint_dir)
            finally:
                _markers.discard(marker)
                os.unlink(marker)

        future: Future[None] = self._thread.submit(write)
        request = _request_class(async_strategy)
        return request(_wait, (marker, os.getpid()), [future.result])

    def _pytorch_state(self, sharded_state_dict: dict[str, Any], copied: bool) -> dict[str, Any]:
        if self._group is None:  # apart from the training's collectives; every rank calls this
            self._group = dist.new_group(backend="gloo")
        by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(
            {key: value for key, value in sharded_state_dict.items() if not _is_common(value)},
            self.keep_only_main_replica,
        )
        if copied:
            by_key = {key: [_copy(shard) for shard in shards] for key, shards in by_key.items()}
        state: dict[str, Any] = mcore.mcore_to_pyt_state_dict(by_key, False)
        return state

    def _save(
        self, state: dict[str, Any], common: bytes | None, checkpoint_dir: str | Path
    ) -> None:
        if common is not None:
            state[_COMMON_NAME] = io.BytesIO(common)
        writer = DeltaStorageWriter(self._root, **self._options)
        save(
            state,
            checkpoint_id=str(checkpoint_dir),
            storage_writer=writer,
            # Megatron's keys are flat already.
            planner=mcore.MCoreSavePlanner(flatten_state_dict=False),
            process_group=self._group,
        )
        # After the commit: a directory whose step does not exist must not look complete. Earlier
        # versions of Megatron have written the file themselves.
        if common is not None and _VERSION >= (0, 19):
            _write_common(checkpoint_dir, common, writer.settings.durability)


@typed
class DeltaLoadStrategy(mcore.TorchDistLoadShardedStrategy):  # type: ignore[misc] # untyped
    """Loads with ``dist_checkpointing.load(..., sharded_strategy=DeltaLoadStrategy(root))``.

    Any parallelism may load a step. The step is the number that the directory ends in. Some of
    Megatron's objects (NumPy's random states, for example) need ``allow_pickle=True``, or their
    classes ``torch.serialization.add_safe_globals``.

    Megatron reads ``common.pt`` before it calls a strategy. ``load`` then compares the file with
    the content that the root has of it, and raises ``Damaged`` if they differ.

    Args:
        root: The root, as in ``DeltaStorageReader``.
        **options: Arguments of ``DeltaStorageReader``.
    """

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._root = root
        self._options = options

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Fill the tensors of the descriptors, and return the state.

        Args:
            sharded_state_dict: The state with Megatron's descriptors.
            checkpoint_dir: The directory of the step.
            async_strategy: Not used.

        Returns:
            The state.

        Raises:
            Damaged: ``common.pt`` is not the file of this step, or stored bytes are damaged.
        """
        self._require_common(checkpoint_dir)
        with self._from(checkpoint_dir):
            return super().load(sharded_state_dict, checkpoint_dir)

    def write_directory(self, checkpoint_dir: str | Path) -> None:
        """Write the directory of a step anew from the root.

        Call it on one rank, if only the root was copied, if a process was killed between the commit
        of the step and the end of its directory, or if ``load`` has refused ``common.pt``.

        Args:
            checkpoint_dir: The directory of the step. It is created if it does not exist.

        Raises:
            LeafNotFound: The step has no common part, because an earlier version of deltacheck has
                saved it.
        """
        common = self._stored_common(checkpoint_dir)
        Path(checkpoint_dir).mkdir(parents=True, exist_ok=True)
        _write_common(checkpoint_dir, common, Durability.POWER)
        save_config(CheckpointingConfig(*_BACKEND), str(checkpoint_dir))

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
            content = super().load_sharded_metadata(checkpoint_dir)
        # Megatron loads the common part by itself, and would report it as a missing key.
        content.pop(_COMMON_NAME, None)
        return content

    def _stored_common(self, checkpoint_dir: str | Path) -> bytes:
        opened = reader.open(self._root, storage=self._options.get("storage"))
        path = path_of((_COMMON_NAME,))
        maximum = self._options.get("max_bytes")
        return opened.restore(step_of(str(checkpoint_dir)), [path], max_bytes=maximum)[
            path
        ].tobytes()

    def _require_common(self, checkpoint_dir: str | Path) -> None:
        file = Path(checkpoint_dir, _COMMON_FILE)
        try:
            expected = self._stored_common(checkpoint_dir)
        except LeafNotFound:  # of an earlier version of deltacheck
            return
        content = file.read_bytes()
        if content != expected:
            digests = [hashlib.sha256(value).hexdigest()[:16] for value in (content, expected)]
            raise Damaged(
                f"{file} has digest {digests[0]}, but step {step_of(str(checkpoint_dir))} of"
                f" {self._root} was saved with digest {digests[1]}. Write the file again:"
                f" DeltaLoadStrategy({str(self._root)!r}).write_directory({str(checkpoint_dir)!r})",
                file=file,
                leaf=path_of((_COMMON_NAME,)),
            )

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


@functools.cache
def _require_support() -> None:
    """Raise ``SaveFailed`` if this version of Megatron-Core could not load a step of ours."""
    reason = _obstacle()
    if reason:
        raise SaveFailed(
            f"megatron-core {package_info.__version__} cannot load a step of DeltaSaveStrategy:"
            f" {reason}. Nothing was written. Use megatron-core 0.16 to 0.19, or save the same"
            " descriptors with deltacheck.backends.torch.Engine (docs/how-to/frameworks.md)"
        )


def _obstacle() -> str:
    if _VERSION < _OLDEST:
        return "it is older than 0.16"
    for name in _NEEDED:
        if not hasattr(mcore, name):
            return f"it has no {mcore.__name__}.{name}"
    loader = mcore.TorchDistLoadShardedStrategy
    for name in ("load", "load_tensors_metadata", "load_sharded_metadata"):
        if "_get_filesystem_reader" not in inspect.unwrap(getattr(loader, name)).__code__.co_names:
            return f"its {name} does not open its reader with _get_filesystem_reader"
    expected = {"iteration": 1}
    content = io.BytesIO()
    torch.save(expected, content)
    with tempfile.TemporaryDirectory(prefix="deltacheck-megatron-") as directory:
        Path(directory, _COMMON_FILE).write_bytes(content.getvalue())
        save_config(CheckpointingConfig(*_BACKEND), directory)
        try:
            loaded = load_common_state_dict(directory)
        # A version that looks elsewhere may raise anything. DCP's exception is no ``Exception``.
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            return f"it does not read {_COMMON_FILE} ({type(error).__name__}: {error})"
    return "" if loaded == expected else f"it reads {_COMMON_FILE} as {loaded!r}"


def _is_common(value: object) -> bool:
    return isinstance(value, ShardedObject) and value.key == _COMMON_KEY


def _common_of(sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> bytes | None:
    """Return the content of ``common.pt`` on the rank that saves it, ``None`` on the others."""
    if str(checkpoint_dir).startswith("msc://"):
        raise SaveFailed(
            f"{checkpoint_dir} is an address of Multi-Storage Client. Save to a directory, and pass"
            " an address of an object store as the root: DeltaSaveStrategy('s3://bucket/deltas')"
        )
    for value in sharded_state_dict.values():
        if _is_common(value):
            content = io.BytesIO()
            torch.save(value.data, content)
            return content.getvalue() if is_main_replica(value.replica_id) else None
    file = Path(checkpoint_dir, _COMMON_FILE)
    return file.read_bytes() if dist.get_rank() == 0 and file.exists() else None


def _write_common(checkpoint_dir: str | Path, common: bytes, durability: Durability) -> None:
    directory = storage.of(checkpoint_dir).absolute()
    arrays.replace_file(directory, _COMMON_FILE, common, durability)


def _request_class(async_strategy: str) -> type[Any]:
    """Return the class of the requests of a queue."""
    if async_strategy == "nvrx":
        with contextlib.suppress(ImportError):
            _, classes = mcore.get_async_strategy(async_strategy)
            chosen: type[Any] = classes["AsyncRequest"]
            return chosen
    # Its own queue accepts only these, and ours need nothing of the other package.
    own: type[Any] = AsyncRequest
    return own


def _wait(marker: str, saver: int) -> None:
    """Return when a save has ended, or the process that saves.

    Megatron calls this in a child of that process, and asks if the child still runs.

    Args:
        marker: A file that exists while the save is under way.
        saver: The process that saves.
    """
    # The finalization waits anyway.
    if os.getpid() == saver:
        return
    arguments = [sys.executable, "-ISc", _WAITING, marker, str(saver)]
    # A child that was forked, not spawned, has the set. It begins another program, because it would
    # share the memory of the training process: each page that changes meanwhile would be copied.
    if marker in _markers:
        os.execv(sys.executable, arguments)
    while os.path.exists(marker) and os.getppid() == saver:
        time.sleep(0.02)
