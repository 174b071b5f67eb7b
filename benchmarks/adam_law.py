"""The laws by which one step of Adam follows from the step before, in float32, in NumPy.

Every function rounds each operation to nearest, ties to even, in the order of the source. A law has
a form for each of the three: the mean of gradients ``m``, the mean of their squares ``v``, and the
weight. Published implementations differ in these forms only: the order of operations, and where a
product and a sum are rounded once (``fma``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
Words: TypeAlias = NDArray[Any]

f32 = np.float32
NAN = np.uint32(0x7FC00000).view(f32)
ZERO, ONE = f32(0), f32(1)


def fma(a: F32, b: F32 | np.float32, c: F32) -> F32:
    """Return a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so that the second rounding
    cannot go wrong (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = a.astype(np.float64) * np.float64(b), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_even = ((bits & 1) == 0) & (error != 0) & np.isfinite(total)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(is_even, bits + towards, bits).view(np.float64).astype(f32)


# (m before, gradient, beta, 1 - beta) -> m
MEANS: dict[str, Callable[[F32, F32, np.float32, np.float32], F32]] = {
    "lerp": lambda m, g, b, c: m + c * (g - m),
    "lerp, fma": lambda m, g, b, c: fma(g - m, c, m),
    "sum": lambda m, g, b, c: b * m + c * g,
    "sum, fma of g": lambda m, g, b, c: fma(g, c, b * m),
    "sum, fma of m": lambda m, g, b, c: fma(m, b, c * g),
}
# (v before, gradient, beta, 1 - beta) -> v
SQUARES: dict[str, Callable[[F32, F32, np.float32, np.float32], F32]] = {
    "(c g) g": lambda v, g, b, c: b * v + (c * g) * g,
    "(c g) g, fma": lambda v, g, b, c: fma(c * g, g, b * v),
    "c (g g)": lambda v, g, b, c: b * v + c * (g * g),
    "c (g g), fma": lambda v, g, b, c: fma(g * g, c, b * v),
    "c (g g), fma of v": lambda v, g, b, c: fma(v, b, c * (g * g)),
}
# (weight before, update, keep, pull) -> weight
WEIGHTS: dict[str, Callable[[F32, F32, np.float32, np.float32], F32]] = {
    "decay, then update": lambda w, u, keep, pull: w * keep + u,
    "both in one sum": lambda w, u, keep, pull: w + (u + pull * w),
}


@dataclass(frozen=True, slots=True)
class Moments:
    """One parameter at one step: its float32 weight or master, m, v, and a bfloat16 copy.

    All arrays are 1-D copies; ``narrow`` has the bits of the copy, ``None`` without one.
    """

    weight: F32
    first: F32
    second: F32
    narrow: NDArray[np.uint16] | None = None


@dataclass(frozen=True, slots=True)
class Law:
    """The forms and the constants of a law.

    Attributes:
        betas: The decay rates.
        eps: The constant, in units of the root of v as it is stored.
        mean: The form of m if the gradient is stored.
        square: The form of v.
        weight: The form of the weight.
        keep: The factor of a decay that is applied first.
        pull: The same decay as a summand.
        rate: The learning rate without biases, negative.
        earlier: The same of the direction at the save before, for several steps.
        bits: The bits of the significand of the gradients that are stored: 7 for bfloat16, 10 for
            float16; 0: m is stored, and the gradient follows from it.
        scale: The number that clipping has applied to the gradients that are stored.
        is_divided: They were divided by it, not multiplied.
    """

    betas: tuple[float, float]
    eps: float
    mean: str = "lerp"
    square: str = "(c g) g"
    weight: str = "decay, then update"
    keep: np.float32 = ONE
    pull: np.float32 = ZERO
    rate: np.float32 = ZERO
    earlier: np.float32 = ZERO
    bits: int = 0
    scale: np.float32 = ONE
    is_divided: bool = False

    def clipped(self, gradient: F32) -> F32:
        """Return stored gradients as they were after clipping."""
        return gradient / self.scale if self.is_divided else gradient * self.scale

    def unclipped(self, gradient: F32) -> F32:
        """Return about what was clipped."""
        inverse = ONE / self.scale
        return gradient * (self.scale if self.is_divided else inverse)


@dataclass(slots=True)
class Prediction:
    """The content that a decoder computes, and the gradients that are stored for it.

    Attributes:
        gradient: The gradient before clipping, as the words that are stored; ``None`` if m is
            stored.
        first, second, weight: The predictions; ``first`` is the m before if m is stored.
    """

    gradient: Words | None
    first: F32
    second: F32
    weight: F32


def direction(moments: Moments, eps: float) -> F32:
    """Return m / (sqrt(v) + eps)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        u = moments.first / (np.sqrt(moments.second) + f32(eps))
    return np.where(np.isfinite(u), u, f32(0))


def gradient_of(before: F32, now: F32, beta: float) -> F32:
    """Return the float32 gradient that leads from one m to the next, to about its last place."""
    inverse = f32(1 / (1 - beta))
    return (now - f32(beta) * before) * inverse


def rounded(values: F32, bits: int) -> F32:
    """Round to a significand of so many bits after the leading one, to nearest, ties to even."""
    words, drop = values.view(np.uint32), np.uint32(23 - bits)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    carried = words + half + ((words >> drop) & np.uint32(1))
    return ((carried >> drop) << drop).view(f32)


def stored_words(gradient: F32, bits: int) -> Words:
    """Return gradients as they are stored: bfloat16 if that is exact."""
    words = gradient.view(np.uint32)
    return (words >> 16).astype(np.uint16) if bits <= 7 else words


def canonical(values: F32) -> F32:
    """Return values with one bit pattern for every NaN: processors make different ones."""
    return np.where(np.isnan(values), NAN, values)


def equal_share(now: F32, predicted: F32) -> float:
    """Return the share of elements that are equal in every bit."""
    return float(np.mean(now.view(np.uint32) == predicted.view(np.uint32)))


def predict(before: Moments, now: Moments, law: Law) -> Prediction:
    """Compute ``now`` from ``before`` and what would be stored, each from stored content."""
    b1, b2 = law.betas
    with np.errstate(all="ignore"):
        gradient, stored = gradient_of(before.first, now.first, b1), None
        first = before.first
        if law.bits:
            short = rounded(law.unclipped(gradient), law.bits)
            stored, gradient = stored_words(short, law.bits), law.clipped(short)
            first = MEANS[law.mean](before.first, gradient, f32(b1), f32(1 - b1))
        second = SQUARES[law.square](before.second, gradient, f32(b2), f32(1 - b2))
        # The moments are restored before the weight, so their own exceptions do not spread.
        update = law.rate * direction(now, law.eps)
        if law.earlier:
            update = update + law.earlier * direction(before, law.eps)
        weight = WEIGHTS[law.weight](before.weight, update, law.keep, law.pull)
    return Prediction(stored, canonical(first), canonical(second), canonical(weight))


@dataclass(slots=True)
class Shares:
    """The shares of elements that follow in every bit, weighted by their number."""

    elements: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, elements: int, **shares: float) -> None:
        """Add the shares of one parameter."""
        self.elements += elements
        for name, share in shares.items():
            self.sums[name] = self.sums.get(name, 0.0) + share * elements

    def __getitem__(self, name: str) -> float:
        return self.sums[name] / self.elements


def fit(before: Moments, now: Moments, betas: tuple[float, float], eps: float, steps: int) -> Law:
    """Find the law of one parameter by trying every form on a sample.

    ``keep`` and ``rate`` are fitted, so neither the learning rate, nor the decay, nor the count of
    steps need be known: an update is small beside its weight, so a rate that is correct to a few
    places gives every bit.

    Args:
        before: The parameter at the save before.
        now: The parameter now.
        betas: The decay rates.
        eps: The constant in units of the root of v as it is stored, without correction of its bias.
        steps: The number of steps between both.
    """
    law = Law(betas, eps)
    law = _with_weight(before, now, law, with_earlier=steps > 1)
    if steps > 1:
        return law
    forms = short_forms(before, now, betas[0])
    # The constants are fitted; to tell the forms apart takes fewer elements.
    before, now = sample(before, now, _FORM_SAMPLE)
    short = [
        (equal_share(now.first, predict(before, now, other).first), other)
        for bits, scale, is_divided in forms
        for mean in MEANS
        for other in (_changed(law, bits=bits, scale=scale, is_divided=is_divided, mean=mean),)
    ]
    share, best = max(short, key=lambda item: item[0], default=(0.0, law))
    if share > LEAST_SHORT:
        law = best
    squares = {
        square: equal_share(now.second, predict(before, now, _changed(law, square=square)).second)
        for square in SQUARES
    }
    return _changed(law, square=max(squares, key=squares.__getitem__))


# Gradients are stored instead of m if they give this share of its elements.
LEAST_SHORT = 0.9
_SHARP, _BINS, _FORM_SAMPLE = 96, 1 << 20, 1 << 13


def short_forms(before: Moments, now: Moments, beta: float) -> list[tuple[int, np.float32, bool]]:
    """Return the (bits, scale, is_divided) that the gradients may have.

    Clipping multiplies all gradients of bfloat16 by one float32 (torch), or divides them by one
    (optax). Its significand follows from the
    elements whose gradients are known best: each allows one factor for each of the short
    significands, and all allow the true one.
    """
    gradient = gradient_of(before.first, now.first, beta).astype(np.float64)
    size = np.abs(gradient)
    with np.errstate(all="ignore"):
        sharpness = size / (np.abs(now.first) + np.abs(before.first))
    sharpness[~np.isfinite(sharpness) | (size == 0)] = 0
    sharp = np.argsort(sharpness)[-_SHARP:]
    logs = np.log2(size[sharp][sharpness[sharp] > 0])
    forms = [(7, ONE, False), (10, ONE, False)]
    if logs.size < _SHARP // 2:
        return forms
    for bits in (7, 10):
        significands = np.log2(1 + np.arange(1 << bits) / (1 << bits))
        factors = (logs[:, None] - significands) % 1.0
        bins = np.round(factors * _BINS).astype(np.int64) % _BINS
        counts = np.bincount(bins.reshape(-1), minlength=_BINS)
        near = counts + np.roll(counts, 1) + np.roll(counts, -1)
        top = int(near.argmax())
        if near[top] < 0.8 * logs.size:
            continue
        apart = (factors - top / _BINS + 0.5) % 1.0 - 0.5
        factor = top / _BINS + float(np.median(apart[np.abs(apart) < 2 / _BINS]))
        for is_divided in (False, True):
            scale = f32(2.0**-factor if is_divided else 2.0**factor)
            words = scale.view(np.uint32) + np.arange(-3, 4, dtype=np.int64)
            forms += [(bits, word, is_divided) for word in words.astype(np.uint32).view(f32)]
        break
    return forms


def _changed(law: Law, **changes: Any) -> Law:
    names = Law.__dataclass_fields__
    return Law(**{name: changes.get(name, getattr(law, name)) for name in names})


def _with_weight(before: Moments, now: Moments, law: Law, *, with_earlier: bool) -> Law:
    """Return a law with the constants of its weight fitted, and the better form."""
    u, u0 = (direction(moments, law.eps).astype(np.float64) for moments in (now, before))
    w0 = before.weight.astype(np.float64)
    columns = [u, w0, u0] if with_earlier else [u, w0]
    matrix = np.stack(columns, 1)
    scale = np.sqrt((matrix**2).mean(0)) + 1e-300
    change = now.weight.astype(np.float64) - w0
    rate, pull, *rest = np.linalg.lstsq(matrix / scale, change, rcond=None)[0] / scale
    fitted = _changed(
        law,
        rate=f32(rate),
        pull=f32(pull),
        keep=f32(1 + pull),
        earlier=f32(rest[0] if rest else 0),
    )
    forms = {
        form: equal_share(now.weight, predict(before, now, _changed(fitted, weight=form)).weight)
        for form in WEIGHTS
    }
    return _changed(fitted, weight=max(forms, key=forms.__getitem__))


def sample(before: Moments, now: Moments, elements: int = 1 << 16) -> tuple[Moments, Moments]:
    """Return every n-th element of both, about ``elements`` of them."""
    stride = max(1, now.weight.size // elements)
    return tuple(  # type: ignore[return-value]
        Moments(m.weight[::stride], m.first[::stride], m.second[::stride]) for m in (before, now)
    )


def pairs_of(
    before: dict[str, Moments], now: dict[str, Moments]
) -> Iterator[tuple[str, Moments, Moments]]:
    """Yield the parameters that both steps have."""
    for name, moments in now.items():
        if name in before:
            yield name, before[name], moments
