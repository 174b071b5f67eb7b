"""Comparison of a restored state with the live one that was saved, by the contract of each leaf.

Errors are measured anew from both states, not taken from the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacheck.evaluate.comparison.observed_rates import observed_rate
from deltacheck.evaluate.comparison.snapshot import Array, Snapshot
from deltacheck.evaluate.records import LeafCheck
from deltacheck.leaf import tiles, tree
from deltacheck.leaf.contracts import Bounded, Promise, Reused, name_of
from deltacheck.policy import adam, roles
from deltacheck.policy.parameters import Parameter, Roles, hyperparameters
from deltacheck.save.treatment.error_measures import RelativeError, octaves_apart, sample
from deltacheck.store.manifest import Manifest, Tiles

_Part: TypeAlias = slice | NDArray[np.bool_]  # of the elements of a leaf, in one dimension

_SLACK = 1e-5  # of a limit: saves measure in float32, this module in float64
_ZERO_MOMENT = 2.0**-100  # smaller moments count as zero
# So do first moments below the first of these beside a second moment below the second.
_ZERO_MEAN, _LEAST_SECOND = 2.0**-60, 2.0**-126
# Errors of a reused first moment as it is stored (``Policy.auto``): in updates, for codes in
# steps of half an update, beside a second moment that errs by up to half an octave; and in octaves,
# if the law between both moments limits it.
_REUSED_MEAN_UPDATES, _REUSED_MEAN_OCTAVES = 0.25 * 2**0.25, 0.6
_REUSED_SECOND_OCTAVES = 0.6  # error of a reused second moment as it is stored
_DEFAULT_BETAS = (0.9, 0.999)  # of Adam, if the state does not hold them
# An element of a reused pair is written alone if its second moment has drifted by an octave. The
# code that the saver compares with, and the bias correction, err by at most 0.6 of it.
_LEAST_DRIFT_OCTAVES = 0.4
# Relative error of a learning rate that is observed: masters are rounded, and samples are finite.
_RATE_ERROR = 0.1
_MISSING = {True: "did not come back", False: "was not there when the step was saved"}


def check(
    live: Snapshot,
    restored: Snapshot,
    promises: Mapping[str, Promise],
    step: int,
    live_at: Callable[[int], Snapshot],
    *,
    cut: Mapping[str, Tiles] = MappingProxyType({}),
    earlier_steps: Sequence[int] = (),
    rate_floor: float = 0.0,
) -> tuple[LeafCheck, ...]:
    """Compare every leaf and every Python value of a restored state with the live one.

    Args:
        live: The state when it was saved.
        restored: The state that came back.
        promises: Contracts of the leaves that are not exact, from the manifest. Nothing else of
            the manifest is used, except ``cut``.
        step: The step that was saved.
        live_at: Returns the live state of an earlier save, whose values a reused leaf has.
        cut: The leaves in tiles, from the manifest: tiles of one leaf may have the values of
            different steps.
        earlier_steps: The earlier saves of the run: their largest learning rate is taken, and an
            element of a reused moment may have its values of any save after the promised one.
        rate_floor: The share of that rate which a contract may have as its unit of ``lr``.
    """
    # The rates come from the live state: a wrong restore must not choose the unit of its own error.
    rates = learning_rates(live)
    has_units = any(isinstance(p.terms, Bounded) and p.terms.rate for p in promises.values())
    units = _units(rates, live_at, earlier_steps if has_units else (), rate_floor)
    state_at = cache(lambda earlier: live if earlier == step else live_at(earlier))
    counts_at = cache(lambda earlier: step_counts(state_at(earlier)))
    assignment = roles.prove(
        live.roles,
        lambda weight, master: not _outside_cells(live.arrays[master], live.arrays[weight]),
    )
    roles_of = assignment.of()
    # A leaf without a part that names another step has the values of one step.
    parts_of = {path: _parts(promise, cut.get(path), step) for path, promise in promises.items()}
    saves = (*earlier_steps, step)
    firsts = {p.first: p for p in assignment.parameters if p.first and p.second}
    related = _related_problems(assignment, restored, promises, state_at, parts_of, saves)
    promised = _Promised(live, rates, units, firsts, parts_of, state_at, counts_at, saves)
    checks: list[LeafCheck] = []
    # Every path of a tie is compared: a restore may break a tie and change one of its leaves.
    for path in sorted(live.ties.keys() | restored.ties.keys()):
        if problem := _kind_problem(path, live, restored):
            checks.append(LeafCheck(path, "exact", problem))
            continue
        owner, values = live.ties[path], restored.arrays[restored.ties[path]]
        if owner not in promises:
            checks.append(LeafCheck(path, "exact", _bits(live.arrays[owner], values)))
            continue
        result = promised.check(path, owner, promises[owner], values)
        problem = result.problem or related.get(owner, "")
        role = roles_of[owner][0] if owner in roles_of else "other"
        checks.append(replace(result, problem=problem, role=role))
    return (*checks, *_check_values(live, restored))


class _Promised(NamedTuple):
    """The comparison of leaves that are not exact.

    Attributes:
        live: The state when it was saved.
        rates: The learning rate of each leaf, as the state shows it.
        units: The unit of ``lr`` of each leaf.
        firsts: The parameter of each first moment.
        parts_of: The step of each part of a leaf, and its elements.
        state_at: Returns the live state of a save.
        counts_at: Returns the step counts of its moments.
        saves: The saves of the run, the one that is checked last.
    """

    live: Snapshot
    rates: Mapping[str, float]
    units: Mapping[str, float]
    firsts: Mapping[str, Parameter]
    parts_of: Mapping[str, list[tuple[int, _Part]]]
    state_at: Callable[[int], Snapshot]
    counts_at: Callable[[int], Mapping[str, float]]
    saves: Sequence[int]

    def check(self, path: str, owner: str, promise: Promise, values: Array) -> LeafCheck:
        """Compare a leaf, which ``owner`` holds the bytes of, with its promise."""
        before = self.live.arrays[owner]
        parameter = self.firsts.get(owner)
        if isinstance(promise.terms, Bounded):
            rate = (self.rates.get(owner), self.units.get(owner, 0.0))
            return _bounded(path, promise.terms, before, values, rate, _roots(parameter, self.live))
        age = self._age(owner, promise)
        result = _reused(path, promise.terms, age, before, values)
        # A second moment is rescaled to the present, so its drift is checked instead.
        if not result.problem and parameter is not None:
            for part_step, part in self.parts_of[owner]:
                states = [
                    (save, self.state_at(save))
                    for save in (part_step, *self.saves)
                    if save >= part_step
                ]
                problem = _first_moment(parameter, values, part, states)
                result = replace(result, problem=result.problem or problem)
        return replace(result, age_steps=age)

    def _age(self, owner: str, promise: Promise) -> float:
        """Return the age of a reused leaf in updates, else in steps.

        The unit of an age is not the manifest's to choose, so its age is not asked.
        """
        step = self.saves[-1]
        from_step = step if promise.from_step is None else promise.from_step
        if from_step < step:
            newer, older = (self.counts_at(save).get(owner) for save in (step, from_step))
            if newer is not None and older is not None:
                return newer - older
        return step - from_step


def _units(
    rates: Mapping[str, float],
    live_at: Callable[[int], Snapshot],
    earlier_steps: Sequence[int],
    rate_floor: float,
) -> dict[str, float]:
    """Return the largest unit of ``lr`` that a contract of a leaf may have, by path."""
    units = dict(rates)
    for earlier in earlier_steps:
        for path, rate in learning_rates(live_at(earlier)).items():
            units[path] = max(units.get(path, 0.0), rate_floor * rate)
    return units


def _kind_problem(path: str, live: Snapshot, restored: Snapshot) -> str:
    """Return the problem of a leaf that is missing, or came back in another type or shape."""
    if path not in restored.ties or path not in live.ties:
        return _MISSING[path in live.ties]
    before, after = live.specs[live.ties[path]], restored.specs[restored.ties[path]]
    if (before.dtype, before.shape) == (after.dtype, after.shape):
        return ""
    kinds = (f"{spec.dtype}{list(spec.shape)}" for spec in (before, after))
    return "was {}, came back as {}".format(*kinds)


def _check_values(live: Snapshot, restored: Snapshot) -> Iterator[LeafCheck]:
    """Compare the Python values of two states."""
    for path in sorted(live.values.keys() | restored.values.keys()):
        if path not in restored.values or path not in live.values:
            yield LeafCheck(path, "exact", _MISSING[path in live.values])
            continue
        value, restored_value = live.values[path], restored.values[path]
        equal = value == restored_value
        problem = "" if equal else f"was {value}, came back as {restored_value}"
        yield LeafCheck(path, "exact", problem)


def with_rates(
    checks: Sequence[LeafCheck],
    promises: Mapping[str, Promise],
    before: Snapshot,
    live: Snapshot,
) -> tuple[LeafCheck, ...]:
    """Return checks with the learning rate that the last update of each leaf shows.

    A leaf whose error is promised in learning rates must have moved at the rate that names give it,
    now or at the step before, unless the unit of its contract is not larger.

    Args:
        checks: The result of ``check``.
        promises: As for ``check``.
        before: The state one training step before ``live``.
        live: The state when it was saved.
    """
    rates_by_name = [learning_rates(state) for state in (before, live)]
    results = []
    for check in checks:
        owner = live.ties.get(check.path, "")
        promise = promises.get(owner)
        if promise is None or not isinstance(promise.terms, Bounded) or promise.terms.norm != "lr":
            results.append(check)
            continue
        rate = observed_rate(owner, before, live) or 0.0
        expected = [rates.get(owner, 0.0) for rates in rates_by_name]
        unit = promise.terms.rate or expected[-1]
        is_expected = any(abs(rate - known) <= _RATE_ERROR * known for known in expected)
        problem = (
            f"its error is promised in learning rates of {unit:.4g}; its last update shows"
            f" {rate:.4g}"
            if rate and not is_expected and unit > rate * (1 + _RATE_ERROR)
            else ""
        )
        results.append(replace(check, rate=rate, problem=check.problem or problem))
    return tuple(results)


def used_contracts(manifest: Manifest) -> set[str]:
    """Return the contracts that a step uses, as ``LeafCheck.exercise`` names them."""
    numbers = _numbers(manifest)
    roles_of = roles.find(manifest.specs, numbers).of()
    used = set()
    for path, promise in manifest.contracts.items():
        role = roles_of[path][0] if path in roles_of else "other"
        age = promise.age(manifest.step)
        used.add(LeafCheck(path, name_of(promise.terms), role=role, age_steps=age).exercise)
    return used - {""}


def _numbers(manifest: Manifest) -> dict[str, object]:
    return dict(tree.scalars(manifest.tree))


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths whose digests differ or that one side lacks, ascending."""
    paths = expected.keys() | actual.keys()
    return tuple(sorted(path for path in paths if expected.get(path) != actual.get(path)))


