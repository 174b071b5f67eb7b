"""The ways of saving that `compare` compares, each as its documentation shows it.

Every class uses the defaults of its library. Steps are written to ``root``, which is empty at
first. ``restore`` does what a new program does: it uses nothing that the saves have left in memory.
"""

from __future__ import annotations

import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from deltacheck import Policy
from deltacheck.policy.presets import RESTORE_RATIO
from deltacheck.profile import Profile
from deltacheck.store.files.arrays import bytes_on_disk
from deltacheck.store.files.durability import sync_directory

State = Any
EXACT, AUTO = "deltacheck, exact", "deltacheck, auto"
BOUNDED = f"{AUTO}, weights bounded"
BLOCKING_SECONDS = 0.002  # of a save from a GPU, at most


class Rival(ABC):
    """One way of saving.

    ``syncs``: description of what it syncs to disk by itself. ``lossless``: a restore returns every
    bit. ``needs``: an optional package, without which the rival is left out. ``overlaps``: the
    first forward and backward pass can begin before a restore is complete.
    """

    name: ClassVar[str]
    syncs: ClassVar[str] = "nothing"
    lossless: ClassVar[bool] = True
    needs: ClassVar[str] = ""
    overlaps: ClassVar[bool] = False

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        self.root = root
        root.mkdir(parents=True)

    @abstractmethod
    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        """Begin a save; the returned function waits until it is done."""

    @abstractmethod
    def restore(self, step: int, like: State) -> State:
        """Restore a step.

        Args:
            step: The step.
            like: A state of the same structure, as a resuming program has it. It may be filled.
        """

    def place(self, state: State, run: Any) -> None:  # noqa: B027 - most have filled the state
        """Give a restored state to the program, if ``restore`` has not filled the program's own."""

    def restore_early(self, step: int, run: Any) -> Callable[[], object]:
        """Restore a step into a run until its first forward pass can begin, if ``overlaps``.

        Returns:
            A function that waits for the rest.
        """
        raise NotImplementedError

    def unsynced(self, step: int) -> Path | None:
        """Return the folder that the benchmark must sync after the save, with its entry."""
        return self._at(step)

    def stored(self, step: int) -> int:
        """Return the bytes of all files that the save of a step has added."""
        return bytes_on_disk(self._at(step))

    def delete_earlier(self) -> None:
        """Delete the saves so far, which the next one does not need."""
        for entry in self.root.iterdir():
            shutil.rmtree(entry)

    def reported_blocking(self) -> float | None:
        """Return the seconds that the last save has blocked, if the library reports them."""
        return None

    def before_update(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait before an optimizer step for what it must not overwrite yet."""

    def settled(self) -> bool:
        """Return true if the next save is one of the steady state."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close the library after the last save."""

    def _at(self, step: int) -> Path:
        return self.root / str(step)


class TorchSave(Rival):
    name = "torch.save"

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        import torch

        self._at(step).mkdir()
        torch.save(state, self._at(step) / "state.pt")
        return lambda: None

    def restore(self, step: int, like: State) -> State:
        import torch

        return torch.load(self._at(step) / "state.pt", weights_only=True)

    def place(self, state: State, run: Any) -> None:
        run.workload.load(state)


class Safetensors(Rival):
    name = "safetensors"

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        from safetensors.torch import save_file

        from benchmarks import states

        self._at(step).mkdir()
        save_file(states.leaves_of(state), self._at(step) / "state.safetensors")
        return lambda: None

    def restore(self, step: int, like: State) -> State:
        from safetensors.torch import load_file

        return load_file(self._at(step) / "state.safetensors")

    def place(self, state: State, run: Any) -> None:
        _copy(state, run)


class Dcp(Rival):
    name = "torch DCP save"
    syncs = "files"  # not the directory

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=self._at(step), no_dist=True)
        return lambda: None

    def restore(self, step: int, like: State) -> State:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):
            dcp.load(like, checkpoint_id=self._at(step), no_dist=True)
        return like


