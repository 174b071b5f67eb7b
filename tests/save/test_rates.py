"""The unit of every bound is the learning rate of the leaf itself, whatever leaves are called.

The run knows the rate of each leaf. The judge compares every element of a restored state with the
live one. Neither asks the policy which state belongs to which leaf.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.leaf.contracts import Bounded
from tests.support.grouped_run import NAMED, NUMBERED, PARAM_NAMES, GroupedRun, Network, Tensor
from tests.support.promises import broken

# DELTACHECK_PROMISE_RUNS=12 makes about 1,300 lossy saves.
RUNS = int(os.environ.get("DELTACHECK_PROMISE_RUNS", "1"))
SAVES, SHAPE = 9, (16, 64)


def tensors(random: Any, names: Sequence[str], rates: Sequence[float]) -> list[Tensor]:
    made = []
    for name, rate in zip(names, rates, strict=True):
        values = random.normal(0, 0.02, SHAPE).astype(np.float32)
        made.append(Tensor(name, rate, values, np.exp(random.normal(0, 1, SHAPE)) * 1e-3))
    return made


def layers(count: int) -> list[str]:
    return [f"layers.{number}.weight" for number in range(count)]


def layer_wise_decay(random: Any) -> list[Network]:
    names, rates = layers(5), [1e-5 * 0.4 ** (4 - number) for number in range(5)]
    groups = [[name] for name in reversed(names)]
    if random.integers(2):
        random.shuffle(groups)
    return [Network(tensors(random, names, rates), groups, "model", "masters", "optimizer")]


def lora_plus(random: Any) -> list[Network]:
    names = [f"{layer}.lora_{which}.weight" for layer in range(2) for which in "AB"]
    made = tensors(random, names, [1e-5, 16e-5] * 2)
    groups = [names[1::2], names[::2]] if random.integers(2) else [names[::2], names[1::2]]
    return [Network(made, groups, "adapters", "masters", "optimizer")]


def lower_half_frozen(random: Any) -> list[Network]:
    names = layers(6)
    made = tensors(random, names, [0.0] * 3 + [1e-5] * 3)
    return [Network(made, [names[3:]], "model", "masters", "optimizer")]


# Paths of the model, its masters, and its optimizer.
PLACES = [
    ("{}", "{}_masters", "{}_optimizer"),
    ("models/{}", "masters/{}", "optimizers/{}"),
    ("{}/model", "{}/master", "{}/optimizer"),
]


def actor_and_critic(random: Any) -> list[Network]:
    networks, place = [], PLACES[random.integers(len(PLACES))]
    for which, rate in (("actor", 1e-6), ("critic", 1e-5)):
        # A critic may have layers that an actor lacks.
        names = layers(2 + (which == "critic") * int(random.integers(2)))
        paths = [path.format(which) for path in place]
        networks.append(Network(tensors(random, names, [rate] * len(names)), [names], *paths))
    return networks[:: random.choice([1, -1])]


def without_a_hint(random: Any) -> list[Network]:
    """Return two networks whose names do not tell which optimizer is whose."""
    networks = []
    letters = random.permutation(list("xy"))
    for letter, other, rate in zip("ab", letters, (1e-6, 1e-5), strict=True):
        made = tensors(random, layers(2), [rate] * 2)
        networks.append(Network(made, [layers(2)], f"net_{other}", f"masters/{other}", letter))
    return networks


def with_an_average(random: Any) -> list[Network]:
    (network,) = layer_wise_decay(random)
    return [replace(network, average=str(random.choice(["aux", "fp32_copy", "model_b"])))]


COURSES: dict[str, Callable[[Any], list[Network]]] = {
    "layer-wise decay": layer_wise_decay,
    "LoRA+": lora_plus,
    "lower half frozen": lower_half_frozen,
    "actor and critic": actor_and_critic,
    "without a hint": without_a_hint,
    "with an average": with_an_average,
}


# Those in which names tell whose state is whose. Numbered states of one shape and one rate may be
# paired by order, because any of them gives the same unit.
NAMED_COURSES = {
    *(
        (course, states)
        for course in ("layer-wise decay", "LoRA+")
        for states in (NAMED, PARAM_NAMES)
    ),
    *(("lower half frozen", states) for states in (NAMED, PARAM_NAMES)),
    *(("actor and critic", states) for states in (NUMBERED, NAMED, PARAM_NAMES)),
}


def policy(float32: bool, moments: str = "exact") -> Policy:
    made = Policy.auto(derive=False, moments=moments, stable_from=0, max_chain_depth=6)
    assert made.hidden is not None
    hidden = replace(made.hidden, float32_weights="bounded" if float32 else "exact")
    return replace(made, hidden=hidden)


def false_bounds(
    run: GroupedRun, chosen: Policy, every: int, growth: float = 1.0, without: str = ""
) -> Counter[str]:
    """Save a run, and return the false bounds, the saves with a bound, and the bounded leaves.

    ``without``: the part of the state that is not saved.
    """
    count: Counter[str] = Counter()
    run.advance(60)
    peak: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as root, Engine(root, policy=chosen) as engine:
        for save in range(SAVES):
            run.share = 1.0 - 0.05 * save
            run.advance(every, growth if save > 3 else 1.0)
            state, rates = run.state(), run.rates()
            state.pop(without, None)
            peak = {path: max(rate, peak.get(path, 0.0)) for path, rate in rates.items()}
            engine.save(run.step, state).result()
            opened = deltacheck.open(root)
            manifest = opened.manifest(run.step)
            found = broken(
                state,
                opened.restore(run.step),
                manifest,
                lambda step: state,  # noqa: B023 - nothing is reused
                rates,
                run.weight_of,
                peak,
            )
            count["false"] += len(found)
            count["saves"] += bool(manifest.contracts)
            count["bounds"] += len(manifest.contracts)
            count.update(found)
    return count


def show(what: str, count: Counter[str]) -> None:
    print(f"{what}: {count['false']} false of {count['bounds']} in {count['saves']} lossy saves")


@pytest.mark.parametrize("states", [NUMBERED, NAMED, PARAM_NAMES])
@pytest.mark.parametrize("course", COURSES)
def test_no_bound_is_in_the_unit_of_another_leaf(course: str, states: str) -> None:
    count: Counter[str] = Counter()
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        float32 = course != "with an average" and seed % 3 == 2
        networks = COURSES[course](random)
        if float32:
            networks = [replace(network, masters="") for network in networks]
        gradients = ("noise", "outer", "alike")[seed % 5 % 3]
        run = GroupedRun(networks, states, gradients, seed)
        count += false_bounds(run, policy(float32), int(random.integers(1, 11)))
    show(f"{course}, {states}", count)
    assert count["false"] == 0, count
    if RUNS == 1:
        # What nothing names is exact at the first save, which has none before to compare with.
        is_named = (course, states) in NAMED_COURSES
        trained = [t for n in networks for t in n.tensors if t.rate]
        assert count["bounds"] == (SAVES - (not is_named)) * len(trained)


@pytest.mark.parametrize("states", [NUMBERED, NAMED, PARAM_NAMES])
@pytest.mark.parametrize("average", ["fp32", "a/master", "shadow_fp32", "master_ema"])
@pytest.mark.parametrize("masters", ["masters", "float32"])
def test_an_average_never_takes_the_place_of_a_master(
    masters: str, average: str, states: str
) -> None:
    """Names of averages may sound like those of masters, and those of masters need not."""
    networks = [
        replace(network, masters=masters, average=average)
        for network in layer_wise_decay(np.random.default_rng(0))
    ]
    count = false_bounds(GroupedRun(networks, states), policy(False), 5)
    assert count["false"] == 0, count
    # Content decides from the second save on, if names do not.
    assert count["bounds"] >= (SAVES - 1) * 5


def test_the_names_that_torch_keeps_of_parameters_pair_states_and_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(3)))
    decayed, *others = model.named_parameters()
    optimizer = torch.optim.AdamW(
        [{"params": others, "lr": 1e-6}, {"params": [decayed], "lr": 1e-4}]
    )
    with Engine(tmp_path, policy=Policy.auto(float32_weights="bounded")) as engine:
        for step in range(1, 4):
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            live = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
            engine.save(step, state).result()
    opened = deltacheck.open(tmp_path)
    # Names decide, so already the first save is bounded, and no rate is shared.
    for step in (1, 2, 3):
        terms = {p: c.terms for p, c in opened.manifest(step).contracts.items() if p[:5] == "model"}
        expected = Bounded(step / 2, "lr")
        assert terms == {f"model/{number}.weight": expected for number in range(3)}
    for number, rate in enumerate((1e-4, 1e-6, 1e-6)):
        name = f"{number}.weight"
        error = np.abs(opened.restore()["model"][name] - live[name]).max()
        assert 0 < error <= 1.5 * rate


@pytest.mark.parametrize("name", ["aux", "fp32_copy", "master"])
def test_an_average_beside_bfloat16_weights_is_no_master(name: str) -> None:
    """The optimizer updates bfloat16 weights, so no float32 leaf is one that it updates."""
    networks = [replace(n, average=name) for n in layer_wise_decay(np.random.default_rng(0))]
    count = false_bounds(GroupedRun(networks, NAMED), policy(False), 5, without="masters")
    assert (count["false"], count["bounds"]) == (0, 0), count


@pytest.mark.parametrize("growth", [1.0, 1.05, 1.12, 1.3])
def test_a_bounded_second_moment_keeps_its_bound_while_gradients_grow(growth: float) -> None:
    count: Counter[str] = Counter()
    for seed in range(RUNS):
        run = GroupedRun(lora_plus(np.random.default_rng(seed)), NAMED, "steady", seed)
        count += false_bounds(run, policy(False, "bounded"), 10 - seed % 10, growth)
    show(f"growth {growth}", count)
    assert count["false"] == 0, count
    assert count["bounds"] == SAVES * 12 * RUNS