def learning_rates(live: Snapshot) -> dict[str, float]:
    """Return the learning rate of each weight and master: of the state, else of the run."""
    by_group = hyperparameters(live.roles, live.numbers)
    rates: dict[str, float] = {}
    for parameter in live.roles.parameters:
        group = by_group.get(parameter.group or "")
        rate = live.run_rate if group is None or group.lr is None else group.lr
        if rate is not None:
            paths = (parameter.master, parameter.weight)
            rates |= {path: rate for path in paths if path is not None}
    return rates


def trained_weights(state: Snapshot) -> dict[str, NDArray[np.float32]]:
    """Return the weights that an optimizer updates, masters if there are any, by path."""
    paths = [parameter.master or parameter.weight for parameter in state.roles.parameters]
    present = [path for path in paths if path is not None] or list(state.roles.weights)
    return {path: state.arrays[path].astype(np.float32) for path in present}


def step_counts(live: Snapshot) -> dict[str, float]:
    """Return the optimizer's step count of each moment whose state holds one."""
    counts: dict[str, float] = {}
    for parameter in live.roles.parameters:
        count = live.numbers.get(parameter.count or "")
        if isinstance(count, int | float):
            moments = (parameter.first, parameter.second)
            counts |= {path: float(count) for path in moments if path is not None}
    return counts


