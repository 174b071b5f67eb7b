"""Announce writes through ``.data`` of parameters, and those of ``Module.load_state_dict``.

No version counter of torch shows the former. Both are usual outside of an optimizer.

Loops that swap weights for their moving averages, and adapters that are merged, write to
``parameter.data``. While an engine exists, ``torch.nn.Parameter.data`` is therefore a property that
calls the watchers before it returns the alias. It adds well under a microsecond to each access.
Parameters of FSDP2 are DTensors, which do not inherit from ``Parameter``, so such classes get the
property when they are first seen (``cover``). Compiled code does not use it: TorchDynamo traces
``.data`` by itself, without a graph break.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from deltacheck.store.lock.interrupts import Lock

Watcher = Callable[[torch.Tensor], None]

_DATA: Any = torch.Tensor.data
_LOAD_STATE_DICT: Any = torch.nn.Module.load_state_dict
_watchers: tuple[Watcher, ...] = ()
_covered: set[type] = set()
_lock = Lock()


def _get(parameter: torch.Tensor) -> torch.Tensor:
    for watcher in _watchers:
        watcher(parameter)
    tensor: torch.Tensor = _DATA.__get__(parameter)
    return tensor


def _set(parameter: torch.Tensor, value: torch.Tensor) -> None:
    # An assignment gives the parameter other memory. A save keeps the memory that it reads.
    _DATA.__set__(parameter, value)


@functools.wraps(_LOAD_STATE_DICT)
def _load_state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    for tensor in chain(module.parameters(), module.buffers()):
        for watcher in _watchers:
            watcher(tensor)
    return _LOAD_STATE_DICT(module, *args, **kwargs)


def add(watcher: Watcher) -> None:
    """Call ``watcher`` before each access to ``.data`` of a parameter, and before a module loads.

    Args:
        watcher: Called with the parameter, on the thread of the access.
    """
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)
        if torch.nn.Module.load_state_dict is _LOAD_STATE_DICT:
            torch.nn.Module.load_state_dict = _load_state_dict  # type: ignore[assignment,method-assign]
    cover([torch.nn.Parameter])


def cover(kinds: Iterable[type]) -> None:
    """Call the watchers for tensors of these classes, too, until the last watcher is removed.

    Args:
        kinds: Classes of parameters. A class with a ``data`` of its own, or of a covered class,
            stays as it is, and so does ``torch.Tensor``, with whose members torch compares.
    """
    with _lock:
        for kind in kinds:
            if _watchers and kind is not torch.Tensor and getattr(kind, "data", None) is _DATA:
                kind.data = property(_get, _set)  # type: ignore[attr-defined]
                _covered.add(kind)


def remove(watcher: Watcher) -> None:
    """Undo ``add``; without watchers, parameters are as torch made them.

    Args:
        watcher: The same object. A second call does nothing.
    """
    global _watchers
    with _lock:
        _watchers = tuple(other for other in _watchers if other is not watcher)
        if not _watchers:
            for kind in _covered:
                del kind.data  # type: ignore[attr-defined]
            _covered.clear()
            if torch.nn.Module.load_state_dict is _load_state_dict:
                torch.nn.Module.load_state_dict = _LOAD_STATE_DICT  # type: ignore[method-assign]
