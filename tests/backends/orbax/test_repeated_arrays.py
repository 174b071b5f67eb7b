"""The saves after the first describe only what differs, and wait for no computation."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=4"

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltacheck.backends.orbax import DeltaSaveArgs, manager
from deltacheck.backends.orbax.state import leaves
from deltacheck.backends.orbax.state.repeated import ArrayFlattener, KnownArrays
from deltacheck.backends.orbax.state.saved_shardings import records_of
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree


class Moments(NamedTuple):
    """A container that JAX knows as a node."""

    mean: Any
    square: Any


def sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))


def state(step: int = 0) -> dict[str, Any]:
    tied = jnp.ones((4, 3)) * step
    return {
        "params": {"w": jnp.full((8, 2), step, jnp.bfloat16), "tied": tied, "again": tied},
        "opt": Moments([jnp.arange(4.0) + step], {"s": jax.device_put(jnp.ones(8), sharding())}),
        "key": jax.random.key(step),
        "empty": jnp.zeros((0, 2)),
        "numpy": np.arange(3) + step,
        "step": step,
        "none": None,
    }


def test_a_known_state_is_flattened_as_any_other() -> None:
    flatten = ArrayFlattener()
    for step in range(3):
        value = state(step)
        flat, expected = flatten(value), tree.flatten(value, leaves.describe, leaves.expand)
        assert isinstance(flat, KnownArrays) == (step > 0)
        assert flat.skeleton == expected.skeleton
        assert list(flat.arrays) == list(expected.arrays)
        assert all(flat.arrays[path] is array for path, array in expected.arrays.items())
        assert {path: leaf._replace(identity=None) for path, leaf in expected.leaves.items()} == {
            path: leaf._replace(identity=None) for path, leaf in flat.leaves.items()
        }
        if isinstance(flat, KnownArrays):
            assert flat.records == records_of(expected.arrays)
            assert list(flat.viewable) == [
                path for path, array in expected.arrays.items() if leaves.is_viewable(array)
            ]


def resized(value: dict[str, Any]) -> None:
    value["params"]["w"] = jnp.ones((4, 2), jnp.bfloat16)


def as_float(value: dict[str, Any]) -> None:
    value["params"]["w"] = value["params"]["w"].astype(jnp.float16)


def gathered(value: dict[str, Any]) -> None:
    moments = value["opt"].square
    moments["s"] = jax.device_put(moments["s"], jax.devices()[0])


def no_longer_tied(value: dict[str, Any]) -> None:
    value["params"]["again"] = value["params"]["again"] + 1


def tied(value: dict[str, Any]) -> None:
    value["opt"].mean.append(value["opt"].mean[0])


def of_other_keys(value: dict[str, Any]) -> None:
    value["key"] = jax.random.key(0, impl="rbg")


def with_keys_elsewhere(value: dict[str, Any]) -> None:
    value["key"] = jax.device_put(value["key"], jax.devices()[1])


def as_numpy(value: dict[str, Any]) -> None:
    value["params"]["w"] = np.asarray(value["params"]["w"])


def as_float_numpy(value: dict[str, Any]) -> None:
    value["numpy"] = value["numpy"] * 1.5


def in_other_order(value: dict[str, Any]) -> None:
    value["params"]["w"] = value["params"].pop("w")


def as_tuple(value: dict[str, Any]) -> None:
    value["opt"] = tuple(value["opt"])


CHANGES = [
    resized,
    as_float,
    gathered,
    no_longer_tied,
    tied,
    of_other_keys,
    with_keys_elsewhere,
    as_numpy,
    as_float_numpy,
    in_other_order,
    as_tuple,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_of_other_forms_is_described_again(
    change: Callable[[dict[str, Any]], None],
) -> None:
    flatten, value = ArrayFlattener(), state(1)
    flatten(state(0))
    change(value)
    flat, expected = flatten(value), tree.flatten(value, leaves.describe, leaves.expand)
    assert not isinstance(flat, KnownArrays)
    assert flat == expected
    assert isinstance(flatten(value), KnownArrays)


def test_a_deleted_array_of_a_known_state_is_refused_by_save(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs(state(0)))
        value = state(1)
        value["params"]["w"].delete()
        with pytest.raises(UnsupportedLeaf, match=r"'params/w'.*deleted or donated"):
            mngr.save(1, args=DeltaSaveArgs(value))


def test_save_waits_for_no_computation_and_a_donation_changes_nothing(tmp_path: Path) -> None:
    @jax.jit
    def slow(x: Any, turns: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ a), x)

    update = jax.jit(lambda x: x * 0, donate_argnums=0)
    start, few = jnp.ones((300, 300)) / 7, jnp.asarray(1)
    update(slow(start, few)).block_until_ready()
    saved = 0
    with manager(tmp_path) as mngr:
        # The speed of the machine decides how many turns are enough to run beyond ``save``.
        for step, turns in enumerate((64, 256, 1024, 4096, 4096)):
            running = slow(start + step, jnp.asarray(turns))
            mngr.save(step, args=DeltaSaveArgs({"x": running}))
            if running.is_ready():
                mngr.wait_until_finished()
                continue
            donated = update(running)
            mngr.wait_until_finished()
            assert running.is_deleted()
            assert np.array_equal(mngr.restore(step)["x"], slow(start + step, jnp.asarray(turns)))
            assert not np.asarray(donated).any()
            saved += 1
            if saved == 2:
                return
    pytest.fail("save waited for the computation of the array")