def _bits(live: Array, restored: Array) -> str:
    """Describe the bits in which two arrays of one type differ; empty if there are none."""
    # Bytes are compared, because NaN differs from itself and -0.0 equals 0.0.
    width = live.dtype.itemsize
    live_bytes, restored_bytes = (
        array.view(np.uint8).reshape(-1, width) for array in (live, restored)
    )
    wrong = np.flatnonzero((live_bytes != restored_bytes).any(axis=1))
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return (
        f"{wrong.size} of {live.size} elements differ in bits, first element {first}: was"
        f" {live[first]!s}, came back as {restored[first]!s}"
    )


def _bounded(
    path: str,
    terms: Bounded,
    live: Array,
    restored: Array,
    known_rates: tuple[float | None, float],
    roots: NDArray[np.float64] | None,
) -> LeafCheck:
    """Check a bounded leaf.

    Args:
        path: The path of the leaf.
        terms: Its contract.
        live: The saved values.
        restored: The restored values.
        known_rates: The live learning rate, and the largest that may be the unit of the contract.
        roots: Of a first moment, the changes that change an update by one learning rate.
    """
    rate, most = known_rates
    if terms.rate and not terms.rate <= most * (1 + _SLACK):
        problem = (
            f"its error is promised in learning rates of {terms.rate:.4g}; the run permits at most"
            f" {most:.4g}"
        )
        return LeafCheck(path, "bounded", problem)
    rate = terms.rate or rate
    # Without a rate the promise cannot be checked, and a promise that is not checked counts as
    # broken.
    if terms.norm == "lr" and not rate:
        problem = (
            "its error is promised in learning rates, and neither the state nor the run tells the"
            " rate"
        )
        return LeafCheck(path, "bounded", problem)
    if terms.norm == "updates" and roots is None:
        problem = "its error is promised in updates, and it is no first moment of an Adam"
        return LeafCheck(path, "bounded", problem)
    measured = _error(terms.norm, live, restored, rate or 0.0, roots)
    problem = (
        ""
        if measured <= terms.limit * (1 + _SLACK)
        else f"its error is {measured:.4g} {terms.norm}, promised was {terms.limit:g}"
    )
    return LeafCheck(path, "bounded", problem, measured, terms.limit)


