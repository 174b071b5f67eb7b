"""The lossy presets under Orbax: the same contracts as in the torch engine, from the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends import orbax as backend
from deltacheck.backends.torch import load as load_as_torch

RATE = 1e-5


OPTIMIZER = optax.adamw(RATE, b1=0.9, b2=0.999)


@jax.jit
def step(state: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    leaves, shape = jax.tree.flatten(state["master"])
    keys = jax.random.split(key, len(leaves))
    noise = [0.1 + jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    updates, opt = OPTIMIZER.update(
        jax.tree.unflatten(shape, noise), state["opt_state"], state["master"]
    )
    master = optax.apply_updates(state["master"], updates)
    return {
        "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), master),
        "master": master,
        "opt_state": opt,
    }


def train(state: dict[str, Any], key: jax.Array, steps: int) -> dict[str, Any]:
    for k in jax.random.split(key, steps):
        state = step(state, k)
    return state


def fresh() -> dict[str, Any]:
    random = np.random.default_rng(0)
    master = {
        n: {"kernel": jnp.asarray(random.normal(0, 0.02, (64, 80)), jnp.float32)}
        for n in ("a", "b")
    }
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
    return {"params": params, "master": master, "opt_state": optax.adamw(RATE).init(master)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A root of 20 saves, and the states that were saved."""
    root = tmp_path_factory.mktemp("orbax-policy") / "root"
    states: dict[int, Any] = {}
    state = fresh()
    policy = Policy.auto(derive=False, betas=(0.9, 0.999))
    with backend.manager(
        root, ocp.CheckpointManagerOptions(max_to_keep=None), policy=policy
    ) as manager:
        for number in range(20):
            state = train(state, jax.random.key(number), 10)
            states[10 * (number + 1)] = jax.tree.map(np.asarray, state)
            args = backend.DeltaSaveArgs(state, metrics={"learning_rate": RATE})
            manager.save(10 * (number + 1), args=args)
        manager.wait_until_finished()
    return root, states


def test_a_jax_run_becomes_stable_and_its_weights_stay_exact(
    run: tuple[Path, dict[int, Any]],
) -> None:
    root, states = run
    opened = deltacheck.open(root)
    manifest = opened.manifest()
    assert manifest.stage == "stable"
    assert manifest.contract == "reused"
    found = opened.restore()
    assert all(
        np.array_equal(found["params"][n]["kernel"], states[200]["params"][n]["kernel"])
        for n in "ab"
    )
    for n in "ab":
        assert (
            np.abs(found["master"][n]["kernel"] - states[200]["master"][n]["kernel"]).max()
            <= 32 * RATE
        )
    assert manifest.contracts["opt_state/0/nu/a/kernel"].measured <= 0.35


def test_a_manager_restores_what_every_reader_restores(run: tuple[Path, dict[int, Any]]) -> None:
    root, _ = run
    with backend.manager(root, ocp.CheckpointManagerOptions(read_only=True)) as manager:
        found = manager.restore(200, args=backend.DeltaRestoreArgs(fresh()))
        with pytest.raises(errors.ContractNotMet, match="is reused"):
            manager.restore(200, args=backend.DeltaRestoreArgs(contract="bounded"))
    plain = deltacheck.open(root).restore(200)
    torch_state = load_as_torch(root, 200)
    for n in "ab":
        np.testing.assert_array_equal(
            np.asarray(found["master"][n]["kernel"]), plain["master"][n]["kernel"]
        )
        np.testing.assert_array_equal(
            torch_state["master"][n]["kernel"].numpy(), plain["master"][n]["kernel"]
        )


def test_without_a_learning_rate_masters_stay_exact(tmp_path: Path) -> None:
    state = fresh()
    with backend.manager(
        tmp_path / "root", policy=Policy.auto(derive=False, betas=(0.9, 0.999))
    ) as manager:
        for number in range(18):
            state = train(state, jax.random.key(number), 10)
            manager.save(number, args=backend.DeltaSaveArgs(state))
        manager.wait_until_finished()
    manifest = deltacheck.open(tmp_path / "root").manifest()
    assert "opt_state/0/nu/a/kernel" in manifest.contracts
    assert "master/a/kernel" not in manifest.contracts