class DcpAsync(Dcp):
    name = "torch DCP async_save"

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):
            future: Any = dcp.async_save(state, checkpoint_id=self._at(step), no_dist=True)
        return future.result  # type: ignore[no-any-return]


class DcpPinned(DcpAsync):
    """DCP with its stager for GPUs: pinned memory, and copies during training. Needs CUDA."""

    name = "torch DCP async_save, pinned"

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(use_shared_memory=False))
        self._staged: Any = None

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings(action="ignore"):
            response: Any = dcp.async_save(
                state, checkpoint_id=self._at(step), no_dist=True, async_stager=self._stager
            )
        self._staged = response.staging_completion
        return response.upload_completion.result  # type: ignore[no-any-return]

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointing(Rival):
    """Meta's library: stages during training, and writes in a process of its own.

    Direct I/O, its default, is off: it fails on file systems that require alignment (ext4:
    "Invalid argument").
    """

    name = "torch_checkpointing"
    needs = "torch_checkpointing"

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        from torch_checkpointing import CheckpointManager

        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=self._storage()))

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        future: Any = self._manager.save(str(self._at(step)), {"state": state})
        return future.result  # type: ignore[no-any-return]

    def before_update(self) -> None:
        lock: AbstractContextManager[object] = self._manager.lock() or nullcontext()
        with lock:
            pass

    def restore(self, step: int, like: State) -> State:
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig

        config = CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(), storage_config=self._storage()
        )
        return CheckpointManager(config).load(str(self._at(step)), into={"state": like})["state"]

    def close(self) -> None:
        self._manager.close()

    def _storage(self) -> Any:
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        return LocalFileSystemStorageConfig(use_direct_io=False)


class _Growing(Rival):
    """A way whose saves build on each other. Bytes are the growth of the root."""

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        self._size = 0

    def delete_earlier(self) -> None:
        """Delete nothing: saves build on each other, and are small."""

    def stored(self, step: int) -> int:
        size = bytes_on_disk(self.root)
        growth, self._size = size - self._size, size
        return growth


class Moonclip(_Growing):
    """A library in Rust: differences in zstd, of the last save that is whole."""

    name = "moonclip"
    needs = "moonclip"
    syncs = "files"

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        from moonclip import MoonclipManager

        self._manager = MoonclipManager(str(root))

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        from benchmarks import states

        self._manager.save_tensors(step, states.leaves_of(state))
        return self._manager.flush  # type: ignore[no-any-return]

    def unsynced(self, step: int) -> Path | None:
        return self.root

    def restore(self, step: int, like: State) -> State:
        import torch
        from moonclip import MoonclipManager

        from benchmarks import states

        _, restored = MoonclipManager(str(self.root)).load_latest()
        return {
            path: torch.frombuffer(restored[path], dtype=tensor.dtype).reshape(tensor.shape)
            for path, tensor in states.leaves_of(like).items()
        }

    def place(self, state: State, run: Any) -> None:
        _copy(state, run)


class _Ours(_Growing):
    """Saves of deltacheck."""

    syncs = "everything"

    def unsynced(self, step: int) -> Path | None:
        return None

    def settled(self) -> bool:
        """Return true if the next save is one of the steady state.

        Under a policy with stages, the last save must have been stable, so that the next one makes
        no transition. Without stages, the leaves that change everywhere must have been written
        whole again. A profile without large stable leaves gives a policy without stages.
        """
        import deltacheck

        opened = deltacheck.open(self.root)
        stage = getattr(opened.manifest(opened.steps()[-1]), "stage", "")
        return stage == "stable" if stage else len(opened.steps()) > RESTORE_RATIO / 2 + 1


_POLICIES: dict[str, Callable[[Profile], Policy]] = {
    EXACT: lambda profile: Policy.exact(),
    AUTO: Policy.auto,
    BOUNDED: partial(Policy.auto, weights="bounded"),
}


