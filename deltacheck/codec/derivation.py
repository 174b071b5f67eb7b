"""The rules by which leaves follow from stored content: one class for each.

A rule works element by element and gives the same bits on every machine. A new one is a class, an
entry in ``RULES``, and a row of the table in ``docs/reference/format.md``, section 3. It needs a
feature of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import msgspec
import numpy as np

from deltacheck.codec import adam_law
from deltacheck.codec.base import LAW_PARTS
from deltacheck.codec.lossy import lattice, nested, octaves, ratios
from deltacheck.leaf.dtypes import dtype_named

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Out: TypeAlias = Array | None  # memory for a result; None: new memory


class Derived(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The rule by which a leaf of the tree follows from stored leaves (``format.md``, section 3).

    Attributes:
        how: Name of the rule (``RULES``).
        dtype: Element type.
        shape: Shape of the leaf.
        digest: Digest of the leaf's bytes, if they are exact.
        of: The source leaf; of codes, the leaf whose cells bound the values, or the second moment
            whose root is their unit. Codes of ``lattice`` may be without one.
        spacing: Step of the lattice, or of the ratios to the root.
        seed: Seed of the lattice.
        halvings: The number of times that the spacing of the lattice was halved.
        spare_bits: The number of bits of a lattice code that later halvings can take.
        fraction_bits: Precision of the octaves.
        scale: Factor of second moments.
        limit: Bound of ``m^2 / v`` of ratios.
        part: The part of a group that the leaf is.
    """

    how: str
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""
    of: str = ""
    spacing: float = 0.0
    seed: int = 0
    fraction_bits: int = 0
    scale: float = 1.0
    limit: float = 0.0
    halvings: int = 0
    spare_bits: int = 0
    part: int = 0

    @property
    def is_part(self) -> bool:
        """True if the leaf is a part of a group, which is stored under the path of part 0."""
        return self.how == "group"

    @property
    def sources(self) -> tuple[str, ...]:
        """The leaves of the tree that this one is computed from."""
        return (self.of,) if self.of else ()


class Rule(ABC):
    """The interface of a rule."""

    def code_dtypes(self, derived: Derived) -> tuple[str, ...]:
        """Return the element types that the codes of a leaf may have; empty: it has no codes."""
        return ()

    def code_shape(self, derived: Derived) -> tuple[int, ...]:
        """Return the shape of the codes of a leaf."""
        return derived.shape

    @abstractmethod
    def fits(self, derived: Derived, source: str) -> bool:
        """Return True if element types and parameters are those of a leaf that can be computed.

        Args:
            derived: The record of the leaf.
            source: The element type of the leaf ``of``, which has the same shape; empty: there is
                none.
        """

    @abstractmethod
    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        """Compute some elements of a leaf that fits, before ``scale``.

        Args:
            derived: The record of the leaf.
            codes: As in ``compute``; an array if the rule has codes.
            source: As in ``compute``; an array if the record has ``of``.
            first: As in ``compute``.
            out: Memory for the elements, which a rule without codes need not use.

        Raises:
            ValueError: A code stands for no value.
        """


class Same(Rule):
    """The leaf ``of``, bit for bit."""

    def fits(self, derived: Derived, source: str) -> bool:
        return derived.dtype == source

    def values(self, derived: Derived, codes: Any, source: Array, first: int, out: Out) -> Array:
        # The source is a leaf of its own and must not be scaled with this one.
        return source if derived.scale == 1.0 else source.copy()


class Cast(Rule):
    """The leaf ``of``, each element rounded to another floating type."""

    def fits(self, derived: Derived, source: str) -> bool:
        return all(dtype.startswith(("float", "bfloat")) for dtype in (derived.dtype, source))

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        return cast(source, dtype_named(derived.dtype).numpy)


class OnLattice(Rule):
    """Codes on a lattice; those of one or two bytes are relative to the weights ``of``."""

    def code_dtypes(self, derived: Derived) -> tuple[str, ...]:
        return ("int32", "uint8", "uint16") if derived.of else ("int32",)

    def fits(self, derived: Derived, source: str) -> bool:
        return (
            derived.dtype == "float32"
            and source in ("", "bfloat16")
            and 2.0**-149 <= derived.spacing < 2.0**128
            and 0 <= derived.halvings <= lattice.MOST_HALVINGS
            and 0 <= derived.spare_bits <= lattice.MOST_SPARE_BITS
            and derived.spacing * 2.0**derived.halvings < 2.0**128
        )

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        values_of = lattice.values if codes.dtype == np.int32 else nested.values
        return values_of(
            codes,
            derived.spacing,
            derived.seed,
            halvings=derived.halvings,
            spare_bits=derived.spare_bits,
            weights=source,
            out=out,
            start=first,
        )


