"""Instances of classes that the caller has named, as containers of a state.

These are named tuples, dataclasses, enumerations, subclasses of dict, list and tuple, and objects
that have nothing but attributes. They are made again without a call of their ``__init__``, so that
they get exactly the content that was saved.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.containers import Level, Node

# From the most special to the most general.
_BASES: Mapping[type, str] = {OrderedDict: "odict", dict: "dict", list: "list", tuple: "tuple"}


def name_of(kind: type) -> str:
    """Return the name of a class in a skeleton."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_supported(kind: type) -> bool:
    """Return ``True`` for a class whose instances ``level_of`` can describe."""
    return (
        issubclass(kind, Enum)
        or dataclasses.is_dataclass(kind)
        or (issubclass(kind, tuple(_BASES)) and not issubclass(kind, Counter | defaultdict))
    )


def has_attributes_alone(kind: type) -> bool:
    """Return ``True`` for a class whose instances are their ``__dict__``, and no dataclass."""
    # Classes with content of their own, such as ``int``, have a ``__new__`` of their own.
    new: Any = kind.__new__
    return (
        new is object.__new__
        and kind.__dictoffset__ != 0
        and not dataclasses.is_dataclass(kind)
        and not any(map(_slots_of, kind.__mro__))
    )


def level_of(value: Any) -> Level:
    """Return one level of an instance of a supported class.

    Raises:
        UnsupportedLeaf: The instance has content that could not be restored.
    """
    kind = type(value)
    name = name_of(kind)
    if isinstance(value, Enum):
        if kind.__members__.get(value.name) is not value:
            raise UnsupportedLeaf(f"{value!r} is no single member of {name}; save its value")
        return Level({"t": "enum", "c": name, "v": value.name})
    if has_attributes_alone(kind):
        return Level({"t": "object", "c": name}, list(vars(value).items()))
    fields = _fields_of(kind)
    if fields is None:
        base = _base_of(kind)
        pairs: Any = (
            base.items(value) if issubclass(base, dict) else enumerate(base.__iter__(value))
        )
        return Level({"t": _BASES[base], "c": name}, list(pairs), _attributes(value, ()))
    if issubclass(kind, tuple):
        pairs = zip(fields, tuple.__iter__(value), strict=True)
    else:
        try:
            object.__new__(kind)
            pairs = [(field, getattr(value, field)) for field in fields]
        except (TypeError, AttributeError) as error:
            raise UnsupportedLeaf(f"a {name} cannot be kept exactly: {error}") from None
    return Level({"t": "object", "c": name}, list(pairs), _attributes(value, fields))


def instance_of(kind: type, node: Node, plain: object, attributes: Mapping[str, object]) -> object:
    """Return the instance that ``level_of`` has described.

    Args:
        kind: The class.
        node: The node.
        plain: The content: a dict, list or tuple, or the name of a member.
        attributes: The attributes by name.

    Raises:
        TypeError: The class is of another kind, or has other fields, than at the save.
    """
    value: Any
    if issubclass(kind, Enum):
        members = kind.__members__
        if node["t"] != "enum" or plain not in members:
            raise TypeError(f"{name_of(kind)} has no member {plain!r}")
        return members[cast("str", plain)]
    is_object = node["t"] == "object"
    content = cast("dict[str, object]", plain)
    fields = tuple(content) if is_object and has_attributes_alone(kind) else _fields_of(kind)
    if is_object != (fields is not None):
        raise TypeError(f"{name_of(kind)} is no longer what it was when it was saved")
    if fields is not None:
        if list(content) != list(fields):
            raise TypeError(f"{name_of(kind)} has the fields {fields}, saved were {list(content)}")
        if issubclass(kind, tuple):
            value = tuple.__new__(kind, content.values())
        else:
            value = object.__new__(kind)
            # Not ``setattr``, which a frozen dataclass refuses.
            for field, item in content.items():
                object.__setattr__(value, field, item)
    else:
        value = _container_of(kind, node, plain)
    if attributes:
        vars(value).update(attributes)
    return value


def _container_of(kind: type, node: Node, plain: object) -> Any:
    """Return an instance of a subclass of dict, list or tuple."""
    base = _base_of(kind)
    if _BASES[base] != node["t"]:
        raise TypeError(f"{name_of(kind)} is a {_BASES[base]}, saved was a {node['t']}")
    value = base.__new__(kind, *((plain,) if base is tuple else ()))
    if base is list:
        list.extend(value, cast("list[object]", plain))
    elif base is not tuple:
        for key, item in cast("dict[object, object]", plain).items():
            base.__setitem__(value, key, item)
    return value


def _fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a named tuple or dataclass; ``None`` for other classes."""
    if issubclass(kind, tuple):
        fields = getattr(kind, "_fields", None)
        return fields if isinstance(fields, tuple) else None
    if dataclasses.is_dataclass(kind) and not issubclass(kind, tuple(_BASES)):
        return tuple(field.name for field in dataclasses.fields(kind))
    return None


def _base_of(kind: type) -> Any:
    return next(base for base in _BASES if issubclass(kind, base))


def _attributes(value: object, fields: tuple[str, ...]) -> Mapping[str, object]:
    """Return the attributes of an instance that are not among its fields."""
    slots = {
        name
        for base in type(value).__mro__
        for name in _slots_of(base)
        if name not in ("__dict__", "__weakref__", *fields)
    }
    if slots:
        raise UnsupportedLeaf(
            f"{name_of(type(value))} has __slots__, whose content cannot be kept exactly; save its"
            " content as a dict"
        )
    return {
        name: item for name, item in getattr(value, "__dict__", {}).items() if name not in fields
    }


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
