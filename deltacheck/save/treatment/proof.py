"""Find the state and the weight of each master by content, if names do not tell."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from deltacheck.codec import derivation
from deltacheck.policy import adam, roles
from deltacheck.policy.decide import is_treatable
from deltacheck.policy.parameters import Hyperparameters, Parameter, Roles
from deltacheck.save.job.source import LeafSource
from deltacheck.save.treatment.cells import Layout
from deltacheck.save.treatment.run_state import LeafReader, Pairs, RunState

# Saves at which leaves are compared with those of the save before, while one has no state.
_TRIES = 8
# A state whose rate is so many times smaller or larger than a leaf's change shows does not move it.
_RATE_FACTOR = 2.0


def paired(
    run: RunState,
    reader: LeafReader,
    leaf_roles: Roles,
    sources: Mapping[str, LeafSource],
    rates: Mapping[str, Hyperparameters],
    counts: Mapping[str, int | None],
    *,
    with_weights: bool,
) -> Roles:
    """Return the roles with the leaf that each state moves, found by the law of Adam.

    A step moves a weight by ``lr m / sqrt(v)``, so a leaf has changed since the last save as the
    state of its optimizer says. Leaves that are not stored as they are show no change, so what was
    found is kept until an event. A state that is only guessed is paired with nothing before its
    leaf could be compared.

    Args:
        run: Keeps what was found, and the step counts of the last save.
        reader: Access to leaves.
        leaf_roles: The roles as names and shapes give them.
        sources: The whole leaves, by path.
        rates: The constants of each parameter group.
        counts: The step count of each parameter, by name.
        with_weights: True if weights without a narrow copy may be bounded, too.
    """
    pairs = run.pairs
    if pairs is None or pairs.roles != leaf_roles:
        pairs = Pairs(leaf_roles, leaf_roles)
    open_names = {p.name for p in pairs.result.parameters if _is_open(p)}
    if not open_names or pairs.tries == _TRIES:
        run.pairs = pairs
        return pairs.result
    leaves = _open_leaves(leaf_roles, sources, with_weights=with_weights)
    states = _open_states(leaf_roles, sources, open_names)
    shapes = states.keys() & leaves.keys()
    candidates = [sources[path] for shape in shapes for path in leaves[shape]]
    if candidates and all(reader.stored_sample(s.spec.path, s.spec) is None for s in candidates):
        return _without_rivals(pairs.result)
    evidence = dict(pairs.evidence)
    for shape in shapes:
        moving = _changes(reader, sources, leaves[shape])
        for p in states[shape] if moving else ():
            evidence |= _evidence(run, reader, sources, p, moving, rates[p.group or ""], counts)
    run.pairs = Pairs(leaf_roles, roles.pair(leaf_roles, evidence), evidence, pairs.tries + 1)
    return run.pairs.result


def _is_open(parameter: Parameter) -> bool:
    """Return true if it is unknown which leaf the state of a parameter moves."""
    return parameter.adam and (bool(parameter.rivals) or not parameter.paired)


def _open_leaves(
    leaf_roles: Roles, sources: Mapping[str, LeafSource], *, with_weights: bool
) -> dict[tuple[int, ...], list[str]]:
    """Return the leaves by shape that a state may move and that are not known to be another's."""
    excluded = {p.wide_weight for p in leaf_roles.parameters if p.paired and not p.rivals}
    if not with_weights:
        excluded |= leaf_roles.weights.keys()
    leaves: dict[tuple[int, ...], list[str]] = {}
    for path in leaf_roles.others:
        if path not in excluded and _is_wide(sources.get(path)):
            leaves.setdefault(sources[path].spec.shape, []).append(path)
    return leaves


def _open_states(
    leaf_roles: Roles, sources: Mapping[str, LeafSource], names: Container[str]
) -> dict[tuple[int, ...], list[Parameter]]:
    """Return those of some parameters by shape whose moments are stored in float32."""
    states: dict[tuple[int, ...], list[Parameter]] = {}
    for p in leaf_roles.parameters:
        moments = [sources.get(path or "") for path in (p.first, p.second)]
        if p.name in names and all(map(_is_wide, moments)):
            states.setdefault(sources[str(p.first)].spec.shape, []).append(p)
    return states


def _is_wide(source: LeafSource | None) -> bool:
    return source is not None and is_treatable(source.spec, "float32")


