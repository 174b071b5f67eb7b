"""Read ``torch.save`` files with arrays of NumPy, paths and ``BytesIO``, and run no code of them.

NumPy restores arrays from pickles by ``ndarray.__setstate__`` and ``dtype.__setstate__``, which
trust what they are given. Here the names that a file refers to stand for classes of this module,
which accept numbers and texts of NumPy in plain layouts only. Paths and ``BytesIO`` hold nothing
but text and bytes.
"""

from __future__ import annotations

import io
import math
import pathlib
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

# What ``numpy.dtype`` is called with: bool, integers, floats, complex numbers, and texts.
_KINDS = "biufcUS"


class _Dtype:
    """A ``numpy.dtype``."""

    def __init__(self, name: str, *_: object) -> None:
        self.dtype = np.dtype(name)
        if self.dtype.kind not in _KINDS:
            raise ValueError(f"NumPy arrays of type {name} are not read")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # The second element is the byte order; the others belong to types that are refused.
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"{order!r} is no byte order")
        self.dtype = self.dtype.newbyteorder(order)


class _NdArray:
    """The class ``numpy.ndarray``, which files name and never call."""


class _Array:
    """An array that is read."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.value = _array(shape, dtype, content, "F" if is_fortran else "C")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    if kind is not _NdArray:
        raise ValueError("subclasses of NumPy arrays are not read")
    return _Array()


def _scalar(dtype: _Dtype, content: bytes) -> Any:
    return _array((), dtype, content, "C")[()]


def _array(shape: tuple[int, ...], dtype: _Dtype, content: Any, order: Any) -> np.ndarray:
    """Return an array in native byte order, with memory of its own."""
    # A protocol without bytes writes them as text.
    data = content.encode("latin1") if isinstance(content, str) else bytes(content)
    if len(data) != math.prod(shape) * dtype.dtype.itemsize:
        raise ValueError(f"an array of shape {shape} has {len(data)} bytes")
    array = np.frombuffer(data, dtype.dtype).reshape(shape, order=order)
    return array.astype(dtype.dtype.newbyteorder("="), order="C")


def _no_bytes() -> bytes:
    """Return the bytes of an array without elements, which are pickled as ``bytes()``."""
    return b""


_GLOBALS: list[Any] = [
    (_no_bytes, "__builtin__.bytes"),
    (_no_bytes, "builtins.bytes"),
    (_Array, f"{__name__}.{_Array.__name__}"),
    (_NdArray, "numpy.ndarray"),
    (_Dtype, "numpy.dtype"),
    *(
        (function, f"numpy.{package}.multiarray.{name}")
        for package in ("_core", "core")
        for function, name in ((_reconstruct, "_reconstruct"), (_scalar, "scalar"))
    ),
    (io.BytesIO, "_io.BytesIO"),
    # Python has moved them. A path of another system cannot be made.
    *(
        (kind, f"{module}.{kind.__name__}")
        for module in ("pathlib", "pathlib._local")
        for kind in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    ),
]


def load(path: Any, **options: Any) -> object:
    """Return the content of a file of ``torch.save``. No code of it is run.

    Args:
        path: The file.
        **options: Options of ``torch.load``.

    Raises:
        Exception: As ``torch.load(weights_only=True)`` does, also for arrays of objects, of records
            and of dates.
    """
    with torch.serialization.safe_globals(_GLOBALS):
        return _with_arrays(torch.load(path, weights_only=True, **options))


def _with_arrays(value: Any) -> Any:
    """Return a state with the arrays in the places of ``_Array``."""
    if type(value) is _Array:
        return value.value
    if type(value) in (dict, OrderedDict):
        for key in value:
            value[key] = _with_arrays(value[key])
    elif type(value) is list:
        value[:] = map(_with_arrays, value)
    elif type(value) is tuple:
        return tuple(map(_with_arrays, value))
    return value


def refusal(error: Exception) -> str:
    """Return the reason why a file was not read, in one line, without torch's advice to run it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    blocked = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)", text)
    if blocked:
        return f"it contains {blocked[1]}"
    reason = re.search(r"WeightsUnpickler error:\s*([^\n]+)", text)
    lines = [reason[1]] if reason else text.strip().split("\n")
    own_words = (line for line in lines if line and "weights_only" not in line)
    return next(own_words, "torch refuses it")
