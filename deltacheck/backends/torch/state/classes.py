"""Types of torch, and classes that the user has named, as containers of a state.

A class is named by ``torch.serialization.add_safe_globals``, as for ``torch.load``. A file selects
among the classes that were named in this process, and never causes an import. Tensors that wrap
other tensors are containers of those, by torch's protocol ``__tensor_flatten__``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, cast

import torch
from torch.serialization import get_safe_globals
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import instances
from deltacheck.leaf.containers import Level, Node

# Permanent names of torch's own types.
_SIZE, _DTYPE = "torch.Size", "torch.dtype"
# Wrappers that were made again from their parts, and are what they were.
_proven: set[type] = set()


def expand(value: object) -> Level | None:
    """Return one level of a value of torch, or of a class that the user has named.

    Raises:
        UnsupportedLeaf: The class was not named, or the instance has content that it could not be
            given back.
    """
    kind = type(value)
    if kind is torch.Size:
        return Level({"t": "tuple", "c": _SIZE}, enumerate(cast("torch.Size", value)))
    if kind is torch.dtype:
        return Level({"t": "str", "c": _DTYPE, "v": str(value).removeprefix("torch.")})
    is_tensor = isinstance(value, torch.Tensor)
    is_object = instances.has_attributes_alone(kind)
    if not (is_tensor or is_object or instances.is_supported(kind)):
        return None
    name = instances.name_of(kind)
    if named(name) is not kind:
        if is_object and hasattr(value, "state_dict"):
            return None  # refused with the advice to save that
        instead = _remedy(value)
        raise UnsupportedLeaf(
            f"it is of type {name}. Name the class to keep it, in the process that saves and in"
            f" those that restore: torch.serialization.add_safe_globals([{kind.__qualname__}]); or"
            f" save {instead}"
        )
    return _wrapper_level(value, name) if is_tensor else instances.level_of(value)


def build(path: str, node: Node, plain: object, attributes: Mapping[str, object]) -> object:
    """Return the value of a node of another class than Python's own.

    Args:
        path: The path of the value.
        node: The node.
        plain: The value in Python's own types.
        attributes: The attributes by name.

    Raises:
        UnsupportedLeaf: The class was not named, or is no longer what it was.
    """
    name = cast("str", node["c"])
    try:
        if name == _SIZE:
            return torch.Size(cast("tuple[int, ...]", plain))
        if name == _DTYPE:
            return _dtype_of(cast("str", plain))
        kind = named(name)
        if kind is None:
            raise UnsupportedLeaf(
                f"leaf {path!r} was saved as a {name}, a class that this process has not named:"
                f" torch.serialization.add_safe_globals([{name.rpartition('.')[2]}]) names it."
                " deltacheck.open(root) reads the step without it, in Python's own types"
            )
        if node["t"] == "tensor":
            return _wrapper(kind, cast("dict[str, Any]", plain), attributes)
        return instances.instance_of(kind, node, plain, attributes)
    except UnsupportedLeaf:
        raise
    # The class is the user's code, and a file may hold anything.
    except Exception as error:
        raise UnsupportedLeaf(
            f"leaf {path!r} was saved as a {name}, and cannot be made again:"
            f" {type(error).__name__}: {error}. deltacheck.open(root) reads the step in Python's"
            " own types"
        ) from error


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the content of a tensor: itself, or those that it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in _parts_of(tensor)[0].values():
        yield from dense_parts(part)


def _parts_of(tensor: object) -> tuple[dict[str, torch.Tensor], object]:
    wrapper = cast(Any, tensor)
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def _wrapper_level(value: object, name: str) -> Level:
    tensor = cast(torch.Tensor, value)
    parts, context = _parts_of(value)
    attributes = {
        "context": context,
        "size": tuple(tensor.size()),
        "stride": tuple(tensor.stride()),
        "dtype": tensor.dtype,
    }
    # Once for each class: the protocol is for compilers, and a class may forget something in it.
    if type(value) not in _proven:
        try:
            _wrapper(type(value), parts, attributes)
        except Exception as error:
            raise UnsupportedLeaf(
                f"it is a {name}, which cannot be made again from its parts"
                f" ({type(error).__name__}: {error}); save {_remedy(value)}"
            ) from error
        _proven.add(type(value))
    return Level({"t": "tensor", "c": name}, list(parts.items()), attributes)


def _wrapper(kind: type, parts: Mapping[str, Any], attributes: Mapping[str, object]) -> object:
    if not issubclass(kind, torch.Tensor):
        raise TypeError("it is no longer a tensor")
    size = torch.Size(cast("tuple[int, ...]", attributes["size"]))
    wrapped = cast(Any, kind).__tensor_unflatten__(
        dict(parts), attributes["context"], size, attributes["stride"]
    )
    if (type(wrapped), wrapped.size(), wrapped.dtype) != (kind, size, attributes["dtype"]):
        raise TypeError(f"its parts give a {wrapped.dtype}{list(wrapped.size())}")
    return wrapped


def named(name: str) -> type | None:
    """Return the class of this name that the user, or a library, has named to torch."""
    for entry in get_safe_globals():
        # A class may be named together with the name that files have for it.
        kind, own_name = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(kind, type) and name in (own_name, instances.name_of(kind)):
            return kind
    return None


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype


def _remedy(value: object) -> str:
    """Return, in words, what can be saved in place of a value."""
    if isinstance(value, torch.Tensor):
        return "the tensors that it wraps, or value.dequantize()"
    if isinstance(value, Enum):
        return "its value"
    if isinstance(value, dict):
        return "dict(value)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "value._asdict()"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(value)"
    return "list(value)" if isinstance(value, list | tuple) else "vars(value)"
