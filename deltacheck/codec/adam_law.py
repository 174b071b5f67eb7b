"""The law of Adam between two saves, found from the saved states alone.

The weight, m and v of a parameter are stored as one *group*: blocks of three equal parts, whose
chunks the encoder may predict (``docs/reference/format.md``, section 4.6). A wrong law costs bytes
and never bits. The constants of the weight are fitted: an update is small beside its weight, so a
rate that is correct to a few places gives every bit, and neither the learning rate, nor the decay,
nor the form of the bias corrections need be known.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec.base import (
    GRADIENT_LAW,
    LAW_PARTS,
    MEAN_LAW,
    ROW_CHANGED,
    ROW_GAP_BYTES,
    ROW_WIDE_COUNT,
    STEPS_LAW,
)
from deltacheck.codec.extension import native

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.intp]

# Permanent: the most elements of a block. The chunks of a group are then its blocks.
MOST_BLOCK = 87381
_MEANS, _SQUARES, _WEIGHTS = 5, 5, 2  # forms
# Fused multiply-add first: torch's forms, the most frequent ones.
_MEAN_ORDER, _SQUARE_ORDER = (1, 4, 3, 0, 2), (1, 4, 3, 0, 2)
_WORD = 4
# Elements of which the constants are fitted, and by which the forms are told apart.
_FIT_ELEMENTS, _TRIAL_ELEMENTS = 1 << 14, 1 << 13
# A law pays if its exceptions take less than this share of the bytes of a sample.
_LEAST_GAIN = 0.1
_KNOWN_COST = 0.05  # the same, for a law that is kept without a search
# Elements by which the factor of clipped gradients is found, and the resolution of its logarithm.
_SHARP, _BINS = 96, 1 << 20
# Of sums: more, and a processor adds more elements at a time.
_LANES = 256
_LEAST_PIVOT = 1e-12  # below, a column depends on others
_HEADER = struct.Struct("<4I12f")


@dataclass(frozen=True, slots=True)
class Law:
    """The forms and the constants of a law (section 4.6), in the order of the stream ``law``.

    Attributes:
        method: The method of the chunks.
        mean, square, weight: Forms.
        beta1, beta2: The decay rates.
        eps: The constant in units of the root of v as it is stored.
        rate, earlier: Factors of the directions now and at the save before.
        keep, pull: The decay of the weight.
        scale: The factor of clipped gradients.
    """

    method: int
    mean: int = 0
    square: int = 1
    weight: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 0.0
    rate: float = 0.0
    earlier: float = 0.0
    keep: float = 1.0
    pull: float = 0.0
    scale: float = 1.0

    def content(self) -> bytes:
        """Return the bytes of a chunk in the stream ``law``."""
        return _HEADER.pack(
            self.mean,
            self.square,
            self.weight,
            0,
            self.beta1,
            1 - self.beta1,
            1 / (1 - self.beta1),
            self.beta2,
            1 - self.beta2,
            self.eps,
            self.rate,
            self.earlier,
            self.keep,
            self.pull,
            self.scale,
            float(np.float32(1) / np.float32(self.scale)),
        )


def group_shape(elements: int) -> tuple[int, int, int]:
    """Return the shape of the group of a parameter: blocks, parts, elements of a block."""
    blocks = max(1, -(-elements // MOST_BLOCK))
    return blocks, LAW_PARTS, -(-elements // blocks)


def grouped(parts: Sequence[Any], out: Any = None) -> Any:
    """Return weight, m and v as one group.

    Args:
        parts: float32, 1-D, of equal length: NumPy arrays, or tensors on one device.
        out: Zeroed memory of the group's shape, where the parts are; ``None``: host memory.
    """
    shape = group_shape(len(parts[0]))
    group, size = np.zeros(shape, np.float32) if out is None else out, shape[2]
    # All but the last block are full. A few calls are enough, since each of them costs a device
    # more than a block.
    full, rest = divmod(len(parts[0]), max(1, size))
    for number, part in enumerate(parts):
        group[:full, number] = part[: full * size].reshape(full, size)
        if rest:
            group[full, number, :rest] = part[full * size :]
    return group


def places_of(shape: tuple[int, ...], part: int, elements: Places) -> Places:
    """Return the places of some elements of a part in a group of this shape."""
    blocks, columns = np.divmod(elements, shape[2])
    return (blocks * LAW_PARTS + part) * shape[2] + columns


def sample_places(elements: int) -> Places:
    """Return the places of evenly spread elements in the group of a parameter, ``(3, n)``."""
    shape = group_shape(elements)
    blocks, _, size = shape
    stride = max(1, blocks * size // _FIT_ELEMENTS)
    columns = np.arange(0, max(1, size - size % stride), stride)
    sample = (np.arange(blocks)[:, None] * size + columns).reshape(-1)
    return np.stack([places_of(shape, part, sample) for part in range(LAW_PARTS)])


def part_of(group: Any, part: int, first: int, stop: int, out: Any = None) -> Any:
    """Return elements ``first`` to ``stop`` of a part.

    Args:
        group: The blocks that these elements lie in, ``(blocks, 3, size)``.
        part: 0: weight, 1: m, 2: v.
        first: The first element, counted from the start of the first of these blocks.
        stop: The element after the last one.
        out: Memory for the elements; ``None``: new memory.
    """
    size = group.shape[2]
    values = np.empty(stop - first, group.dtype) if out is None else out
    for block in range(first // size, -(-stop // size)):
        low, high = max(first, block * size), min(stop, (block + 1) * size)
        values[low - first : high - first] = group[block, part, low - block * size :][: high - low]
    return values


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements of a group at two saves, those of ``sample_places``, float32 ``(3, n)``."""

    before: F32
    now: F32

    def thinned(self, elements: int) -> Sample:
        """Take every n-th element."""
        stride = max(1, self.now.shape[1] // elements)
        return Sample(self.before[:, ::stride].copy(), self.now[:, ::stride].copy())

    def cost(self, law: Law) -> float:
        """Return the bytes of exceptions, of the bytes of the sample; 1 if the law is no use."""
        # Copies, since the encoder updates its base.
        before, now = (group.flatten().view(np.uint8) for group in (self.before, self.now))
        bounds = np.array([0, now.size // _WORD], np.uint64)
        rows, _ = native.encode(now, before, bounds, _WORD, law.method, law=law.content())
        if not rows.shape[0]:
            return 0.0
        if int(rows[0, 1]) != law.method:
            return 1.0
        row = rows[0]
        exceptions = (
            int(row[ROW_CHANGED]) + int(row[ROW_GAP_BYTES]) + _WORD * int(row[ROW_WIDE_COUNT])
        )
        return exceptions / now.size


def find(
    sample: Sample,
    betas: Sequence[tuple[float, float]],
    eps: float,
    *,
    one_step: bool,
    last_law: Law | None = None,
) -> Law | None:
    """Find the law that leads from one group to the next.

    Args:
        sample: Elements of both.
        betas: The decay rates that are tried.
        eps: The constant of the update, in units of the root of v as it is stored.
        one_step: Whether there was one step between both. False: several.
        last_law: The law of the save before, which is tried first.

    Returns:
        The law, or ``None`` if a plain delta is smaller.
    """
    if not all(np.isfinite(group).all() for group in (sample.before, sample.now)):
        return None
    if not one_step:
        return _several_steps(sample, betas[0], eps)
    trial = sample.thinned(_TRIAL_ELEMENTS)
    if last_law is not None and (last_law.method == MEAN_LAW or last_law.scale == 1.0):
        law = _with_weight(sample, replace(last_law, eps=eps))
        if trial.cost(law) <= _KNOWN_COST:
            return law
    cost, law = min(
        (_one_step(sample, trial, *pair, eps) for pair in betas), key=lambda best: best[0]
    )
    if cost > _LEAST_GAIN:
        return None
    short, narrow = _least(trial, _with_gradients(sample, law))
    # A gradient takes two bytes less than m.
    return narrow if short <= cost + _LEAST_GAIN else law


def _one_step(
    sample: Sample, trial: Sample, beta1: float, beta2: float, eps: float
) -> tuple[float, Law]:
    """Return the cost of the best law of one step with some decay rates, and the law."""
    law = _with_weight(sample, Law(MEAN_LAW, beta1=beta1, beta2=beta2, eps=eps))
    law = _least(trial, (replace(law, square=form) for form in _SQUARE_ORDER))[1]
    return _least(trial, (replace(law, weight=form) for form in range(_WEIGHTS)))


def _least(trial: Sample, laws: Iterator[Law]) -> tuple[float, Law]:
    """Return the law with the least exceptions, the first of equal ones."""
    best: tuple[float, Law] | None = None
    for law in laws:
        cost = trial.cost(law)
        if best is None or cost < best[0]:
            best = cost, law
        if cost == 0:
            break
    assert best is not None
    return best


def _with_gradients(sample: Sample, law: Law) -> Iterator[Law]:
    """Yield the laws in which bfloat16 gradients are stored in place of m."""
    for scale in _scales(sample, law.beta1):
        for mean in _MEAN_ORDER:
            yield replace(law, method=GRADIENT_LAW, mean=mean, scale=scale)


def _direction(m: F32, v: F32, eps: float) -> F64:
    with np.errstate(all="ignore"):
        direction = m / (np.sqrt(v) + np.float32(eps))
    return np.where(np.isfinite(direction), direction, 0).astype(np.float64)


def _with_weight(sample: Sample, law: Law, *, with_earlier: bool = False) -> Law:
    """Return a law with the constants of its weight fitted by least squares."""
    w0, m0, v0 = sample.before
    w, m, v = sample.now
    columns = [_direction(m, v, law.eps), w0.astype(np.float64)]
    if with_earlier:
        columns.append(_direction(m0, v0, law.eps))
    solution = _least_squares(columns, w.astype(np.float64) - w0)
    if not all(math.isfinite(value) for value in solution):
        return law
    rate, pull, *rest = solution
    keep = float(np.float32(1 + pull))
    return replace(law, rate=rate, pull=pull, keep=keep, earlier=rest[0] if rest else 0.0)


def _least_squares(columns: Sequence[F64], target: F64) -> list[float]:
    """Return the factors of columns that come nearest to a target.

    The sums have one order, so that the factors are the same on every machine.
    """
    size = len(columns)
    scales = [math.sqrt(_dot(column, column)) or 1.0 for column in columns]
    scaled = [column / scale for column, scale in zip(columns, scales, strict=True)]
    # The normal equations, solved by elimination. Columns are scaled, and hardly depend on another.
    rows = [[_dot(a, b) for b in scaled] + [_dot(a, target)] for a in scaled]
    for number in range(size):
        pivot = rows[number][number]
        if pivot < _LEAST_PIVOT:
            rows[number] = [0.0] * (size + 1)
            continue
        rows[number] = [value / pivot for value in rows[number]]
        for index in range(size):
            if index != number:
                factor = rows[index][number]
                rows[index] = [
                    x - factor * y for x, y in zip(rows[index], rows[number], strict=True)
                ]
    return [row[size] / scale for row, scale in zip(rows, scales, strict=True)]


def _dot(a: F64, b: F64) -> float:
    """Return the sum of products, in one order on every machine."""
    products = a * b
    lanes = products[: products.size - products.size % _LANES].reshape(-1, _LANES)
    # Rows are added one after the other, element by element.
    return math.fsum([*np.add.reduce(lanes, axis=0), *products[lanes.size :]])


def _several_steps(sample: Sample, betas: tuple[float, float], eps: float) -> Law | None:
    """Return the law of several steps, ``None`` if it does not bring weights nearer."""
    law = _with_weight(
        sample,
        Law(STEPS_LAW, beta1=betas[0], beta2=1.0, eps=eps, weight=1),
        with_earlier=True,
    )
    w0, m0, v0 = sample.before
    w, m, v = sample.now
    update = law.rate * _direction(m, v, eps) + law.earlier * _direction(m0, v0, eps)
    predicted = (w0 + (update + law.pull * w0)).astype(np.float32)
    return law if _bits(w, predicted) < _bits(w, w0) - 1 else None


def _bits(now: F32, base: F32) -> float:
    """Return the mean number of bits of the differences of words."""
    difference = now.view(np.int32).astype(np.int64) - base.view(np.int32)
    return float(np.log2(np.abs(difference) + 1.0).mean())


def _scales(sample: Sample, beta1: float) -> list[float]:
    """Return the factors by which bfloat16 gradients may have been clipped, 1 first.

    Clipping multiplies all gradients by one float32. Its significand follows from the elements
    whose gradients are known best: each allows one factor for each significand of a bfloat16, and
    all allow the true one.
    """
    m0, m = sample.before[1], sample.now[1]
    b1 = np.float32(beta1)
    gradient = np.abs(((m - b1 * m0) * np.float32(1 / (1 - beta1))).astype(np.float64))
    with np.errstate(all="ignore"):
        sharpness = gradient / (np.abs(m) + np.abs(m0))
    sharpness[~np.isfinite(sharpness)] = 0
    sharp = np.argsort(sharpness, kind="stable")[-_SHARP:]
    logs = np.log2(gradient[sharp][sharpness[sharp] > 0])
    if logs.size < _SHARP // 2:
        return [1.0]
    factors = (logs[:, None] - np.log2(1 + np.arange(128) / 128)) % 1.0
    bins = np.round(factors * _BINS).astype(np.int64) % _BINS
    counts = np.bincount(bins.reshape(-1), minlength=_BINS)
    hits = counts + np.roll(counts, 1) + np.roll(counts, -1)
    top = int(hits.argmax())
    if hits[top] < 0.8 * logs.size or top == 0:
        return [1.0]
    distances = (factors - top / _BINS + 0.5) % 1.0 - 0.5
    factor = top / _BINS + float(np.median(distances[np.abs(distances) < 2 / _BINS]))
    words = int(np.float32(2.0**factor).view(np.uint32)) + np.array([0, 1, -1, 2, -2, 3, -3])
    return [1.0, *words.astype(np.uint32).view(np.float32).tolist()]
