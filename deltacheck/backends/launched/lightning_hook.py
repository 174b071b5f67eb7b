"""Give a Lightning ``Trainer`` the plugin, and the newest step when it begins to fit."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from deltacheck.backends.launched.launch_options import LaunchOptions, TrainingRoots, say, say_begin
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.files.load import load
from deltacheck.backends.torch.lightning import _DISTRIBUTIONS, _RNG, DeltaCheckIO, _plugin_of
from deltacheck.errors import NotACheckpointRoot
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place
from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.opening import open_root

_OPTIMIZERS = "optimizer_states"  # of a checkpoint of Lightning
_roots = TrainingRoots()


class LaunchedIO(DeltaCheckIO):
    """The plugin of a trainer that ``deltacheck run`` has started."""

    def use_root(self, root: Place) -> None:
        """Save to a root from here on. No save is under way."""
        self._folder = root


def init(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``Trainer.__init__``: add the plugin, unless the script has one for checkpoints."""
    value = kwargs.get("plugins")
    plugins = list(value) if isinstance(value, Iterable) else [value] if value is not None else []
    fabric = _DISTRIBUTIONS[_package(trainer)]
    interface = import_module(f"{fabric}.plugins.io.checkpoint_io").CheckpointIO
    if not any(isinstance(plugin, interface) for plugin in plugins):
        # Without random states a resumed training would not be that of before.
        plugins.append(LaunchedIO(rng=True, **LaunchOptions.of_environment().engine()))
        kwargs["plugins"] = plugins
        _let_torch_load_pointers()
    original(trainer, *args, **kwargs)


def fit(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``Trainer.fit``: continue from the newest step, unless the script names one."""
    options, plugin = LaunchOptions.of_environment(), _plugin_of(trainer)
    if not isinstance(plugin, LaunchedIO):
        options.record("own", trainer=type(trainer).__name__)
        return original(trainer, *args, **kwargs)
    call = inspect.signature(original).bind(trainer, *args, **kwargs)
    request = call.arguments.get("ckpt_path")
    base = options.root or str(Path(trainer.default_root_dir, "deltacheck").absolute())
    root = storage.of(_roots.root(base, continues=request is not None))
    plugin.use_root(root)
    newest = None if request is not None else _newest(root)
    with tempfile.TemporaryDirectory() as folder:
        if newest is not None:
            file = Path(folder, "newest.ckpt")
            pointer.write(file, pointer.Pointer(root, newest.step, newest.seq))
            call.arguments["ckpt_path"] = file
        savers = [] if options.every is None else _savers(trainer, root, options)
        trainer.callbacks.extend(savers)
        if trainer.is_global_zero:
            step = 0 if newest is None else newest.step
            say_begin(options, type(trainer).__name__, str(root), step)
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            for saver in savers:
                trainer.callbacks.remove(saver)
    _roots.end(base)
    return result


def _let_torch_load_pointers() -> None:
    """Let ``torch.load`` and ``load_from_checkpoint`` of a script read the files of the plugin."""
    original = torch.load
    if getattr(original, "_deltacheck", False):
        return

    @functools.wraps(original)
    def load_any(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Lightning gives an open file.
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(path, str | os.PathLike) and pointer.is_pointer(Path(path)):
            checkpoint = load(path, map_location=map_location)
            checkpoint.pop(_RNG, None)
            return checkpoint
        return original(f, map_location, *args, **kwargs)

    load_any._deltacheck = True  # type: ignore[attr-defined]
    torch.load = load_any


def _newest(root: Place) -> Manifest | None:
    try:
        opened = open_root(root)
    except NotACheckpointRoot:
        # The first save says what is there instead, if it cannot be a root.
        return None
    manifests, _ = opened.manifests()
    # ``save_weights_only`` of ``ModelCheckpoint`` leaves out what a training continues from.
    whole = [m for m in manifests.values() if any(key == _OPTIMIZERS for key, _ in m.tree["k"])]
    if manifests and not whole:
        say(f"{root} has weights only, so fit begins anew: add --every N to save whole steps")
    return whole[-1] if whole else None


def _savers(trainer: Any, root: Place, options: LaunchOptions) -> list[Any]:
    """Return callbacks that save every so many steps, and at the end of each epoch.

    Lightning continues exactly from the end of an epoch only, also with a save of the same step.
    """
    checkpoint = import_module(f"{_package(trainer)}.callbacks").ModelCheckpoint
    keep = -1 if options.keep is None else options.keep
    # The files that point to steps are local, wherever the steps are.
    beside = root.parent if isinstance(root, Path) else Path(trainer.default_root_dir)
    common = {
        "dirpath": str(beside / f"{root.name}-files"),
        "monitor": "step",
        "mode": "max",
        "save_top_k": keep,
    }
    return [
        checkpoint(filename="{step}", every_n_train_steps=options.every, **common),
        checkpoint(filename="{epoch}-{step}", save_on_train_epoch_end=True, **common),
    ]


def _package(trainer: Any) -> str:
    """Return the package of the Lightning whose trainer it is: two distributions have one."""
    modules = [parent.__module__ for parent in type(trainer).__mro__]
    return next(
        package
        for package in _DISTRIBUTIONS
        if any(module.startswith(f"{package}.") for module in modules)
    )