class OursTorch(_Ours):
    name = EXACT
    overlaps = True

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        from deltacheck.backends.torch import Engine

        self._engine = Engine(root, policy=_POLICIES[self.name](profile))
        self._engine.guard(run.workload.optimizer)
        self._engine.guard(run.workload.model)
        self._handle: Any = None

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        self._handle = self._engine.save(step, state, metrics=metrics)
        return self._handle.wait  # type: ignore[no-any-return]

    def reported_blocking(self) -> float | None:
        return float(self._handle.blocking_seconds)

    def restore(self, step: int, like: State) -> State:
        from deltacheck.backends.torch import Engine

        with Engine(self.root) as engine:
            return engine.restore(step, into=like)

    def restore_early(self, step: int, run: Any) -> Callable[[], object]:
        from deltacheck.backends.torch import Engine

        engine = Engine(self.root)
        target = {**run.workload.state(), "optimizer": run.workload.optimizer}
        engine.restore(step, into=target, overlap=True)
        return engine.close

    def close(self) -> None:
        self._engine.close()


class OursTorchPostTraining(OursTorch):
    name = AUTO
    lossless = False


class OursTorchBounded(OursTorch):
    name = BOUNDED
    lossless = False


class Orbax(Rival):
    name = "Orbax CheckpointManager async"
    # TensorStore syncs its files. The names of items and steps are not synced, nor are Orbax's own
    # small files after they are renamed.
    syncs = "arrays"

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        self._manager = self._opened()

    def _opened(self) -> Any:
        from orbax import checkpoint as ocp

        return ocp.CheckpointManager(
            self.root, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
        )

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        from orbax import checkpoint as ocp

        self._manager.save(step, args=ocp.args.StandardSave(state))
        return self._manager.wait_until_finished  # type: ignore[no-any-return]

    def restore(self, step: int, like: State) -> State:
        import jax
        from orbax import checkpoint as ocp

        with self._opened() as manager:
            return jax.block_until_ready(manager.restore(step, args=ocp.args.StandardRestore(like)))

    def close(self) -> None:
        self._manager.close()


class OursOrbax(_Ours):
    name = EXACT

    def __init__(self, root: Path, run: Any, profile: Profile) -> None:
        super().__init__(root, run, profile)
        from deltacheck.backends.orbax import manager

        # The runs donate nothing, so there is no reason to read before the save returns.
        self._manager = manager(root, policy=_POLICIES[self.name](profile))

    def save(self, step: int, state: State, metrics: Mapping[str, float]) -> Callable[[], object]:
        from deltacheck.backends.orbax import DeltaSaveArgs

        self._manager.save(step, args=DeltaSaveArgs(state, metrics=metrics))
        return self._manager.wait_until_finished  # type: ignore[no-any-return]

    def restore(self, step: int, like: State) -> State:
        import jax

        from deltacheck.backends.orbax import DeltaRestoreArgs, manager

        with manager(self.root) as opened:
            return jax.block_until_ready(opened.restore(step, args=DeltaRestoreArgs(like)))

    def close(self) -> None:
        self._manager.close()


class OursOrbaxPostTraining(OursOrbax):
    name = AUTO
    lossless = False


class OursOrbaxBounded(OursOrbax):
    name = BOUNDED
    lossless = False


RIVALS: dict[str, tuple[type[Rival], ...]] = {
    "torch": (
        TorchSave,
        Safetensors,
        Dcp,
        DcpAsync,
        TorchCheckpointing,
        Moonclip,
        OursTorch,
        OursTorchPostTraining,
        OursTorchBounded,
    ),
    "jax": (Orbax, OursOrbax, OursOrbaxPostTraining, OursOrbaxBounded),
}


def _copy(state: Mapping[str, Any], run: Any) -> None:
    """Copy restored tensors into those of the program."""
    from benchmarks import states

    for path, tensor in states.leaves_of(run.workload.state()).items():
        tensor.detach().copy_(state[path])


def sync_tree(top: Path) -> None:
    """Sync every file and directory of a tree, and the entry of its top."""
    for directory, _, names in os.walk(top):
        for name in names:
            descriptor = os.open(Path(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))
    sync_directory(top.parent)