def _reused(path: str, terms: Reused, age: float, live: Array, restored: Array) -> LeafCheck:
    # A negative age would be a value of the future, so it is refused like one that is too old.
    if not 0 <= age <= terms.max_age_steps:
        problem = f"it is {age:g} steps old, promised were {terms.max_age_steps}"
        return LeafCheck(path, "reused", problem, age, terms.max_age_steps)
    if not np.isfinite(restored).all():
        problem = "it has elements that are not finite"
        return LeafCheck(path, "reused", problem, age, terms.max_age_steps)
    if terms.max_drift is None:
        return LeafCheck(path, "reused", "", age, terms.max_age_steps)
    # The same sample as that of the save, because the limit is one of its median.
    drift = octaves_apart(sample(live), sample(restored)) or 0.0
    problem = (
        ""
        if drift <= terms.max_drift * (1 + _SLACK)
        else f"it drifted by {drift:.4g} octaves, promised were {terms.max_drift:g}"
    )
    return LeafCheck(path, "reused", problem, drift, terms.max_drift)


def _parts(promise: Promise, cut: Tiles | None, step: int) -> list[tuple[int, _Part]]:
    """Return the steps whose values a leaf has, and its elements that are of each."""
    if cut is None or not cut.from_steps:
        return [(step if promise.from_step is None else promise.from_step, slice(None))]
    steps = np.empty(cut.shape, np.int64)
    for number, from_step in enumerate(cut.from_steps):
        steps[tiles.box(cut.cuts, number)] = from_step
    return [(int(from_step), steps.reshape(-1) == from_step) for from_step in np.unique(steps)]


def _first_moment(
    parameter: Parameter,
    restored: Array,
    part: _Part,
    states: Sequence[tuple[int, Snapshot]],
) -> str:
    """Check that a part of a reused first moment has the values of its earlier step.

    Args:
        parameter: The parameter.
        restored: The restored values of the leaf.
        part: The elements of the part.
        states: The step and the state whose values it should have, and those of later saves, whose
            values an element may have if its second moment has drifted since.
    """
    first, second = str(parameter.first), str(parameter.second)
    (from_step, earlier), *later_states = states
    if first not in earlier.arrays or earlier.arrays[first].shape != restored.shape:
        return f"it was not there at step {from_step}, whose values it should have"
    wrong = ~_is_first_moment_of(parameter, earlier, from_step, restored)[part]
    for step, state in later_states if wrong.any() else ():
        drifted = _has_drifted(earlier, state, second)
        if first in state.arrays and state.arrays[first].shape == drifted.shape == restored.shape:
            matches = _is_first_moment_of(parameter, state, step, restored)
            wrong &= ~(matches & drifted)[part]
    if not wrong.any():
        return ""
    number = int(np.flatnonzero(wrong)[0])
    value, expected = restored[part][number], earlier.arrays[first][part][number]
    return (
        f"{int(wrong.sum())} elements are not those of step {from_step}, first element {number}:"
        f" {value:.4g} for {expected:.4g}"
    )


