"""Flatten the states of one item, and describe only what differs from the last save.

A training saves arrays of the same forms in the same containers at every save. ``Outline`` compares
the containers, and the forms and shardings of the arrays are compared with those of the last save.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from deltacheck.backends.numpy_leaves import specs_of
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.saved_shardings import records_of
from deltacheck.codec.extension import native
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.outline import Outline, chosen
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat
from deltacheck.store.manifest import SavedSharding

_aval_of, _sharding_of = attrgetter("aval"), attrgetter("sharding")
_is_deleted = methodcaller("is_deleted")


class KnownArrays(Flat):
    """A flattened state with the structure and the forms of the last save.

    Its leaves have no identities.

    Attributes:
        specs: The specs of all leaves by path, ascending.
        records: The records of the shardings of its arrays.
        viewable: The paths of the arrays that lie whole in the memory of one processor, ascending.
    """

    specs: Mapping[str, LeafSpec]
    records: tuple[SavedSharding, ...]
    viewable: Sequence[str]


class ArrayFlattener:
    """Flattens the states that one process saves alone."""

    def __init__(self) -> None:
        self._memory: _KnownForms | None = None

    def __call__(self, state: object) -> Flat:
        """Return the leaves and the skeleton of a state.

        Raises:
            UnsupportedLeaf, DuplicatePath: As ``tree.flatten`` raises them.
        """
        flat = None if self._memory is None else self._memory.flatten(state)
        if flat is not None:
            return flat
        flat_state = tree.flatten(state, leaves.describe, leaves.expand)
        self._memory = _KnownForms.of(state, flat_state)
        return flat_state


class _Forms(NamedTuple):
    """The forms of the leaves of a state.

    ``ties`` has for each leaf the number of the first one with its identity, and its own for a leaf
    without an identity.
    """

    avals: list[Any]
    shardings: list[Sharding]
    other_leaves: list[Hashable]
    ties: list[int]


class _KnownForms:
    """The structure and the forms of the leaves of the last save. ``of`` makes one."""

    def __init__(self, outline: Outline, flat_state: Flat, values: list[Any]) -> None:
        self._outline = outline
        numbers = {path: number for number, (path, _) in enumerate(outline.owners)}
        self._paths = list(flat_state.arrays)
        self._order = [numbers[path] for path in self._paths]
        self._arrays = [n for n, value in enumerate(values) if _is_plain(value)]
        # Arrays of keys, too: copies of all arrays are planned once for the same places.
        self._array_numbers = [n for n, value in enumerate(values) if isinstance(value, jax.Array)]
        self._other_numbers = [n for n, value in enumerate(values) if not _is_plain(value)]
        forms = self._forms_of(values)
        if forms is None:
            raise UnsupportedLeaf("an array was deleted")
        self._forms = forms
        self._leaves = {
            path: leaf._replace(identity=None) for path, leaf in flat_state.leaves.items()
        }
        self._specs = specs_of(flat_state)
        self._records = records_of(flat_state.arrays)
        self._viewable = [
            path for path, value in flat_state.arrays.items() if leaves.is_viewable(value)
        ]

    @classmethod
    def of(cls, state: object, flat_state: Flat) -> _KnownForms | None:
        """Return what is known after a save; ``None`` if no later state can be compared with it.

        Args:
            state: The state.
            flat_state: The same state, flattened.
        """
        outline = Outline.of(state, flat_state.skeleton, native.matching_children, leaves.expand)
        outlined = None if outline is None else outline.match(state)
        if outline is None or outlined is None:
            return None
        try:
            return cls(outline, flat_state, outlined.leaves)
        except UnsupportedLeaf:
            return None

    def flatten(self, state: object) -> KnownArrays | None:
        """Flatten a state of the same structure and forms; ``None`` for any other.

        Args:
            state: The state.
        """
        try:
            outlined = self._outline.match(state)
            forms = None if outlined is None else self._forms_of(outlined.leaves)
        except UnsupportedLeaf:
            return None
        if outlined is None or forms != self._forms:
            return None
        values = [outlined.leaves[number] for number in self._order]
        flat = KnownArrays(
            outlined.skeleton, dict(zip(self._paths, values, strict=True)), self._leaves
        )
        flat.specs, flat.records, flat.viewable = self._specs, self._records, self._viewable
        return flat

    def _forms_of(self, values: list[Any]) -> _Forms | None:
        """Return the forms of leaves; ``None`` if the content of one is gone."""
        arrays = chosen(values, self._arrays)
        if any(map(_is_deleted, arrays)):
            return None
        other_leaves: list[Hashable] = []
        identities: list[Hashable] = list(map(id, values))
        for number in self._other_numbers:
            leaf = leaves.describe(values[number])
            assert leaf is not None
            other_leaves.append(leaf._replace(identity=None))
            identities[number] = leaf.identity
        firsts: dict[Hashable, int] = {}
        ties = [
            number if identity is None else firsts.setdefault(identity, number)
            for number, identity in enumerate(identities)
        ]
        return _Forms(
            list(map(_aval_of, arrays)),
            list(map(_sharding_of, chosen(values, self._array_numbers))),
            other_leaves,
            ties,
        )


def _is_plain(value: object) -> bool:
    """Return true for an array whose form is that of its ``aval`` and its sharding."""
    return isinstance(value, jax.Array) and not leaves.is_key(value.dtype) and bool(value.size)
