"""The law of Adam in NumPy: an executable form of ``docs/reference/format.md``, section 4.6.

Like ``reference.codec``, it is read beside that document and shares no code with the native
encoder. Every operation is in float32, rounded to nearest, ties to even.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

CANONICAL_NAN = np.uint32(0x7FC00000)
PARTS = 3  # of a chunk: weight, m, v


class Law(NamedTuple):
    """A chunk's entry in the stream ``law``: four uint32 and twelve float32."""

    mean: int
    square: int
    weight: int
    reserved: int
    beta1: np.float32
    rest1: np.float32
    inverse1: np.float32
    beta2: np.float32
    rest2: np.float32
    eps: np.float32
    rate: np.float32
    earlier: np.float32
    keep: np.float32
    pull: np.float32
    scale: np.float32
    unscale: np.float32

    @classmethod
    def of(cls, content: bytes) -> Law:
        """Read an entry."""
        forms = struct.unpack_from("<4I", content)
        numbers = np.frombuffer(content, "<f4", offset=16)
        return cls(*forms, *numbers)

    @property
    def is_known(self) -> bool:
        """Return True if its forms are those of the document."""
        forms = self.mean < len(MEANS) and self.square < len(SQUARES) and self.weight < len(WEIGHTS)
        return forms and self.reserved == 0


def fma(a: F32, b: F32 | np.float32, c: F32) -> F32:
    """Return ``a * b + c``, rounded once."""
    # The product is exact in float64. The sum is rounded to odd there, so that the second rounding
    # cannot go wrong.
    product, addend = a.astype(np.float64) * np.float64(b), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_even = ((bits & 1) == 0) & (error != 0) & np.isfinite(total)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(is_even, bits + towards, bits).view(np.float64).astype(np.float32)


# By the number of the form.
MEANS: list[Callable[[Law, F32, F32], F32]] = [
    lambda law, m, g: m + law.rest1 * (g - m),
    lambda law, m, g: fma(g - m, law.rest1, m),
    lambda law, m, g: law.beta1 * m + law.rest1 * g,
    lambda law, m, g: fma(g, law.rest1, law.beta1 * m),
    lambda law, m, g: fma(m, law.beta1, law.rest1 * g),
]
SQUARES: list[Callable[[Law, F32, F32], F32]] = [
    lambda law, v, g: law.beta2 * v + (law.rest2 * g) * g,
    lambda law, v, g: fma(law.rest2 * g, g, law.beta2 * v),
    lambda law, v, g: law.beta2 * v + law.rest2 * (g * g),
    lambda law, v, g: fma(g * g, law.rest2, law.beta2 * v),
    lambda law, v, g: fma(v, law.beta2, law.rest2 * (g * g)),
]
WEIGHTS: list[Callable[[Law, F32, F32], F32]] = [
    lambda law, w, update: w * law.keep + update,
    lambda law, w, update: w + (update + law.pull * w),
]


def canonical(values: F32) -> F32:
    """Return values with one bit pattern for every NaN."""
    words = np.where(np.isnan(values), CANONICAL_NAN, values.view(np.uint32))
    return words.astype(np.uint32).view(np.float32)


def direction(law: Law, m: F32, v: F32) -> F32:
    """Return the update in learning rates; 0 where it is not finite."""
    quotient = m / (np.sqrt(v) + law.eps)
    return np.where(np.isfinite(quotient), quotient, np.float32(0))


def gradient(law: Law, before: F32, now: F32) -> F32:
    """Return the gradient that leads from one m to the next."""
    return (now - law.beta1 * before) * law.inverse1


def narrow_gradient(law: Law, before: F32, now: F32) -> U16:
    """Return the bfloat16 gradients, as bits, before clipping: the encoder's."""
    words = canonical(gradient(law, before, now) * law.unscale).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + ((words >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def clipped(law: Law, gradients: U16) -> F32:
    """Return stored gradients as they were after clipping."""
    return (gradients.astype(np.uint32) << np.uint32(16)).view(np.float32) * law.scale


def step(law: Law, base: U32, gradients: U16 | None, m: F32 | None) -> U32:
    """Return the prediction of one step.

    Args:
        law: The law.
        base: The chunk before.
        gradients: The gradients, if they are stored.
        m: The next m, if it is stored instead.
    """
    w0, m0, v0 = np.split(base.view(np.float32), PARTS)
    with np.errstate(all="ignore"):
        if gradients is not None:
            g = clipped(law, gradients)
            m = canonical(MEANS[law.mean](law, m0, g))
        else:
            assert m is not None
            g = gradient(law, m0, m)
        v = canonical(SQUARES[law.square](law, v0, g))
        w = canonical(WEIGHTS[law.weight](law, w0, law.rate * direction(law, m, v)))
    return np.concatenate([w, m, v]).view(np.uint32)


def later_square(law: Law, base: U32) -> F32:
    """Return the prediction of v after several steps."""
    with np.errstate(all="ignore"):
        return canonical(law.beta2 * np.split(base.view(np.float32), PARTS)[2])


def later_weight(law: Law, base: U32, m: F32, v: F32) -> F32:
    """Return the prediction of the weight after several steps, from the m and v after them."""
    w0, m0, v0 = np.split(base.view(np.float32), PARTS)
    with np.errstate(all="ignore"):
        update = law.rate * direction(law, m, v) + law.earlier * direction(law, m0, v0)
        return canonical(WEIGHTS[law.weight](law, w0, update))
