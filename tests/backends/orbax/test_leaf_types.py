"""Element types, weak types and descriptions of leaves, as Orbax's users and helpers meet them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
from orbax.checkpoint.checkpoint_utils import construct_restore_args

from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, load, manager
from deltacheck.errors import TreeMismatch

MIXED = {
    "jax": jnp.arange(8.0),
    "numpy": np.arange(3),
    "scalar": np.float32(2),
    "int": 7,
    "float": 0.5,
    "bool": True,
    "text": "hello",
    "key": jax.random.key(3),
    "none": None,
    "list": [1, (jnp.ones(2),)],
}


def save(root: Path, state: Any) -> None:
    with manager(root) as mngr:
        mngr.save(0, args=DeltaSaveArgs(state))
        mngr.wait_until_finished()


def abstract(dtype: Any, shape: tuple[int, ...] = ()) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- casts that keep every value ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (np.int32(3), jnp.uint32),  # ``device_put(count.item())`` in the place of a uint32
        (np.array([1, 2, 255], np.uint32), jnp.int8),
        (np.array([1.5, np.nan], jnp.bfloat16), jnp.float32),
        (np.array([-1.5, np.inf], np.float16), jnp.float32),
        (np.array([True, False]), jnp.int32),
    ],
)
def test_a_cast_that_keeps_every_value_needs_no_request(
    tmp_path: Path, saved: Any, dtype: Any
) -> None:
    save(tmp_path, {"x": jnp.asarray(saved)})
    target = {"x": abstract(dtype, np.shape(saved))}
    if dtype is jnp.int8:  # 255 does not fit
        with pytest.raises(TreeMismatch, match=r"'x' is uint32 in step 0, .*int8.* 255.*cast=True"):
            load(tmp_path, target=target)
        return
    for restored in (load(tmp_path, target=target), load(tmp_path, target=target, cast=True)):
        assert restored["x"].dtype == dtype
        np.testing.assert_array_equal(np.asarray(restored["x"]), np.asarray(saved).astype(dtype))


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        (np.array([1.0]), jnp.bfloat16),
        (np.array([1.0], np.float32), jnp.int32),
        (np.array([1], np.int32), jnp.float32),
        (np.array([-1], np.int32), jnp.uint32),
        (np.array([2**31], np.uint32), jnp.int32),
    ],
)
def test_a_cast_that_may_change_values_needs_a_request(
    tmp_path: Path, saved: Any, dtype: Any
) -> None:
    save(tmp_path, {"x": jnp.asarray(saved)})
    with pytest.raises(TreeMismatch, match=r"leaf 'x' is .* in step 0, .*cast=True"):
        load(tmp_path, target={"x": abstract(dtype, (1,))})
    assert load(tmp_path, target={"x": abstract(dtype, (1,))}, cast=True)["x"].dtype == dtype


# --- weak types -----------------------------------------------------------------------------------


def test_weak_types_are_restored_so_that_a_resumed_step_keeps_its_dtypes(tmp_path: Path) -> None:
    state = {"w": jnp.ones(4, jnp.bfloat16), "rate": jnp.asarray(0.1), "strong": jnp.float32(1)}
    assert state["rate"].weak_type

    @jax.jit
    def step(state: Any) -> Any:
        return {**state, "w": state["w"] - state["rate"] * state["w"], "rate": state["rate"] * 0.9}

    save(tmp_path, step(state))
    expected = step(step(state))
    targets = (
        None,
        state,
        jax.eval_shape(lambda: state),
        # As ``to_shape_dtype_struct`` makes them: without weak types.
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
    )
    for target in targets:
        restored = load(tmp_path, target=target)
        assert [restored[name].weak_type for name in sorted(state)] == [True, False, False]
        resumed = step(restored)
        assert resumed["w"].dtype == jnp.bfloat16
        assert jax.tree.all(jax.tree.map(np.array_equal, resumed, expected))
    # Another dtype, or a number: the target decides.
    assert load(tmp_path, target={**state, "rate": abstract(jnp.float32)})["rate"].weak_type
    save(tmp_path / "number", {"rate": 0.5})
    assert load(tmp_path / "number", target={"rate": state["rate"]})["rate"].weak_type


# --- descriptions of values -----------------------------------------------------------------------


def assert_same(restored: Any, expected: Any) -> None:
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
        assert type(np.asarray(a).dtype) is type(np.asarray(b).dtype)


def test_item_metadata_has_orbax_s_descriptions_which_its_helpers_accept(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs(MIXED))
        mngr.wait_until_finished()
        metadata = mngr.item_metadata(0)
        kinds = {name: type(leaf).__name__ for name, leaf in metadata.tree.items()}
        assert kinds == {
            "jax": "ArrayMetadata",
            "numpy": "ArrayMetadata",
            "scalar": "ScalarMetadata",
            "int": "ScalarMetadata",
            "float": "ScalarMetadata",
            "bool": "ScalarMetadata",
            "text": "StringMetadata",
            "key": "ArrayMetadata",
            "none": "NoneType",
            "list": "list",
        }
        assert isinstance(metadata.tree["jax"], ocp.metadata.ArrayMetadata)
        assert metadata.tree["numpy"].sharding is None
        assert metadata.tree["jax"].sharding is not None
        assert metadata.tree["key"].shape == (2,)
        assert metadata.tree["list"][1][0].name == "list.1.0"
        assert metadata.tree["jax"].storage.contract == "exact"
        for target in (metadata, metadata.tree):
            assert_same(mngr.restore(0, args=DeltaRestoreArgs(target)), MIXED)
        # Orbax's helper asks for a Python number in the place of a NumPy scalar.
        expected = {**MIXED, "scalar": 2.0}
        for described in (metadata, metadata.tree):
            args = ocp.args.PyTreeRestore(restore_args=construct_restore_args(described))
            assert_same(mngr.restore(0, args=args), expected)


def test_restore_args_meet_the_leaves_by_path(tmp_path: Path) -> None:
    tree = {"a": {"x": jnp.ones(2), "y": np.arange(3)}, "b": (jnp.zeros(2), 5)}
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs(tree))
        mngr.wait_until_finished()
        whole = construct_restore_args(tree)
        part = {"a": {"x": tree["a"]["x"]}}
        args = ocp.args.PyTreeRestore(part, restore_args=whole, partial_restore=True)
        assert_same(mngr.restore(0, args=args), part)
        # A list in the place of a tuple, as a tree of plain Orbax has it.
        lists = {**whole, "b": list(whole["b"])}
        assert_same(mngr.restore(0, args=ocp.args.PyTreeRestore(restore_args=lists)), tree)
        args = ocp.args.PyTreeRestore(tree, restore_args={**whole, "c": ocp.RestoreArgs()})
        with pytest.raises(TreeMismatch, match="restore_args has a leaf 'c', which is not"):
            mngr.restore(0, args=args)


def test_restore_args_without_a_dtype_keep_the_saved_one(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"x": jnp.ones(2, jnp.bfloat16), "n": 7}))
        mngr.wait_until_finished()
        as_numpy = {"x": ocp.RestoreArgs(restore_type=np.ndarray), "n": ocp.RestoreArgs()}
        restored = mngr.restore(0, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        assert type(restored["x"]) is np.ndarray
        assert restored["x"].dtype == jnp.bfloat16
        as_numpy["n"] = ocp.RestoreArgs(restore_type=np.ndarray)
        restored = mngr.restore(0, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        np.testing.assert_array_equal(restored["n"], np.asarray(7))
        numbers = {"x": ocp.RestoreArgs(), "n": ocp.RestoreArgs(restore_type=int)}
        assert mngr.restore(0, args=ocp.args.PyTreeRestore(restore_args=numbers))["n"] == 7
