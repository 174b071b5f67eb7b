"""Capture weights that are the cast of a master, and masters on a lattice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from deltacheck.codec.lossy import lattice, nested
from deltacheck.leaf.contracts import Bounded, Promise
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import Decision
from deltacheck.save.job.source import Coded
from deltacheck.save.treatment.error_measures import Array, relative_error
from deltacheck.save.treatment.lossy_save import ParameterSave


class WeightCapture:
    """The weight and the master of one parameter.

    A leaf whose contract would not hold is stored exactly after all.
    """

    def __init__(self, group: ParameterSave) -> None:
        self._group = group

    def capture_master(self, path: str, decision: Decision) -> Any:
        """Store a master as lattice codes, relative to its weight if that is stored exactly.

        Nothing is stored of it if no weight needs a bit: a restore then draws it from the cell of
        its weight. It is stored exactly if a value does not fit or lies outside the cell of its
        weight.
        """
        group, weights = self._group, None
        codes_of: Callable[..., lattice.CodedTensor] = lattice.codes
        if decision.of:
            weights = group.live(decision.of)
            bits = nested.most_bits(weights, decision.spacing, decision.halvings)
            if bits + decision.spare_bits <= nested.MOST_BITS:
                codes_of = nested.codes
            if bits == 0:
                decision = replace(decision, how="drawn")
        coded = codes_of(
            group.live(path),
            decision.spacing,
            decision.seed,
            halvings=decision.halvings,
            spare_bits=decision.spare_bits,
            weights=weights,
        )
        return self._bounded(path, decision, coded)

    def _bounded(self, path: str, decision: Decision, coded: lattice.CodedTensor) -> Any:
        """Return the codes of a master, or its exact values if the codes break the contract."""
        group, save = self._group, self._group.save
        assert isinstance(decision.terms, Bounded)
        error = coded.largest_error / self._unit(decision.terms)
        if coded.refused or error > decision.terms.limit:
            save.run.doubt_proof()
            return group.exactly(path)
        # As decided: a leaf that is drawn, or has too many bits, may have relative codes later.
        save.run.keep_lattice(path, group.decisions[path])
        promise = Promise(decision.terms, error)
        if decision.how == "drawn":
            no_lattice = {"spacing": 0.0, "halvings": 0, "spare_bits": 0}
            save.promise(path, group.derived(path, decision, **no_lattice), promise)
            return Coded(None, None)
        save.promise(path, group.derived(path, decision), promise)
        spec = LeafSpec.of(path, group.spec(path).shape, coded.codes.dtype.name)
        return Coded(spec, coded.codes.view(np.uint8))

    def capture_cast(self, path: str, decision: Decision) -> Any:
        """Store nothing of a weight that a restore casts from its master.

        It is stored exactly if the cast differs from it by more than the contract allows.
        """
        group, save = self._group, self._group.save
        bounded = group.decisions.get(decision.of)
        error = None
        if bounded is not None and bounded.terms is not None:
            error = self._cast_error(group.live(path), group.live(decision.of), bounded)
        if error is None:
            # The master is stored exactly, so the cast must be equal bit for bit.
            memory, contents = group.together(path, decision.of)
            if not memory.is_cast(contents[0], contents[1], group.spec(path).element.numpy):
                save.run.doubt_proof()
                return group.exactly(path)
            save.promise(path, group.derived(path, decision, digest=group.digest(path)), None)
            return Coded(None, None)
        assert isinstance(decision.terms, Bounded)
        # "not <=" and not ">", which a NaN would pass.
        if not error <= decision.terms.limit:
            save.run.doubt_proof()
            return group.exactly(path)
        save.promise(path, group.derived(path, decision), Promise(decision.terms, error))
        return Coded(None, None)

    def _cast_error(self, live: Array, master: Array, bounded: Decision) -> float | None:
        """Return ``||restored - live|| / ||live||`` of the weight cast from the bounded master.

        ``None`` if a value of the master does not fit its lattice.
        """
        assert isinstance(bounded.terms, Bounded)
        errors = lattice.cast_errors(
            master,
            bounded.spacing,
            bounded.seed,
            halvings=bounded.halvings,
            spare_bits=bounded.spare_bits,
            weights=live,
        )
        if errors.refused or errors.largest_error / self._unit(bounded.terms) > bounded.terms.limit:
            return None
        return relative_error(errors.sum_squared_error, errors.sum_squared_weights)

    def _unit(self, terms: Bounded) -> float:
        """Return the learning rate that is the unit of a master's error."""
        rate = terms.rate or self._group.situation.hyperparameters.lr
        assert rate is not None  # without a learning rate no spacing is decided
        return rate
