"""The signals that a policy decides by, and their agreement between ranks that save together.

Each rank sees its own losses, moments and masters. Rank 0 combines the signals of all, with the
messages that a save sends in any case. So every rank brings the same signals to the same fold, and
has the same stage and the same lattices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.structs import inspect_types
from deltacheck.leaf.tiles import Cuts
from deltacheck.leaf.tree import Node
from deltacheck.save.treatment.error_measures import Array, sample


class Signals(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signals of one rank, or of all, at one save.

    Attributes:
        loss: The loss that the caller reports.
        gradient_norm: The norm of the gradient before clipping, likewise.
        learning_rates: The rate of each parameter group.
        optimizer: A text that distinguishes optimizers and layouts.
        drifts: Drifts of second moments in octaves, measured while the last save was captured.
        events: Names and sizes of the events that step counts and stored moments show.
        scales: For masters whose scale is not known yet, by path: the sum of squares of sampled
            elements, and their number.
    """

    loss: float | None = None
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    optimizer: str = ""
    drifts: tuple[float, ...] = ()
    events: tuple[tuple[str, float], ...] = ()
    scales: dict[str, tuple[float, int]] = {}


inspect_types(Signals)


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state of which a process holds a part.

    Args:
        specs: The leaves of which it holds a part, whole, by path.
        tree: The structure of its state, with its scalars.
        numbers: The leaves of one number that it holds, by path.
        metrics: Values that the caller reports.
        values: Return the values that it holds of a leaf, one 1-D array for each part.
    """

    specs: Mapping[str, LeafSpec]
    tree: Node
    numbers: Mapping[str, float]
    metrics: Mapping[str, float]
    values: Callable[[str], Iterable[Array]]

    @classmethod
    def of(
        cls,
        specs: Mapping[str, LeafSpec],
        tree: Node,
        metrics: Mapping[str, float],
        values: Callable[[str], Iterable[Array]],
    ) -> HeldState:
        """Return the state, with its leaves of one number: step counts, and rates in arrays."""
        numbers = {}
        for path, spec in specs.items():
            if (
                # A leaf of one element, whatever its shape.
                spec.raw_bytes == spec.element.item_bytes
                and np.dtype(spec.element.numpy).kind in "iuf"
            ):
                for part in values(path):
                    numbers[path] = float(part[0])
        return cls(specs, tree, numbers, metrics, values)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of several ranks on one save.

    Args:
        held: The state of which this rank holds a part; ``None`` under a policy that is exact.
        signals: The signals of all ranks; ``None`` under a policy that is exact.
        cuts: The cuts of each leaf of which this rank writes tiles; ``None``: it is whole.
        abandon: Called once, behind the training, if the save fails on this rank.
        digests: Receives the digests of leaves and tiles as they were read, by stored path.
    """

    held: HeldState | None = None
    signals: Signals | None = None
    cuts: Mapping[str, Cuts | None] = field(default_factory=dict)
    abandon: Callable[[BaseException], None] | None = None
    digests: dict[str, str] = field(default_factory=dict)


def combined(signals: Sequence[Signals]) -> Signals:
    """Return the signals of all ranks.

    An event that one rank sees is an event of all: the largest loss and norm count, and NaN wins.

    Args:
        signals: The signals in the order of ranks.
    """
    rates = [rank.learning_rates for rank in signals if rank.learning_rates]
    optimizers = dict.fromkeys(rank.optimizer for rank in signals)
    scales: dict[str, tuple[float, int]] = {}
    for rank in signals:
        for path, (squares, count) in rank.scales.items():
            known_squares, known_count = scales.get(path, (0.0, 0))
            scales[path] = (known_squares + squares, known_count + count)
    return Signals(
        _worst([rank.loss for rank in signals]),
        _worst([rank.gradient_norm for rank in signals]),
        # Mostly, all ranks have the same groups; ranks of a pipeline may have other ones each.
        tuple(map(_largest, zip(*rates, strict=True)))
        if len(set(map(len, rates))) == 1
        else tuple(rate for rank_rates in rates for rate in rank_rates),
        " ".join(optimizers),
        tuple(drift for rank in signals for drift in rank.drifts),
        tuple(dict.fromkeys(event for rank in signals for event in rank.events)),
        scales,
    )


def worst_metrics(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value that any rank reports of each metric; NaN wins.

    Args:
        of_ranks: The metrics of each rank.
    """
    values: dict[str, list[float]] = {}
    for metrics in of_ranks:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _largest(reported) for name, reported in values.items()}


def _worst(values: Sequence[float | None]) -> float | None:
    reported = [value for value in values if value is not None]
    return _largest(reported) if reported else None


def _largest(values: Sequence[float]) -> float:
    # ``max`` may pass over a NaN.
    return next((value for value in values if math.isnan(value)), max(values))


def layout_text(constants: object, specs: Mapping[str, LeafSpec]) -> str:
    """Return a text that changes with the constants of the optimizer or the form of any leaf."""
    forms = [(spec.path, spec.dtype, spec.shape) for spec in specs.values()]
    return str(xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((constants, forms))))


def scale_of(parts: Iterable[Array]) -> tuple[float, int]:
    """Return the sum of squares of sampled elements, and their number.

    Args:
        parts: The values of a leaf in this process, 1-D each.
    """
    squares, count = 0.0, 0
    for part in parts:
        with np.errstate(invalid="ignore", over="ignore"):  # a master may have NaN and infinities
            values = sample(part).astype(np.float64)
            squares += float(np.vdot(values, values))
        count += values.size
    return squares, count
