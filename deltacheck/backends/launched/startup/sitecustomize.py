"""Let ``deltacheck run`` reach the trainers of a command. Python imports this module at its start.

Processes that never import a trainer must not notice it, so it imports nothing that Python has not
imported already, and nothing of deltacheck before a trainer is made or trains.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of typing, without its import
if TYPE_CHECKING:
    from typing import Any

# Modules of trainers -> the class, the hook in deltacheck.backends.launched, and the methods that
# it replaces. The functions of a hook have the names of the methods, without underscores.
_LIGHTNING = ("Trainer", "lightning_hook", ("__init__", "fit"))
_WATCHED = {
    "transformers.trainer": ("Trainer", "transformers_hook", ("__init__", "train")),
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
    "accelerate.accelerator": ("Accelerator", "accelerate_hook", ("save_state", "load_state")),
}


class _Watch:
    """A finder that lets the others find a module, and replaces methods once it is executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a watched module; ``None`` for any other."""
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is None:
                continue
            execute = spec.loader.exec_module

            def exec_module(module: Any, execute: Any = execute) -> None:
                execute(module)
                _replace_methods(module, *_WATCHED[name])

            # Of the loader that was found, so that its other methods stay.
            spec.loader.exec_module = exec_module
            return spec
        return None


def _replace_methods(module: Any, class_name: str, hook: str, methods: tuple[str, ...]) -> None:
    kind = getattr(module, class_name)
    for name in methods:
        # A version without a method is told by the end of the command: no training was seen.
        if hasattr(kind, name):
            setattr(kind, name, _replaced(getattr(kind, name), hook, name.strip("_")))


def _replaced(original: Any, hook: str, function: str) -> Any:
    import functools

    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_imported(hook), function)(original, owner, *args, **kwargs)

    return method


def _imported(hook: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"deltacheck.backends.launched.{hook}")
    except ImportError as error:
        # The environment of the command need not be that of the launcher.
        raise ImportError(
            f"deltacheck run cannot save this training: {sys.executable} cannot import deltacheck"
            f" ({error}). Install deltacheck there, with its requirements, or start the command"
            " without `deltacheck run`"
        ) from error


def _mark() -> None:
    """Leave a file beside the events, from which the launcher learns that it has reached Python."""
    events = os.environ.get("DELTACHECK_EVENTS")
    if events is not None and not os.path.exists(f"{events}.python"):
        try:
            os.close(os.open(f"{events}.python", os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError:
            return


def _import_hidden() -> None:
    """Import the ``sitecustomize`` that this one hides, if there is one."""
    hook = sys.modules.pop(__name__)
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        # Python expects one of them there.
        sys.modules.setdefault(__name__, hook)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Watch())
    _mark()
    _import_hidden()
