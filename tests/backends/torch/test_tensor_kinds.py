"""Tensors of unusual element types, and tensors that wrap others: the same bits, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from torch.testing._internal.two_tensor import TwoTensor

import deltacheck
from deltacheck.backends.torch import Engine, Shard, load
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import TreeMismatch, UnsupportedLeaf
from deltacheck.store.roots.opening import open_root
from tests.support.states import random_tensor
from tests.support.wrappers import Blocks, blocks, sharded_blocks

# PyTorch 2.6 has neither.
NEW_DTYPES = ("float4_e2m1fn_x2", "float8_e8m0fnu")
DTYPES = [
    *(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)),
    *(getattr(torch, name) for name in NEW_DTYPES if hasattr(torch, name)),
    torch.complex32,
    torch.bits8,
]


class Forgetful(Blocks):
    """A class whose context lacks its shape."""

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: list[Any], size: Any, stride: Any
    ) -> Blocks:
        return cls(parts["codes"], parts["scale"], parts["codes"].shape, context[0])


@pytest.fixture(autouse=True)
def _named() -> Iterator[None]:
    before = get_safe_globals()
    add_safe_globals([TwoTensor, Blocks, Forgetful])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf")
        yield
    # A test may have imported a library that names its classes.
    kept = {*before, *get_safe_globals()}.difference([TwoTensor, Blocks, Forgetful])
    clear_safe_globals()
    add_safe_globals(list(kept))


def same(a: torch.Tensor, b: Any) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and (
        leaves.bytes_of(a).tobytes() == leaves.bytes_of(b).tobytes()
    )


def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor(dtype, (6, 10), 1) for dtype in DTYPES}
    state |= {f"{name}.t": value.t() for name, value in state.items()}
    state |= {f"{dtype}.empty": random_tensor(dtype, (0, 3), 1) for dtype in DTYPES}
    with Engine(tmp_path) as engine:
        engine.save(0, state).result(240)
        leaves.copyable(state["torch.int4"])[0] += 1
        engine.save(1, state).result(240)
    into = {
        name: random_tensor(value.dtype, tuple(value.shape), 2) for name, value in state.items()
    }
    with Engine(tmp_path) as engine:
        for back in (engine.restore(), load(tmp_path, map_location="cpu"), into):
            if back is into:
                engine.restore(into=into)
            assert [name for name, value in state.items() if not same(value, back[name])] == []


def test_bits_of_another_dtype_are_no_match_for_a_target(tmp_path: Path) -> None:
    half = random_tensor(torch.complex32, (3,), 1)
    with Engine(tmp_path) as engine:
        engine.save(0, {"z": half}).result(240)
        with pytest.raises(TreeMismatch, match=r"'z' is dtype:torch\.complex32 in step 0"):
            engine.restore(into={"z": half.view(torch.uint32)})
    # A reader without torch has the bits.
    assert deltacheck.open(tmp_path).restore()["z"].tobytes() == leaves.bytes_of(half).tobytes()


def test_small_integers_of_jax_are_those_of_torch(tmp_path: Path) -> None:
    values = torch.arange(4, dtype=torch.uint8).view(torch.uint4)
    with Engine(tmp_path) as engine:
        engine.save(0, {"w": values}).result(240)
        assert open_root(tmp_path).manifest().must_understand == ()
    assert deltacheck.open(tmp_path).restore()["w"].astype(int).tolist() == [0, 1, 2, 3]


def test_wrappers_come_back_with_the_tensors_that_they_wrap(tmp_path: Path) -> None:
    inner = TwoTensor(torch.arange(4.0), torch.arange(4.0))
    state = {"moment": blocks(0), "two": TwoTensor(inner, inner), "w": inner.a}
    with Engine(tmp_path) as engine:
        report = engine.save(0, state).result(240)
        paths = ["moment/codes", "moment/scale", "two/a/a", "two/a/b"]
        assert [leaf.path for leaf in report.leaves] == paths
        state["moment"].codes[3] += 1
        engine.save(1, state).result(240)
    empty = TwoTensor(torch.zeros(4), torch.zeros(4))
    into = {"moment": blocks(5), "two": TwoTensor(empty, empty), "w": empty.a}
    with Engine(tmp_path) as engine:
        for back in (engine.restore(), engine.restore(into=into), load(tmp_path)):
            moment = back["moment"]
            assert (type(moment), moment.shape, moment.block) == (Blocks, (8, 8), 16)
            assert same(state["moment"].codes, moment.codes)
            assert same(state["moment"].scale, moment.scale)
            assert type(back["two"].b) is TwoTensor
            assert same(inner.b, back["two"].b.b)
            assert back["two"].a.a is back["w"]
    assert same(state["moment"].codes, into["moment"].codes)
    # A reader without the class has the tensors by name.
    assert list(deltacheck.open(tmp_path).restore()["moment"]) == ["codes", "scale"]
    clear_safe_globals()
    with pytest.raises(UnsupportedLeaf, match=r"'moment' was saved as .*Blocks.*add_safe_globals"):
        load(tmp_path)


def test_wrappers_in_the_state_of_a_known_optimizer_are_saved(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        weight.grad = torch.ones(8)
        optimizer.step()
        optimizer.state[weight]["moment"] = blocks(0)
        engine.save(0, {"optimizer": optimizer.state_dict(), "w": weight}).result(240)
        assert type(engine.restore()["optimizer"]["state"][0]["moment"]) is Blocks


def refused() -> dict[str, tuple[Any, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    dense = torch.ones(2).as_subclass(type("Image", (torch.Tensor,), {}))
    return {
        "masked": (masked, r"MaskedTensor.*get_data\(\)"),
        "lazy": (torch.nn.LazyLinear(2).weight, "UninitializedParameter.*run a batch"),
        "lazy buffer": (torch.nn.parameter.UninitializedBuffer(), "UninitializedBuffer"),
        "dense": (dense, r"Image.*as_subclass\(torch.Tensor\)"),
        "unnamed": (type("Other", (TwoTensor,), {})(torch.ones(2), torch.ones(2)), "add_safe_gl"),
        "forgetful": (
            Forgetful(torch.ones(4).byte(), torch.ones(1), torch.Size([2, 2]), 4),
            "Forgetful.*cannot be made again from its parts",
        ),
        "quantized": (torch.ones(2, dtype=torch.uint8).view(torch.quint8), "quint8"),
    }


@pytest.mark.parametrize("name", refused())
def test_other_tensors_are_refused_by_path_and_class(name: str, tmp_path: Path) -> None:
    value, message = refused()[name]
    with (
        Engine(tmp_path) as engine,
        pytest.raises(UnsupportedLeaf, match=f"leaf 'a/b'.*{message}"),
    ):
        engine.save(0, {"a": {"b": value}})


def test_a_wrapper_below_a_dtensor_is_refused_and_the_remedy_keeps_it(
    tmp_path: Path, one_rank: Any
) -> None:
    with Engine(tmp_path, process_group=one_rank) as engine:
        with pytest.raises(
            UnsupportedLeaf, match=r"leaf 'm/0'.*Blocks.*save value\.to_local\(\).*number of ranks"
        ):
            engine.save(0, {"m": [sharded_blocks(1)]})
        assert engine.steps() == []
        wrapped = sharded_blocks(1).to_local()
        engine.save(0, {"rank0": {"m": [wrapped]}}).result(240)
        target = {"rank0": {"m": [sharded_blocks(2).to_local()]}}
        assert same(engine.restore(into=target)["rank0"]["m"][0].codes, wrapped.codes)
        assert same(target["rank0"]["m"][0].scale, wrapped.scale)
        shard = Shard(wrapped, (8, 8), (0, 0))
        with pytest.raises(UnsupportedLeaf, match=r"leaf 'm'.*Blocks.*save value\.data"):
            engine.save(1, {"m": shard})


@pytest.mark.filterwarnings("ignore")  # torchao compiles its steps
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_torchao_optimizer_resumes_exactly(name: str, tmp_path: Path) -> None:
    torchao_optim = pytest.importorskip("torchao.optim")

    def run(saved: Any, steps: range) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 64)
        optimizer = getattr(torchao_optim, name)(model.parameters(), lr=1e-2)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = run(None, range(2))
    with Engine(tmp_path) as engine:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        engine.save(0, state).result(240)
        resumed, _ = run(engine.restore(), range(2, 4))
    whole, _ = run(None, range(4))
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert same(left, right)
