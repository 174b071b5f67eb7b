"""A plugin for Lightning, ``Trainer(plugins=[DeltaCheckIO()])``, that saves steps of a root.

Lightning names files, looks for them and removes them. So each path that it saves to becomes a
*pointer* (``pointer.py``), which appears when the step is committed. Removing or replacing the file
deletes the step that it points to.

Only ``ModelCheckpoint`` saves in the background. It looks for files to choose the next name, so its
method for that also knows the saves and removals under way. All else that saves gets its file
before the call returns: a program may end right after it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import pointer, torch_import
from deltacheck.backends.torch.files.load import ReadStep, load, read_to_continue
from deltacheck.backends.torch.state import leaves, rng
from deltacheck.errors import StepNotFound, UnsupportedLeaf
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Keep
from deltacheck.save.handle import SaveHandle, progress_of
from deltacheck.save.job.save_log import SaveNumbers
from deltacheck.store.files import storage as place
from deltacheck.store.files.background import Background, Task
from deltacheck.store.files.storage import Place

# The two distributions of Lightning, and the packages of their interface ``CheckpointIO``. Each
# Trainer tests for its own.
_DISTRIBUTIONS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_RNG = "deltacheck.rng"  # permanent: key of the random states in a checkpoint


class _Task(NamedTuple):
    """A change of a file that is under way. ``leaves_file``: the file exists after it."""

    path: Path
    leaves_file: bool
    work: Task[None]


@typed
class DeltaCheckIO:
    """A ``CheckpointIO`` for Lightning.

    A save of ``ModelCheckpoint`` returns while the checkpoint is written. The next call, or the end
    of the training, raises its failure. Any other save (``trainer.save_checkpoint``, the
    checkpoints of Slurm, of ``OnExceptionCheckpoint`` and of ``Fabric``) returns when its file is
    there. Outside of a training it also gives the root back. The trainer's loggers get
    ``deltacheck/saves``, ``bytes``, ``blocking_seconds`` and ``durable_seconds``.

    Args:
        root: The root of the steps, a directory or the address of a prefix of an object store.
            Default: ``deltacheck`` beside the first file that is saved.
        rng: Save the random states of all ranks, too, and set them when a checkpoint is loaded, so
            that a resumed training is equal bit for bit. Default: the generators are not touched,
            and Lightning saves none of them.
        **engine: Arguments of ``Engine``. ``keep`` may only name leaves: Lightning removes steps.

    Raises:
        ValueError: ``keep`` removes steps.
        ModuleNotFoundError: Lightning is not installed.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, rng: bool = False, **engine: Any
    ) -> None:
        if not (engine.get("keep") or Keep()).all_steps:
            raise ValueError(
                "Lightning says which checkpoints are removed: ModelCheckpoint(save_top_k=...), not"
                f" {engine['keep']}"
            )
        # Lightning tests plugins with ``isinstance``. A registration needs no base class, so this
        # module can be imported without Lightning.
        _register(type(self))
        self._folder = None if root is None else place.of(root, engine.get("storage"))
        self._rng = rng
        self._options = engine
        self._engine: Engine | None = None
        self._worker: Background | None = None
        self._under_way: deque[_Task] = deque()
        # The file that ``ModelCheckpoint`` is saving, and whether a training runs.
        self._in_background: Path | None = None
        self._is_running = False
        # What was loaded, until a save continues from it.
        self._loaded: ReadStep | None = None
        self._save_numbers = SaveNumbers()
        self._random_states: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments alone, as part of a ``Trainer``. The copy opens the root anew."""
        root = None if self._folder is None else str(self._folder)
        make = functools.partial(type(self), root, rng=self._rng, **self._options)
        return make, ()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Save a checkpoint; for ``ModelCheckpoint``, begin to save it.

        Args:
            checkpoint: The checkpoint as Lightning made it.
            path: The file that will point to the step.
            storage_options: Must be ``None``.

        Raises:
            UnsupportedLeaf: A value cannot be kept exactly, such as a hyperparameter that is an
                object.
            TypeError: ``storage_options`` is given.
            SaveFailed: This save failed, or an earlier one.
        """
        if storage_options is not None:
            raise TypeError(
                "DeltaCheckIO takes no storage_options; give it the options of Engine when it is"
                " made"
            )
        # This raises the failures of saves that have ended, without a wait for those under way.
        self._settle(wait=False)
        target = _local(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if self._engine is None:
            self._engine = self._open(target)
        # A new dict, because Lightning's own dict must stay as it is.
        states = {_RNG: self._random_states or rng.states()} if self._rng else {}
        content = {**checkpoint, **states}
        handle = self._engine.save(int(checkpoint.get("global_step", 0)), content)
        self._enqueue(target, True, functools.partial(_publish, self._engine, handle, target))
        # A signal handler may save another file while ``ModelCheckpoint`` saves.
        if target != self._in_background:
            self._settle()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, also one that Lightning has written itself. No code of it is run.

        The next save to the same root is written as changes to it.

        Args:
            path: The file that points to the step, or a file of ``torch.save``.
            map_location: The device of the tensors, as for ``torch.load``. Default: the host.
            weights_only: Ignored: no code of a checkpoint is run.

        Returns:
            The checkpoint.

        Raises:
            FileNotFoundError: There is no such file.
            Damaged: The step is damaged, or the file cannot be read without running code from it.
            StepNotFound: The root no longer has the step.
        """
        # The path may belong to a save under way, whose pointer is not written yet.
        self._settle()
        file = _local(path)
        if not file.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        self._loaded = None
        checkpoint: dict[str, Any]
        if not pointer.is_pointer(file):
            checkpoint = torch_import.read_torch(file, map_location)
        elif self._engine is None:
            self._loaded, checkpoint = read_to_continue(file, map_location)
        else:
            checkpoint = load(path, map_location=map_location)
        # Removed even if it is not used, because Lightning does not know the key.
        states = checkpoint.pop(_RNG, None)
        if self._rng and states is not None:
            rng.restore_rank(states, dist.get_rank() if _has_ranks() else 0)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a file and the step that it points to, once the saves under way are done.

        Of a symbolic link only the link is deleted. A file or folder of another origin is deleted,
        too: Lightning has made it.

        Args:
            path: The file.

        Raises:
            SaveFailed: An earlier save failed.
        """
        self._settle(wait=False)
        target = _local(path)
        if self._engine is not None:
            self._enqueue(target, False, functools.partial(_remove, self._engine, target))
        elif not pointer.is_pointer(target) or target.is_symlink():
            _remove(None, target)
        else:
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
        self._loaded = None
        try:
            self._settle()
        finally:
            # The worker ends before the engine, which its last actions still use.
            if worker is not None:
                worker.close()
            if engine is not None:
                engine.close()

    def _open(self, target: Path) -> Engine:
        """Open the root, and continue from the loaded step if it is one of it."""
        engine = Engine(self._folder or target.parent / "deltacheck", **self._options)
        engine.on_commit(self._save_numbers.add)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and _is_root(engine, loaded.root):
            # If the step was deleted since, the save writes whole leaves.
            with contextlib.suppress(StepNotFound, FileNotFoundError):
                if pointer.opened(loaded.path)[1] == loaded.reader.manifest:
                    engine._continue_from(loaded.reader)
        return engine

    # --- for the methods of Lightning that are wrapped --------------------------------------------

    @contextlib.contextmanager
    def _saving_in_background(self, path: str | os.PathLike[str]) -> Iterator[None]:
        before, self._in_background = self._in_background, _local(path)
        try:
            yield
        finally:
            self._in_background = before

    @contextlib.contextmanager
    def _running(self, *, continues: bool) -> Iterator[None]:
        """Return a context in which the root stays open. ``continues``: this process will save."""
        if not continues:
            self._loaded = None
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _report(self, trainer: Any, *, wait: bool = False) -> None:
        """Give the cost of the saves since the last call to the loggers of the trainer.

        ``wait``: also of those under way. Whether one fails is found later.
        """
        for task in self._under_way if wait else ():
            task.work.wait()
        numbers = self._save_numbers.take()
        for logger in trainer.loggers if numbers else ():
            logger.log_metrics(numbers, step=trainer.global_step)

    @contextlib.contextmanager
    def _gathering(self) -> Iterator[None]:
        """Give a save the random states of all ranks, each of which makes this call."""
        if self._rng and _has_ranks():
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, rng.states())
            self._random_states = {rng.rank_key(n): one for n, one in enumerate(states)}
        try:
            yield
        finally:
            self._random_states = None

    def _saved_outside(self) -> None:
        """Give the root back if nobody would do it later."""
        if not self._is_running and self._in_background is None:
            self.teardown()

    def _will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether a file is there after all changes under way; ``None``: none is of it."""
        for file in (_local(path), _local(path).resolve()):
            for task in reversed(self._under_way):
                if task.path == file and not task.work.done():
                    return task.leaves_file
        return None

    # --- changes of files -------------------------------------------------------------------------

    def _enqueue(self, path: Path, leaves_file: bool, action: Callable[[], None]) -> None:
        """Run an action behind the training, after all earlier ones."""
        if self._worker is None:
            # One thread, so that files appear and disappear in the order of Lightning's calls.
            self._worker = Background(1, "deltacheck-files")
        self._under_way.append(_Task(path, leaves_file, self._worker.start(action)))

    def _settle(self, wait: bool = True) -> None:
        """Raise the first failure, once. ``wait``: wait for the actions under way first."""
        errors = []
        # Each is taken out before it is looked at, so that no failure is raised twice, also if a
        # signal handler saves in between.
        while self._under_way and (wait or self._under_way[0].work.done()):
            task = self._under_way.popleft()
            task.work.wait()
            errors.append(task.work.error)
        for error in filter(None, errors):
            raise error


def _register(kind: type[DeltaCheckIO]) -> None:
    """Register a ``CheckpointIO`` with every imported Lightning, or with the installed one."""
    imported = [
        names for names in _DISTRIBUTIONS.items() if any(name in sys.modules for name in names)
    ]
    found = False
    for trainer, fabric in imported or _DISTRIBUTIONS.items():
        try:
            interface = importlib.import_module(f"{fabric}.plugins.io.checkpoint_io")
        except ModuleNotFoundError:
            continue
        interface.CheckpointIO.register(kind)
        found = True
        # Fabric may be installed without the Trainer.
        with contextlib.suppress(ModuleNotFoundError):
            package = importlib.import_module(trainer)
            _wrap(package.callbacks.ModelCheckpoint, "_save_checkpoint", _save_in_background)
            _wrap(package.callbacks.ModelCheckpoint, "file_exists", _file_exists)
            averaging = package.callbacks.StochasticWeightAveraging
            _wrap(averaging, "on_train_epoch_start", _average)
            _wrap(averaging, "on_train_end", _average)
            _wrap(package.Trainer, "save_checkpoint", _save_and_close)
            _wrap(package.Trainer, "_run_stage", _run_stage)
            _wrap(package.Trainer, "_teardown", _teardown)
        if not imported:
            break
    if not found:
        raise ModuleNotFoundError("DeltaCheckIO needs Lightning: pip install lightning")


def _wrap(kind: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let a function replace a method of Lightning, once.

    A version without a method only loses speed: every save then waits for its file.
    """
    original = getattr(kind, name, None)
    if original is None or getattr(original, "_deltacheck", False):
        return

    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(functools.partial(original, owner), owner, *args, **kwargs)

    method._deltacheck = True  # type: ignore[attr-defined]
    setattr(kind, name, method)


