"""One format: what JAX saves, torch continues, and the other way round; and both write the same
bytes.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=4"

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends import orbax
from deltacheck.backends import torch as torch_backend
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from deltacheck.errors import TreeMismatch, UnsupportedLeaf

BOTH_HAVE = (
    "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()


def as_torch(array: Any) -> torch.Tensor:
    """A tensor with the array's bits."""
    values = np.asarray(array)
    dtype = getattr(torch, values.dtype.name)
    if values.size == 0:
        return torch.empty(values.shape, dtype=dtype)
    return (
        torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy())
        .view(dtype)
        .reshape(values.shape)
    )


def bits(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(np.asarray(value)).tobytes()


def assert_same_bits(a: Any, b: Any, path: str = "") -> None:
    """Trees of either framework: the same keys, shapes, dtypes and bits."""
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same_bits(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_same_bits(*pair, f"{path}/{number}")
    elif hasattr(a, "shape"):
        assert tuple(a.shape) == tuple(b.shape), path
        assert str(a.dtype).removeprefix("torch.") == str(b.dtype).removeprefix("torch."), path
        assert bits(a) == bits(b), path
    else:
        assert a == b, path


def sharded(*spec: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(*spec))


def states(steps: int) -> list[dict[str, Any]]:
    """NumPy states that exercise every way to encode a chunk: nothing, little, half and all of it
    changed; large and packed leaves.
    """
    rng = np.random.default_rng(3)
    large = rng.standard_normal((700, 1000)).astype(np.float32)
    found = []
    for step in range(steps):
        few, half = large.copy(), large.copy()
        few.reshape(-1)[rng.integers(0, few.size, 40 * step)] += 1
        half.reshape(-1)[: half.size // 2] += np.float32(1e-3 * step)
        found.append(
            {
                "model": {
                    "frozen": large,
                    "few": few.astype(jnp.bfloat16),
                    "half": half,
                    "all": (large * (1 + 1e-4 * step)).astype(np.float32),
                    "mask": few > 0.5,
                },
                "optimizer": {
                    "state": {
                        0: {"step": np.float32(step) * np.ones((), np.float32)},
                        10: [np.full(9, step, np.int32)],
                    }
                },
                "lr": 1e-5,
                "epoch": step,
                "empty": np.zeros((0, 4), np.float16),
                "a/b": np.arange(5, dtype=np.uint8),
            }
        )
    return found


def convert(tree: Any, leaf: Any) -> Any:
    if isinstance(tree, dict):
        return {key: convert(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list):
        return [convert(value, leaf) for value in tree]
    return leaf(tree) if isinstance(tree, np.ndarray) else tree


def segment_files(root: Path) -> list[dict[str, Any]]:
    """Per segment, oldest first: relative path -> content, the table without what names the
    segment.
    """
    found = []
    for segment in sorted(path for path in (root / "segments").iterdir() if path.is_dir()):
        files: dict[str, Any] = {
            str(path.relative_to(segment)): path.read_bytes()
            for path in segment.rglob("*")
            if path.is_file()
        }
        table = json.loads(files["zarr.json"])
        body = table["attributes"]["deltacheck"]
        assert body.pop("id") == segment.name
        del body["checksum"]
        found.append({**files, "zarr.json": table})
    return found


@pytest.mark.parametrize("placed", ["one device", "four devices"])
def test_the_same_tree_gives_the_same_leaf_paths_and_the_same_segment_bytes(
    tmp_path: Path, placed: str
) -> None:
    def to_jax(array: np.ndarray[Any, Any]) -> jax.Array:
        rows_fit = array.ndim == 2 and array.shape[0] % 4 == 0
        return jax.device_put(
            array, sharded("x") if placed == "four devices" and rows_fit else None
        )

    kept = states(4)
    with torch_backend.Engine(tmp_path / "torch", options=SaveOptions(capture="eager")) as engine:
        for step, state in enumerate(kept):
            engine.save(step, convert(state, as_torch))
    with manager(tmp_path / "jax") as mngr:
        for step, state in enumerate(kept):
            mngr.save(step, args=DeltaSaveArgs(convert(state, to_jax)))
    from_torch, from_jax = deltacheck.open(tmp_path / "torch"), deltacheck.open(tmp_path / "jax")
    for step in range(4):
        assert from_torch.manifest(step).leaves == from_jax.manifest(step).leaves
        assert from_torch.manifest(step).tree == from_jax.manifest(step).tree
    ours, theirs = segment_files(tmp_path / "torch"), segment_files(tmp_path / "jax" / "deltacheck")
    assert len(ours) == len(theirs) == 4
    assert any(name.startswith("delta.") for name in ours[1])
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.keys() == other.keys(), number
        assert [name for name in one if one[name] != other[name]] == [], number


def test_a_run_that_changes_frameworks_twice_equals_one_that_never_did(tmp_path: Path) -> None:
    def train(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.linspace(-1, 1, 8 * 300).reshape(8, 300) * (step + 1)
            optimizer.zero_grad()
            (layer(x) ** 2).mean().backward()
            optimizer.step()

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(300, 400)
        return layer, torch.optim.AdamW(layer.parameters(), lr=1e-3)

    layer, optimizer = fresh()
    train(layer, optimizer, range(2))
    started = {"model": dict(layer.state_dict()), "optimizer": optimizer.state_dict()}
    in_jax = tensors_to(started, lambda tensor: jnp.asarray(tensor.numpy()))
    train(layer, optimizer, range(2, 5))  # the run that never changes

    with manager(tmp_path / "jax") as mngr:
        mngr.save(2, args=DeltaSaveArgs(in_jax))
    loaded = torch_backend.load(tmp_path / "jax")
    other, other_optimizer = fresh()
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    train(other, other_optimizer, range(2, 4))
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(4, {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()})
        train(other, other_optimizer, range(4, 5))
        engine.save(5, {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()})

    expected = {"model": dict(layer.state_dict()), "optimizer": optimizer.state_dict()}
    for restored in (
        orbax.load(tmp_path / "torch"),
        orbax.load(tmp_path / "torch", 5, in_jax),
        deltacheck.open(tmp_path / "torch").restore(),
    ):
        assert_same_bits(json_free(restored), json_free(expected))


def tensors_to(tree: Any, leaf: Any) -> Any:
    if isinstance(tree, dict):
        return {key: tensors_to(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tensors_to(value, leaf) for value in tree)
    return leaf(tree) if isinstance(tree, torch.Tensor) else tree


def json_free(tree: Any) -> Any:
    """Keys in one order: JAX sorts those of a target."""
    if isinstance(tree, dict):
        return {key: json_free(tree[key]) for key in sorted(tree, key=str)}
    return (
        type(tree)(json_free(value) for value in tree) if isinstance(tree, list | tuple) else tree
    )


def test_a_sharded_array_is_one_tensor_in_torch_and_goes_back_under_another_sharding(
    tmp_path: Path,
) -> None:
    whole = np.random.default_rng(0).standard_normal((64, 8192)).astype(jnp.bfloat16)
    with manager(tmp_path / "jax") as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": jax.device_put(whole, sharded("x"))}))
        mngr.wait_until_finished()
        changed = jax.device_put(whole, sharded("x")).at[:, 5].set(0)
        mngr.save(1, args=DeltaSaveArgs({"w": changed}))
    tensor = torch_backend.load(tmp_path / "jax")["w"]
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (64, 8192))
    assert bits(tensor) == bits(changed)
    assert bits(torch_backend.load(tmp_path / "jax", 0)["w"]) == bits(whole)
    assert bits(
        torch.from_numpy(deltacheck.open(tmp_path / "jax").restore()["w"].view(np.int16))
    ) == bits(changed)

    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(2, {"w": tensor + 1})
    for target in (None, {"w": jax.ShapeDtypeStruct((64, 8192), jnp.bfloat16)}):
        back = orbax.load(tmp_path / "torch", target=target, shardings={"w": sharded(None, "x")})[
            "w"
        ]
        assert back.sharding.is_equivalent_to(sharded(None, "x"), 2)
        assert bits(back) == bits(tensor + 1)


def test_every_dtype_that_both_have_makes_the_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def random(name: str, shape: tuple[int, ...]) -> jax.Array:
        kind = jnp.dtype(name)
        raw = rng.integers(
            0, 2 if name == "bool" else 256, int(np.prod(shape)) * kind.itemsize
        ).astype(np.uint8)
        return jnp.asarray(raw.view(kind).reshape(shape))

    tree = {name: [random(name, shape) for shape in ((), (0, 2), (33, 5))] for name in BOTH_HAVE}
    with manager(tmp_path / "jax") as mngr:
        mngr.save(0, args=DeltaSaveArgs(tree))
    tensors = torch_backend.load(tmp_path / "jax")
    assert_same_bits(tensors, tree)
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(0, tensors)
    assert_same_bits(orbax.load(tmp_path / "torch"), tree)


def test_a_dtype_that_torch_lacks_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": jnp.full(3, -2, jnp.float8_e3m4)}))
    with pytest.raises(
        UnsupportedLeaf, match=r"leaf 'w' is of type float8_e3m4.*deltacheck\.open\(root\)\.restore"
    ):
        torch_backend.load(tmp_path)
    assert deltacheck.open(tmp_path).restore()["w"].tolist() == [-2, -2, -2]


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4"])
def test_small_integers_have_the_same_bytes_in_both_frameworks(name: str, tmp_path: Path) -> None:
    values = jnp.arange(-2 if name[0] == "i" else 0, 2).astype(name)
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": values}))
    tensor = torch_backend.load(tmp_path)["w"]
    assert tensor.dtype is getattr(torch, name)
    assert tensor.view(torch.uint8).tolist() == np.asarray(values).view(np.uint8).tolist()
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(0, {"w": tensor})
    assert_same_bits(orbax.load(tmp_path / "torch"), {"w": values})


def test_sixty_four_bit_tensors_come_to_jax_as_numpy_unless_it_has_them(tmp_path: Path) -> None:
    with torch_backend.Engine(tmp_path) as engine:
        engine.save(
            0, {"seen": torch.tensor([2**40 + 1]), "w": torch.ones(3, dtype=torch.float64) / 3}
        )
    plain = orbax.load(tmp_path)
    assert {type(value) for value in plain.values()} == {np.ndarray}
    assert plain["seen"].tolist() == [2**40 + 1]
    with jax.enable_x64(True):
        wide = orbax.load(tmp_path)
        assert all(isinstance(value, jax.Array) for value in wide.values())
        assert_same_bits(wide, plain)
    with pytest.raises(
        TreeMismatch, match=rf"leaf 'seen' is int64 in step 0, and int32 .* value {2**40 + 1}"
    ):
        orbax.load(tmp_path, target={"seen": jnp.zeros(1, jnp.int32), "w": np.zeros(3)})


def test_typed_keys_are_their_data_in_torch_and_keys_again_where_a_target_says_so(
    tmp_path: Path,
) -> None:
    keys = jax.random.split(jax.random.key(11), 3)
    with manager(tmp_path / "jax") as mngr:
        mngr.save(0, args=DeltaSaveArgs({"key": keys}))
    tensors = torch_backend.load(tmp_path / "jax")
    assert tensors["key"].dtype == torch.uint32
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(0, tensors)
    back = orbax.load(tmp_path / "torch", target={"key": jax.eval_shape(lambda: keys)})["key"]
    assert bits(jax.random.key_data(back)) == bits(jax.random.key_data(keys))
    assert bits(jax.random.normal(back[1], 4)) == bits(jax.random.normal(keys[1], 4))


def test_tied_weights_of_torch_come_to_jax_as_two_arrays_that_can_both_be_donated(
    tmp_path: Path,
) -> None:
    shared = torch.arange(100_000.0)
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(0, {"embed": shared, "head": shared})
    tree = orbax.load(tmp_path / "torch")
    expected = np.asarray(tree["head"]) + 1
    moved = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(tree)
    assert bits(moved["embed"]) == bits(moved["head"]) == bits(expected)
    with manager(tmp_path / "jax") as mngr:
        target = {name: jax.ShapeDtypeStruct((100_000,), jnp.float32) for name in ("embed", "head")}
        mngr.save(0, args=DeltaSaveArgs(orbax.load(tmp_path / "torch", target=target)))
        mngr.wait_until_finished()
        assert_same_bits(
            mngr.restore(0, args=DeltaRestoreArgs()), {"embed": shared, "head": shared}
        )


def test_numpy_leaves_stay_numpy_in_both_frameworks(tmp_path: Path) -> None:
    tree = {"n": np.arange(3), "s": np.float64(0.1)}
    with manager(tmp_path / "jax") as mngr:
        mngr.save(0, args=DeltaSaveArgs(tree))
    with torch_backend.Engine(tmp_path / "torch") as engine:
        engine.save(0, tree)
    for restored in (
        torch_backend.load(tmp_path / "jax"),
        orbax.load(tmp_path / "torch"),
        orbax.load(tmp_path / "jax"),
    ):
        assert (type(restored["n"]), type(restored["s"])) == (np.ndarray, np.float64)
        assert_same_bits(restored, tree)