def _is_first_moment_of(
    parameter: Parameter, state: Snapshot, step: int, restored: Array
) -> NDArray[np.bool_]:
    """Return the elements of a first moment that may stand for those of a state."""
    first, second = str(parameter.first), str(parameter.second)
    mean, variance = (state.arrays[path].astype(np.float64) for path in (first, second))
    constants = _constants(parameter, state) or _DEFAULT_BETAS
    count = max(1, int(step_counts(state).get(first, step)))
    roots = np.sqrt(np.maximum(variance, 0) / adam.bias_correction(count, constants[1]))
    error = np.abs(restored.astype(np.float64) - mean)
    is_near = error <= _REUSED_MEAN_UPDATES * (1 + _SLACK) * roots
    # Section 4.5.4 of the format: no update notices these.
    is_near |= (restored == 0) & (np.abs(mean) < 2.0**-60) & (variance < 2.0**-125)
    # The law m^2 <= C v may have made it smaller.
    is_clipped = (np.abs(restored) < np.abs(mean)) & (
        _octaves(mean, restored) <= _REUSED_MEAN_OCTAVES
    )
    return is_near | is_clipped


def _has_drifted(earlier: Snapshot, newer: Snapshot, second: str) -> Array:
    """Return the elements that a later save may have written alone: their second moment drifted."""
    before, after = earlier.arrays.get(second), newer.arrays.get(second)
    if before is None or after is None or before.shape != after.shape:
        return np.zeros(0, np.bool_)
    return _octaves(before, after) >= _LEAST_DRIFT_OCTAVES


def _related_problems(
    assignment: Roles,
    restored: Snapshot,
    promises: Mapping[str, Promise],
    state_at: Callable[[int], Snapshot],
    parts_of: Mapping[str, list[tuple[int, _Part]]],
    saves: Sequence[int],
) -> dict[str, str]:
    """Check what the leaves of a parameter promise together, element by element.

    Returns:
        Leaf path -> description of its problem, for leaves that have one.
    """
    problems: dict[str, str] = {}
    step = saves[-1]
    for parameter in assignment.parameters:
        second = parameter.second
        terms = promises[second].terms if second is not None and second in promises else None
        if isinstance(terms, Reused) and parameter.first in restored.arrays:
            for from_step, part in parts_of[str(second)]:
                states = [state_at(s) for s in (from_step, *(s for s in saves if s > from_step))]
                problem = _second_moment(parameter, restored, state_at(step), part, states)
                if problem:
                    problems.setdefault(str(second), problem)
        problem = _master_problem(parameter, restored, promises, state_at(step))
        if problem:
            problems[str(parameter.master)] = problem
    return problems


def _master_problem(
    parameter: Parameter, restored: Snapshot, promises: Mapping[str, Promise], live: Snapshot
) -> str:
    """Check that a master that is not exact is in the cell of its exact bfloat16 weight."""
    weight, master = parameter.weight, parameter.master
    is_exact = weight in restored.arrays and weight not in promises and parameter.proven
    if (
        master not in promises
        or master not in restored.arrays
        or not is_exact
        # Masters of other types are not kept in cells.
        or live.specs[str(weight)].dtype != "bfloat16"
        # A weight of that name may be something else, such as an average.
        or _outside_cells(live.arrays[str(master)], live.arrays[str(weight)])
    ):
        return ""
    return _outside_cells(restored.arrays[str(master)], restored.arrays[str(weight)])


def _second_moment(
    parameter: Parameter,
    restored: Snapshot,
    live: Snapshot,
    part: _Part,
    states: Sequence[Snapshot],
) -> str:
    """Check that a part of a reused second moment is its earlier value, scaled to the present.

    The median drift alone would not see a few wrong elements.

    Args:
        parameter: The parameter.
        restored: The restored state.
        live: The state when it was saved.
        part: The elements of the part.
        states: The state whose values it should have, and those of later saves.
    """
    path = str(parameter.second)
    if path not in restored.arrays:
        return ""  # reported already
    after = restored.arrays[path][part].astype(np.float64)
    constants = _constants(parameter, live)
    low, high = 2.0**-_REUSED_SECOND_OCTAVES, 2.0**_REUSED_SECOND_OCTAVES
    wrong, expected = np.ones(after.shape, np.bool_), None
    for state in states:
        values = state.arrays.get(path)
        if values is None or values.shape != restored.arrays[path].shape:
            continue
        before = values[part].astype(np.float64)
        if constants is not None:
            counts = [step_counts(each).get(path) for each in (live, state)]
            if counts[0] and counts[1] and 1 <= counts[1] <= counts[0]:
                before *= adam.bias_rescale(int(counts[0]), int(counts[1]), constants[1])
        expected = before if expected is None else expected
        differs = (after > np.maximum(before * high, _ZERO_MOMENT)) | (
            after < np.where(before > _ZERO_MOMENT, before * low, 0)
        )
        if state is not states[0]:
            drifted = _has_drifted(states[0], state, path)
            differs |= ~drifted[part] if drifted.size else True
        wrong &= differs
        if not wrong.any():
            break
    if expected is None or not wrong.any():
        return ""
    number = int(np.flatnonzero(wrong)[0])
    return (
        f"{int(wrong.sum())} elements are not those of the step whose values it should have, first"
        f" element {number}: {after[number]:.4g} for {expected[number]:.4g}"
    )