def _plugin_of(trainer: Any) -> DeltaCheckIO | None:
    """Return the plugin of a trainer, which may be inside another one, such as an asynchronous."""
    plugin = getattr(getattr(trainer, "strategy", None), "_checkpoint_io", None)
    # Plugins inside plugins are rare, and a mock has any attribute.
    for _ in range(4):
        if isinstance(plugin, DeltaCheckIO):
            return plugin
        plugin = getattr(plugin, "_checkpoint_io", None)
    return None


def _save_in_background(
    original: Callable[..., Any], callback: Any, trainer: Any, filepath: str
) -> Any:
    """Replace ``ModelCheckpoint._save_checkpoint``."""
    plugin = _plugin_of(trainer)
    if plugin is None:
        return original(trainer, filepath)
    with plugin._saving_in_background(filepath):
        result = original(trainer, filepath)
    plugin._report(trainer)
    return result


def _file_exists(original: Callable[..., Any], callback: Any, filepath: str, trainer: Any) -> Any:
    """Replace ``ModelCheckpoint.file_exists``, which decides for all ranks."""
    plugin = _plugin_of(trainer)
    expected = None if plugin is None else plugin._will_exist(filepath)
    if expected is None:
        return original(filepath, trainer)
    return trainer.strategy.reduce_boolean_decision(expected, all=False)


