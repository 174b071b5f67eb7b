"""A policy tells before the first save what a restore gives back, in the terms of its contracts."""

from __future__ import annotations

import pytest

from deltacheck import Policy
from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy.decide import Situation, decide
from deltacheck.policy.parameters import Hyperparameters, Parameter
from deltacheck.policy.stage import STABLE, WARM

PARAMETER = Parameter("p", weight="w", master="x", first="m", second="v", count="t", adam=True)
SPECS = {"w": LeafSpec.of("w", (64, 64), "bfloat16")} | {
    path: LeafSpec.of(path, (64, 64), "float32") for path in "xmv"
}


@pytest.mark.parametrize("moments", ["exact", "bounded", "reused"])
@pytest.mark.parametrize("octaves", [0.1, 0.5, 2.0])
def test_the_promised_numbers_are_those_of_the_contracts(moments: str, octaves: float) -> None:
    policy = Policy.auto(moments=moments, moment_error_octaves=octaves, master_error_lr=8)
    text = "; ".join(policy.promises())
    situation = Situation(Hyperparameters(1e-5, 0.9, 0.999, 1e-8), 10_000, None, 1.0)
    for stage in (WARM, STABLE):
        for decision in decide(policy, stage, PARAMETER, SPECS, situation).values():
            match decision.terms:
                case Bounded(limit, norm):
                    unit = {"lr": "learning rates"}.get(norm, norm)
                    assert f"within {limit:g} {unit}" in text
                case Reused():
                    assert "at most 200 updates old" in text
    assert ("updates old" in text) == (moments == "reused")


def test_an_exact_policy_promises_every_bit() -> None:
    assert Policy.exact().promises() == ["all leaves: every bit"]
    assert Policy.exact(derive=True).promises() == ["all leaves: every bit"]


def test_weights_that_may_err_are_named() -> None:
    assert "float32 weights" not in "; ".join(Policy.auto().promises())
    text = "; ".join(Policy.auto(float32_weights="bounded", weights="bounded").promises())
    assert "float32 weights: within 32 learning rates" in text
    assert "bfloat16 weights: the cast of their master" in text