def _roots(parameter: Parameter | None, live: Snapshot) -> NDArray[np.float64] | None:
    """Return the changes of a first moment that change an update by one learning rate.

    They are (1 - b1^t) sqrt(v / (1 - b2^t)), and 0 where v is below the normal numbers.

    Args:
        parameter: The parameter of the first moment, ``None`` if the leaf is another one.
        live: The saved state.
    """
    if parameter is None:
        return None
    beta1, beta2 = _constants(parameter, live) or _DEFAULT_BETAS
    count = step_counts(live).get(str(parameter.first), math.inf)
    second = live.arrays[str(parameter.second)].astype(np.float64)
    variance = np.where(second >= _LEAST_SECOND, second, 0.0) / (1 - beta2**count)
    roots: NDArray[np.float64] = (1 - beta1**count) * np.sqrt(variance)
    return roots


def _constants(parameter: Parameter, live: Snapshot) -> tuple[float, float] | None:
    groups = hyperparameters(live.roles, live.numbers)
    group = groups.get(parameter.group or "")
    if group is None or group.beta1 is None or group.beta2 is None:
        return None
    return group.beta1, group.beta2


def _outside_cells(master: Array, weight: Array) -> str:
    """Check that an exact narrow weight is the cast of its bounded master."""
    if weight.dtype.itemsize != 2 or weight.shape != master.shape:
        return "they are not a float32 master and a narrow weight"
    cast = master.astype(weight.dtype)
    wrong = np.flatnonzero(cast.view(np.uint16) != weight.view(np.uint16))
    if not wrong.size:
        return ""
    number = int(wrong[0])
    return (
        f"{wrong.size} elements lie outside the cells of the exact weight, first element {number}:"
        f" {master[number]!s} for {weight[number]!s}"
    )


def _error(
    norm: str, live: Array, restored: Array, rate: float, roots: NDArray[np.float64] | None
) -> float:
    """Measure the error of a restored leaf in a norm of ``deltacheck.leaf.contracts.NORMS``.

    The arithmetic is float64. The error is infinite if the values cannot be compared.
    """
    before, after = live.astype(np.float64), restored.astype(np.float64)
    # The class of the saver is used, so that both measure the same quantity.
    if norm == "l2":
        relative = RelativeError()
        relative.add(live, restored)
        return relative.l2
    if norm == "octaves":
        return _largest(_octaves(before, after))
    if norm == "updates":
        assert roots is not None  # the caller has checked it
        is_zero = (roots == 0) & (np.maximum(np.abs(before), np.abs(after)) < _ZERO_MEAN)
        with np.errstate(divide="ignore", invalid="ignore"):
            return _largest(np.where(is_zero, 0.0, np.abs(after - before) / roots))
    error = _largest(np.abs(after - before))
    if norm == "lr":
        return error / rate
    scale = _largest(np.abs(before))
    # A state of zeros has no scale, and only zeros are right then.
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def _octaves(before: Array, after: Array) -> NDArray[np.float64]:
    """Return the distance of each element in octaves; infinity if the signs differ."""
    sizes = [np.maximum(np.abs(x.astype(np.float64)), _ZERO_MOMENT) for x in (before, after)]
    nonzero = (sizes[0] > _ZERO_MOMENT) & (sizes[1] > _ZERO_MOMENT)
    flipped = (np.sign(before) * np.sign(after) < 0) & nonzero
    distance: NDArray[np.float64] = np.abs(np.log2(sizes[1] / sizes[0]))
    distance[flipped] = np.inf
    return distance


def _largest(values: Array) -> float:
    """Return the largest value; infinity if there is a NaN."""
    # An empty leaf has no maximum.
    maximum = float(np.max(values, initial=0.0))
    return math.inf if math.isnan(maximum) else maximum