def _average(original: Callable[..., Any], callback: Any, trainer: Any, module: Any) -> Any:
    """Replace hooks of ``StochasticWeightAveraging`` that write to weights past their ``data``."""
    plugin = _plugin_of(trainer)
    if plugin is not None and plugin._engine is not None:
        plugin._engine.before_update()
    return original(trainer, module)


def _save_and_close(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.save_checkpoint``, which nothing follows outside of a training."""
    plugin = _plugin_of(trainer)
    if plugin is None:
        return original(*args, **kwargs)
    # Lightning calls the plugin itself on one rank only.
    with plugin._gathering():
        result = original(*args, **kwargs)
    plugin._saved_outside()
    return result


def _run_stage(original: Callable[..., Any], trainer: Any) -> Any:
    """Replace ``Trainer._run_stage``, which ``teardown`` follows, also after an error."""
    plugin = _plugin_of(trainer)
    if plugin is None:
        return original()
    if trainer.state.fn == "fit":
        _require_parameters(trainer)
    continues = trainer.is_global_zero and trainer.state.fn == "fit"
    with plugin._running(continues=continues):
        result = original()
    plugin._report(trainer, wait=True)
    # The first rank has waited for its files, which any rank may read now.
    trainer.strategy.barrier()
    return result


def _require_parameters(trainer: Any) -> None:
    """Check the hyperparameters, which never change, before anything is trained.

    Raises:
        UnsupportedLeaf: A checkpoint cannot keep one.
    """
    for owner in (trainer.lightning_module, trainer.datamodule):
        parameters = getattr(owner, "hparams", None)
        if not parameters:
            continue
        # As Lightning puts them into a checkpoint.
        plain = dict(parameters) if isinstance(parameters, dict) else parameters
        try:
            leaves.flatten({owner.CHECKPOINT_HYPER_PARAMS_KEY: plain})
        except UnsupportedLeaf as error:
            raise UnsupportedLeaf(
                f"{error}. It is a hyperparameter of {type(owner).__qualname__}, and no checkpoint"
                " could be saved: give save_hyperparameters() plain values (str(path);"
                " OmegaConf.to_container(config) for a config of OmegaConf), or leave it out with"
                " save_hyperparameters(ignore=[...])"
            ) from None


def _teardown(original: Callable[..., Any], trainer: Any) -> Any:
    """Replace ``Trainer._teardown``: a plugin around this one may forget it."""
    plugin = _plugin_of(trainer)
    try:
        return original()
    finally:
        if plugin is not None:
            plugin.teardown()


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _local(path: str | os.PathLike[str]) -> Path:
    return place.local(path, "DeltaCheckIO").absolute()


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
    # A file of another origin at the path is replaced, and so is a link, but no step belongs to it.
    before = pointer.read(path) if pointer.is_pointer(path) and not path.is_symlink() else None
    if path.is_symlink():
        path.unlink()
    pointer.write(path, pointer.Pointer(_root(engine), report.step, report.seq))
    # The old step is deleted after the new pointer is durable. A crash in between leaves a step
    # without a file, never a file without its step.
    if before is not None:
        _delete(engine, before)


def _remove(engine: Engine | None, path: Path) -> None:
    target = pointer.read(path) if pointer.is_pointer(path) and not path.is_symlink() else None
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    # The file first, for the same reason as in ``_publish``.
    if target is not None and engine is not None:
        _delete(engine, target)


def _delete(engine: Engine, target: pointer.Pointer) -> None:
    # The file may be of another run, and its root may belong to another process.
    if _is_root(engine, target.root):
        engine._writer.delete_checkpoint(target.seq)


def _is_root(engine: Engine, root: Place) -> bool:
    # By name: a pointer does not say how its object store is reached.
    return str(root) == str(_root(engine))


def _root(engine: Engine) -> Place:
    return engine.root.resolve() if isinstance(engine.root, Path) else engine.root
