"""Exact values (P11): each state comes back with the same bits, or is refused.

This holds for all bits, strides, names and ties, in both frameworks.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from tests.support.states import assert_same, bits

SIXTEEN = [np.dtype(t) for t in ("float16", "int16", "uint16", ml_dtypes.bfloat16)]
EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


def through_engine(*states: Any) -> list[Any]:
    """Save states one after the other, and return the restored ones."""
    with tempfile.TemporaryDirectory() as folder, Engine(folder) as engine:
        for step, state in enumerate(states):
            engine.save(step, state).wait(timeout=240)
        return [engine.restore(step) for step in range(len(states))]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_every_pattern_of_16_bits_comes_back_from_a_keyframe_and_from_a_delta(
    dtype: np.dtype[Any], seed: int
) -> None:
    """Each of the 65,536 patterns is base and current value, in pairs that the seed draws."""
    random = np.random.default_rng(seed)
    states = [{"x": random.permutation(EVERY_PATTERN).view(dtype)} for _ in range(3)]
    if seed:
        states[1]["x"].view(np.uint16)[::3] = states[0]["x"].view(np.uint16)[::3]
    for state, back in zip(states, through_engine(*states), strict=True):
        assert back["x"].dtype == dtype
        assert bits(back["x"]) == bits(state["x"])


@st.composite
def strided(draw: st.DrawFn) -> NDArray[Any]:
    """Return an array of any type at any offset and stride.

    It may be reversed, skipping, transposed, of zero stride, read-only or unaligned.
    """
    name = draw(
        st.sampled_from(
            ["float32", "bfloat16", "int8", "complex128", "uint16", "float8_e4m3fn", "bool"]
        )
    )
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    raw = np.frombuffer(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))).bytes(4096), np.uint8
    )
    if name == "bool":
        raw = raw & np.uint8(1)
    offset = draw(st.integers(0, 17))
    array: NDArray[Any] = raw[offset : offset + 60 * dtype.itemsize].view(dtype).reshape(3, 4, 5)
    axes = draw(st.permutations(range(3)))
    array = array.transpose(axes)
    array = array[tuple(slice(None, None, draw(st.sampled_from([1, 2, -1, -2]))) for _ in range(3))]
    match draw(st.integers(0, 4)):
        case 0:
            array = np.broadcast_to(array[..., :1], array.shape)
        case 1:
            array = array[:0]
        case 2:
            array = array[1, 1, 1:2].reshape(())
        case 3:
            array = array.copy()
            array.flags.writeable = False
    return array


@settings(max_examples=20_000 if LONG else 25)
@given(st.lists(strided(), min_size=1, max_size=6))
def test_an_array_of_any_stride_comes_back_from_numpy_and_torch(leaves: list[NDArray[Any]]) -> None:
    def as_tensor(array: NDArray[Any]) -> torch.Tensor:
        whole = np.ascontiguousarray(array)
        tensor = torch.from_numpy(whole.reshape(-1).view(np.uint8).copy()).view(
            getattr(torch, array.dtype.name)
        )
        reverse = (
            tensor.reshape(array.shape).permute(tuple(reversed(range(array.ndim)))).contiguous()
        )
        return reverse.permute(
            tuple(reversed(range(array.ndim)))
        )  # the same values in Fortran's order

    state = {"numpy": leaves, "torch": [as_tensor(array) for array in leaves if array.size]}
    (back,) = through_engine(state)
    for array, found in zip(leaves, back["numpy"], strict=True):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert bits(found) == bits(array)
    assert_same(state["torch"], back["torch"])


@settings(max_examples=5000 if LONG else 4)
@given(st.lists(strided(), min_size=1, max_size=6))
def test_an_array_of_any_stride_comes_back_from_jax(leaves: list[NDArray[Any]]) -> None:
    jax = pytest.importorskip("jax")
    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    leaves = [array for array in leaves if array.dtype != np.complex128]  # JAX would round it
    state = {
        str(number): value
        for number, array in enumerate(leaves)
        for value in (jax.numpy.asarray(array),)
    }
    state |= {f"numpy{number}": array for number, array in enumerate(leaves)}
    with tempfile.TemporaryDirectory() as folder:
        with manager(folder) as opened:
            opened.save(0, args=DeltaSaveArgs(state))
            opened.wait_until_finished()
        back = deltacheck.open(folder).restore()
    for number, array in enumerate(leaves):
        for name in (str(number), f"numpy{number}"):
            assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
            assert bits(back[name]) == bits(array)


@pytest.mark.parametrize("order", [">f4", ">i2", ">c8"])
def test_an_array_in_the_other_byte_order_is_refused_at_the_call(
    order: str, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path) as engine,
        pytest.raises(errors.UnsupportedLeaf, match="native byte order"),
    ):
        engine.save(0, {"x": np.zeros(3, order)})


NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(
        [
            "",
            ".",
            "..",
            "/",
            "a.b",
            "a/b",
            "A",
            "a",
            "\0",
            "\n",
            "é",
            "e\u0301",
            "x" * 4096,
            "zarr.json",
            "-1",
            "0",
            "%30",
            "%",
        ]
    ),
    st.integers(-(2**70), 2**70),
)


@settings(max_examples=2000 if LONG else 8)
@given(
    st.lists(NAMES, unique_by=lambda name: (type(name), name), min_size=1, max_size=12),
    st.booleans(),
)
def test_every_name_is_kept_apart_from_every_other(names: list[Any], large: bool) -> None:
    """Names differ by NFC and NFD, case, escapes, or integers and their digits."""
    size = 70_000 if large else 2
    state = {
        name: np.full(size, number, np.int32)
        for number, name in enumerate(names[: 4 if large else None])
    }
    (back,) = through_engine(state)
    assert [(type(name), name) for name in back] == [(type(name), name) for name in state]
    assert all(np.array_equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("key", ["\ud800", "a\udfffb"])
def test_a_name_that_utf_8_cannot_keep_is_refused_at_the_call(key: str, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine, pytest.raises(errors.UnsupportedLeaf, match="lone surrogates"):
        engine.save(0, {key: np.zeros(100_000)})


@pytest.mark.parametrize("state", [{"x": 10**5000}, {10**5000: 1}], ids=["value", "key"])
def test_an_integer_that_python_would_not_read_again_is_refused_at_the_call(
    state: Any, tmp_path: Path
) -> None:
    with (
        Engine(tmp_path) as engine,
        pytest.raises(errors.UnsupportedLeaf, match="store it as bytes"),
    ):
        engine.save(0, state)


@pytest.mark.skipif(not LONG, reason="takes a minute: HYPOTHESIS_PROFILE=soak")
def test_a_hundred_thousand_leaves_come_back() -> None:
    state = {f"layer{number}": np.full(3, number, np.float32) for number in range(100_000)}
    (back,) = through_engine(state)
    assert all(np.array_equal(back[name], state[name]) for name in state)


def test_views_that_overlap_come_back_with_their_own_values() -> None:
    base = torch.arange(20.0)
    state = {
        "all": base,
        "left": base[:12],
        "right": base[8:],
        "again": base[:12],
        "reversed": base.numpy()[::-1],
    }
    (back,) = through_engine(state)
    assert_same(state, back)
    assert back["left"] is back["again"]
    assert back["left"].data_ptr() != back["all"].data_ptr()


def test_a_leaf_of_more_axes_than_an_array_may_have_is_kept_or_refused(tmp_path: Path) -> None:
    small, large = torch.zeros([1] * 40 + [5]), torch.zeros([1] * 40 + [100_000])
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": small}).wait(timeout=240)
        assert engine.restore()["x"].shape == small.shape
        try:
            engine.save(1, {"x": large}).wait(timeout=240)
            assert engine.restore(1)["x"].shape == large.shape
        except (errors.UnsupportedLeaf, errors.SaveFailed):
            assert engine.steps() == [0]


def content(root: Path) -> Any:
    """Return tables and data of the newest step, without parts that differ between equal saves."""
    from deltacheck.store.roots.opening import open_root
    from tests.store.test_golden import content_of

    opened = open_root(root)
    return content_of(opened, opened.manifest())


def test_the_bytes_depend_neither_on_threads_nor_on_how_the_work_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck import _native as native

    threads = native.threads()
    random = np.random.default_rng(0)
    states = [
        {
            "w": random.standard_normal((900, 500)).astype(np.float32),
            "b": random.standard_normal(99),
        }
    ]
    states.append(
        {
            name: np.where(random.random(x.shape) < 0.1, x * 1.01, x).astype(x.dtype)
            for name, x in states[0].items()
        }
    )
    found = []
    try:
        for number, (count, cache) in enumerate([(1, 256 << 20), (4, 256 << 20), (2, 128 << 20)]):
            native.set_threads(count)
            with Engine(
                tmp_path / str(number), options=SaveOptions(host_cache_bytes=cache)
            ) as engine:
                for step, state in enumerate(states):
                    engine.save(
                        step,
                        {name: x.copy() for name, x in reversed(state.items())}
                        if number == 1
                        else state,
                    ).wait(timeout=240)
            told, segments = content(tmp_path / str(number))
            del told["tree"]
            found.append((told, segments))
    finally:
        native.set_threads(threads)
    assert found[0] == found[1] == found[2]
