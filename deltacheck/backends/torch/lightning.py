"""A plugin for Lightning, ``Trainer(plugins=[DeltaCheckIO()])``, that saves steps of a root.

Lightning names files, looks for them and removes them. So each path that it saves to becomes a
*pointer* (``pointer.py``), which appears when the step is committed. Removing or replacing the file
deletes the step that it points to.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.files.load import load
from deltacheck.backends.torch.state import rng
from deltacheck.leaf.external_errors import typed
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.store.files import storage as place
from deltacheck.store.files.background import Background, Task

# Both distributions of Lightning have one, and each Trainer tests for its own.
_INTERFACES = (
    "lightning.fabric.plugins.io.checkpoint_io",
    "lightning_fabric.plugins.io.checkpoint_io",
)
_RNG = "deltacheck.rng"  # permanent: key of the random states in a checkpoint


@typed
class DeltaCheckIO:
    """A ``CheckpointIO`` for Lightning.

    ``save_checkpoint`` returns while the checkpoint is written. The next call, or the end of the
    training, raises its failure.

    Args:
        root: The root of the steps. Default: ``deltacheck`` beside the first file that is saved.
        rng: Save the random states too, and set them when a checkpoint is loaded, so that a resumed
            training is equal bit for bit. Default: the generators are not touched, and Lightning
            saves none of them.
        **engine: Options of ``Engine``, except ``keep_last``: Lightning removes checkpoints.

    Raises:
        ValueError: ``keep_last`` is given.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, rng: bool = False, **engine: Any
    ) -> None:
        if "keep_last" in engine:
            raise ValueError(
                "Lightning says which checkpoints are removed: ModelCheckpoint(save_top_k=...), not"
                " keep_last"
            )
        # Lightning tests plugins with ``isinstance``. A registration needs no base class, so this
        # module can be imported without Lightning.
        _register(type(self))
        self._folder = None if root is None else place.local(root, "DeltaCheckIO")
        self._rng = rng
        self._options = engine
        self._engine: Engine | None = None
        self._worker: Background | None = None
        self._under_way: list[Task] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Begin to save a checkpoint.

        Args:
            checkpoint: The checkpoint as Lightning made it.
            path: The file that will point to the step.
            storage_options: Must be ``None``.

        Raises:
            UnsupportedLeaf: A value cannot be kept exactly, such as a hyperparameter that is an
                object.
            TypeError: ``storage_options`` is given.
            SaveFailed: An earlier save failed.
        """
        if storage_options is not None:
            raise TypeError(
                "DeltaCheckIO takes no storage_options; give it the options of Engine when it is"
                " made"
            )
        # This raises the failures of saves that have ended, without a wait for those under way.
        self._settle(wait=False)
        target = place.local(path, "DeltaCheckIO").absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._engine is None:
            self._engine = Engine(self._folder or target.parent / "deltacheck", **self._options)
        # A new dict, because Lightning's own dict must stay as it is.
        content = {**checkpoint, _RNG: rng.states()} if self._rng else checkpoint
        handle = self._engine.save(int(checkpoint.get("global_step", 0)), content)
        if target.name.startswith("hpc_ckpt"):
            # By Lightning's handler for SLURM, which may have interrupted an optimizer's step.
            handle.wait("captured")
        self._enqueue(_publish, self._engine, handle, target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint. No code of it is run.

        Args:
            path: The file that points to the step.
            map_location: The device of the tensors, as for ``torch.load``. Default: the host.
            weights_only: Ignored: no checkpoint holds code.

        Returns:
            The checkpoint.

        Raises:
            FileNotFoundError: There is no such file.
            NotACheckpointRoot: ``DeltaCheckIO`` did not make the file.
            Damaged: The step is damaged.
        """
        # The path may belong to a save under way, whose pointer is not written yet.
        self._settle()
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        checkpoint: dict[str, Any] = load(path, map_location=map_location)
        # Removed even if it is not used, because Lightning does not know the key.
        states = checkpoint.pop(_RNG, None)
        if self._rng and states is not None:
            rng.restore(states)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a file and the step that it points to, once the saves under way are done.

        Args:
            path: The file.

        Raises:
            SaveFailed: An earlier save failed.
        """
        self._settle(wait=False)
        target = Path(path).absolute()
        if self._engine is not None:
            self._enqueue(_remove, self._engine, target)
        elif target.exists():
            # No engine is open before the first save and after the end of a training.
            with Engine(pointer.read(target).root, **self._options) as engine:
                _remove(engine, target)

    def teardown(self) -> None:
        """Wait for the saves under way and give the root back.

        Raises:
            SaveFailed: A save failed and no call has raised it.
        """
        # Cleared first, so that a second call does nothing and a later save opens the root again.
        worker, engine, self._worker, self._engine = self._worker, self._engine, None, None
        try:
            self._settle()
        finally:
            # The worker ends before the engine, which its last actions still use.
            if worker is not None:
                worker.close()
            if engine is not None:
                engine.close()

    def _enqueue(self, action: Callable[..., None], *arguments: object) -> None:
        """Run an action behind the training, after all earlier ones."""
        if self._worker is None:
            # One thread, so that files appear and disappear in the order of Lightning's calls.
            self._worker = Background(1, "deltacheck-files")
        self._under_way.append(self._worker.start(partial(action, *arguments)))

    def _settle(self, wait: bool = True) -> None:
        """Raise the first failure, once. ``wait``: wait for the actions under way first."""
        # A task leaves the list once it has ended, so that no failure is raised twice.
        ended_tasks = [task for task in self._under_way if wait or task.done()]
        self._under_way = [task for task in self._under_way if task not in ended_tasks]
        errors = [error for task in ended_tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]


def _register(kind: type) -> None:
    """Register a ``CheckpointIO`` with every imported Lightning, or with the installed one."""
    if not any(name in sys.modules for name in _INTERFACES):
        for name in _INTERFACES:
            try:
                importlib.import_module(name)
                break
            except ModuleNotFoundError:
                continue
        else:
            raise ModuleNotFoundError(
                "DeltaCheckIO needs Lightning: pip install 'deltacheck[lightning]'"
            )
    for name in _INTERFACES:
        if name in sys.modules:
            sys.modules[name].CheckpointIO.register(kind)


def _publish(engine: Engine, handle: SaveHandle, path: Path) -> None:
    """Make a file point to a step once the step is committed."""
    if engine._saver.options.on_error == "log" and handle.exception() is not None:
        # No pointer is written. The engine decides which failure ends the run, at its next call.
        progress_of(handle).unsee_error()
        return
    report = handle.result()
    if report is None:  # skipped by on_busy="skip"
        return
    # With a memory tier: a file must not point to a step that a power cut would take.
    engine.persist()
    # A file of another origin at the path is replaced, but no step belongs to it.
    before = pointer.read(path) if pointer.is_pointer(path) else None
    pointer.write(path, pointer.Pointer(_root(engine), report.step, report.seq))
    # The old step is deleted after the new pointer is durable. A crash in between leaves a step
    # without a file, never a file without its step.
    if before is not None:
        _delete(engine, before)


def _remove(engine: Engine, path: Path) -> None:
    if path.exists():
        target = pointer.read(path)
        # The file first, for the same reason as in ``_publish``.
        path.unlink()
        _delete(engine, target)


def _delete(engine: Engine, target: pointer.Pointer) -> None:
    # The file may be of another run, and its root may belong to another process.
    if target.root == _root(engine):
        engine._writer.delete_checkpoint(target.seq)


def _root(engine: Engine) -> Path:
    return place.local(engine.root, "Lightning's plugin").resolve()