class Drawn(Rule):
    """A random value of the cell of each weight ``of``, by the phase of a lattice."""

    def fits(self, derived: Derived, source: str) -> bool:
        return derived.dtype == "float32" and source == "bfloat16"

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        return nested.drawn(derived.seed, weights=source, out=out, start=first)


class Octaves(Rule):
    """Codes of second moments on a logarithmic scale."""

    def code_dtypes(self, derived: Derived) -> tuple[str, ...]:
        return ("uint8" if derived.fraction_bits == 0 else "uint16",)

    def fits(self, derived: Derived, source: str) -> bool:
        fraction_bits = derived.fraction_bits
        return derived.dtype == "float32" and 0 <= fraction_bits <= octaves.MOST_FRACTION_BITS

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        return octaves.values(codes, fraction_bits=derived.fraction_bits, out=out)


class Ratio(Rule):
    """Codes of first moments, in steps of the root of the second moment ``of``."""

    def code_dtypes(self, derived: Derived) -> tuple[str, ...]:
        return ("int8",)

    def fits(self, derived: Derived, source: str) -> bool:
        return (
            derived.dtype == source == "float32"
            and 2.0**-32 <= derived.spacing <= 2.0**32
            and 0 <= derived.limit < math.inf
        )

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        return ratios.values(codes, source, derived.spacing, limit=derived.limit, out=out)


class PartOfGroup(Rule):
    """A part of a group: the weight, m or v of a parameter, which are stored together.

    The group is stored under the path of the weight. The others name the weight as ``of``.
    ``restore.leaf_kinds`` finds the elements.
    """

    def code_dtypes(self, derived: Derived) -> tuple[str, ...]:
        return () if derived.of else ("float32",)

    def code_shape(self, derived: Derived) -> tuple[int, ...]:
        return adam_law.group_shape(math.prod(derived.shape))

    def fits(self, derived: Derived, source: str) -> bool:
        return (
            derived.dtype == "float32"
            and source in ("", "float32")
            and 0 <= derived.part < LAW_PARTS
            and (derived.part == 0) == (derived.of == "")
        )

    def values(self, derived: Derived, codes: Any, source: Any, first: int, out: Out) -> Array:
        raise NotImplementedError


# By ``how`` of the leaves that follow them. The names are permanent: existing roots hold them.
RULES: dict[str, Rule] = {
    "same": Same(),
    "cast": Cast(),
    "lattice": OnLattice(),
    "drawn": Drawn(),
    "octaves": Octaves(),
    "ratio": Ratio(),
    "group": PartOfGroup(),
}


def is_possible(derived: Derived, codes: str, source: str) -> bool:
    """Return True if a leaf can follow as its record says.

    Args:
        derived: The record.
        codes: The element type of the codes that are stored under the leaf's path; empty: nothing
            is stored there.
        source: The element type of the leaf ``of``; empty: there is none.
    """
    rule = RULES.get(derived.how)
    return (
        rule is not None
        and codes in (rule.code_dtypes(derived) or ("",))
        and rule.fits(derived, source)
        and 0 <= derived.seed < 1 << 64
        and 0 < derived.scale < 2.0**128
        and (derived.scale == 1.0 or (derived.dtype == "float32" and not derived.is_part))
        and (derived.part == 0 or derived.is_part)
    )


def code_shape(derived: Derived) -> tuple[int, ...]:
    """Return the shape of the codes that are stored of a leaf with a known rule."""
    return RULES[derived.how].code_shape(derived)


def compute(
    derived: Derived, codes: Array | None, source: Array | None, first: int, out: Out = None
) -> Array:
    """Compute elements of a derived leaf.

    Args:
        derived: The formula.
        codes: The same elements of the codes that are stored under the leaf's path, 1-D.
        source: The same elements of the leaf ``of``, 1-D.
        first: The first element.
        out: Memory for elements that are computed from codes, in the leaf's dtype; ``None``: new
            memory.

    Returns:
        The elements, 1-D: ``out``, new memory, or a source that they equal.

    Raises:
        ValueError: A code stands for no value.
    """
    values = RULES[derived.how].values(derived, codes, source, first, out)
    if derived.scale == 1.0:
        return values
    with np.errstate(all="ignore"):  # overflows concern codes that no save wrote
        return np.multiply(values, np.float32(derived.scale), out=values)


def cast(values: Array, element: np.dtype[Any]) -> Array:
    """Round to another floating type, to nearest, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are kept
        return values.astype(element)