def _without_rivals(leaf_roles: Roles) -> Roles:
    """Return the roles without the pairs of states and leaves that are guesses."""
    parameters = tuple(replace(p, paired=p.paired and not p.rivals) for p in leaf_roles.parameters)
    return replace(leaf_roles, parameters=parameters)


def _changes(
    reader: LeafReader, sources: Mapping[str, LeafSource], paths: Iterable[str]
) -> dict[str, Any]:
    """Return the changes of those leaves that have changed, as far as that is known."""
    changes = {path: _change(reader, sources[path]) for path in paths}
    return {path: change for path, change in changes.items() if change is not None}


def _change(reader: LeafReader, source: LeafSource) -> Any:
    """Return the change of a sample since the last save, without its mean.

    ``None``: the last save has not stored it exactly, or nothing has changed.
    """
    last = reader.stored_sample(source.spec.path, source.spec)
    if last is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # a leaf may have NaN and infinities
        change = reader.sample(source).astype(np.float64) - last
        change -= change.mean()
        return change if 0 < np.vdot(change, change) < np.inf else None


def _evidence(
    run: RunState,
    reader: LeafReader,
    sources: Mapping[str, LeafSource],
    parameter: Parameter,
    moving: Mapping[str, Any],
    constants: Hyperparameters,
    counts: Mapping[str, int | None],
) -> dict[tuple[str, str], float]:
    """Return the correlation of leaves' changes with the update of a state (``roles.pair``)."""
    rate, beta1, beta2 = constants.lr, constants.beta1, constants.beta2
    count, last_count = counts[parameter.name], run.counts.get(parameter.name)
    if not rate or beta1 is None or beta2 is None or count is None:
        return {}
    first, second = (
        reader.sample(sources[str(path)]) for path in (parameter.first, parameter.second)
    )
    with np.errstate(all="ignore"):  # a state of zeros, or with NaN, is no evidence
        update = adam.update(first, second, constants.eps or 1e-8, count, (beta1, beta2))
    update -= update.mean()
    squares = float(np.vdot(update, update))
    if not 0 < squares < np.inf:
        return {}
    # Of gradients that are noise, an update explains so many of the steps since the last save. If
    # they have a trend, it explains more.
    steps = max(1, count - (count - 1 if last_count is None else last_count))
    explained = (1 - beta1**steps) / (1 - beta1)
    evidence: dict[tuple[str, str], float] = {}
    for path, change in moving.items():
        product = -float(np.vdot(update, change))
        times = product / squares / rate
        if explained / _RATE_FACTOR <= times <= steps * _RATE_FACTOR:
            size = np.sqrt(squares * float(np.vdot(change, change)))
            evidence[parameter.name, path] = product / size
    return evidence


def proven(
    run: RunState,
    reader: LeafReader,
    leaf_roles: Roles,
    layout: Layout,
    sources: Mapping[str, LeafSource],
) -> Roles:
    """Return the roles with each master's weight, found by content.

    The proof is repeated while a master has no weight, and after a capture has found a weight that
    is not the cast of its master.

    Args:
        run: Keeps the proof between saves.
        reader: Access to leaves.
        leaf_roles: The roles as names and shapes give them.
        layout: The leaves and tiles that this process writes.
        sources: Their sources, by stored path.
    """
    if run.proof is not None and run.proof[0] == leaf_roles:
        return run.proof[1]
    result = roles.prove(leaf_roles, partial(_is_cast, reader, layout, sources))
    is_complete = all(p.proven or p.master is None for p in result.parameters)
    run.proof = (leaf_roles, result) if is_complete else None
    return result


def _is_cast(
    reader: LeafReader, layout: Layout, sources: Mapping[str, LeafSource], weight: str, master: str
) -> bool:
    """Return true if a sample of a weight is the rounded master, as far as they are here.

    A sample is enough: every value is checked again when the weight is captured.
    """
    for cell in layout.cells([weight, master]):
        if len(cell.names) < 2:  # cut in different ways
            return False
        weights, masters = (reader.sample(sources[cell.names[path]]) for path in (weight, master))
        restored = derivation.cast(masters, weights.dtype)
        if weights.dtype.itemsize != 2 or not np.array_equal(
            weights.view(np.uint8), restored.view(np.uint8)
        ):
            return False
    return True
