"""Steps of a plain Orbax manager become ours and come out again, bit for bit."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import ml_dtypes
import torch
from safetensors import torch as safetensors

import deltacheck
from deltacheck.backends.orbax import DeltaRestoreArgs, load, manager
from deltacheck.backends.orbax.files import orbax_import
from deltacheck.backends.orbax.files.orbax_import import ingest, sources_of, write_orbax
from deltacheck.backends.orbax.manager_root.tree_internals import tree_checkpointer
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch import load as load_torch
from deltacheck.cli import main
from deltacheck.cli.output import MISUSE, NOT_FOUND, OK, REFUSED
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf.dtypes import dtype_named
from deltacheck.restore.export import FORMAT_TYPES
from deltacheck.store.roots.opening import open_root

pytestmark = pytest.mark.usefixtures("forked_imports")


def state(step: int) -> dict[str, Any]:
    table = jax.random.normal(jax.random.key(0), (200, 40))  # the same at every step
    params = {"w": jnp.arange(8.0) * step, "b": jnp.full(3, step, jnp.bfloat16), "table": table}
    return {
        "params": params,
        "opt": [jnp.int32(step), {"mu": jnp.zeros(8) + step}],
        "epoch": step,
        "lr": 0.1,
    }


def plain(folder: Path, *steps: int) -> None:
    with ocp.CheckpointManager(folder) as made:
        for step in steps:
            made.save(step, args=ocp.args.StandardSave(state(step)))
        made.wait_until_finished()


def assert_same(a: Any, b: Any) -> None:
    """The same tree, with the same types and bits of arrays and the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_a_plain_manager_becomes_a_root_and_every_step_comes_out_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain(tmp_path / "plain", 2, 10)
    assert main(["import", str(tmp_path / "root"), str(tmp_path / "plain"), "--json"]) == OK
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["step"] for row in rows] == [2, 10]
    # The table of weights is written once.
    assert rows[1]["stored_bytes"] < 8_000 < 30_000 < rows[0]["stored_bytes"]
    for step in (2, 10):
        assert_same(state(step), load(tmp_path / "root", step))
        assert load(tmp_path / "root", step)["epoch"] == step
        out = tmp_path / f"out-{step}.orbax"
        assert main(["export", str(tmp_path / "root"), str(step), "--out", str(out)]) == OK
        assert_same(state(step), ocp.PyTreeCheckpointer().restore(out))
    with manager(tmp_path / "root") as made:
        assert_same(state(10), made.restore(10, args=DeltaRestoreArgs(state(0))))


def typed_state() -> dict[str, Any]:
    """A tree with typed keys and tuples."""
    return {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(5),
        "pair": (jnp.arange(3.0), 1),
        "w": jnp.ones((2, 2), jnp.bfloat16),
        "note": "x",
        "none": None,
        "empty": {},
    }


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_folders_of_one_checkpoint_become_steps_with_typed_keys_and_tuples(tmp_path: Path) -> None:
    tree = typed_state()
    with ocp.StandardCheckpointer() as standard:
        standard.save(tmp_path / "standard-1", {**tree, "note": 1})
    ocp.PyTreeCheckpointer().save(tmp_path / "pytree-2", tree)
    ocp.v1.save(tmp_path / "v1-3", tree)
    with tree_checkpointer() as rich:
        rich.save(tmp_path / "rich-4", args=ocp.args.PyTreeSave(tree))
    weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    (tmp_path / "model-5").mkdir()
    for number, (name, tensor) in enumerate(weights.items(), 1):
        file = tmp_path / "model-5" / f"model-0000{number}-of-00002.safetensors"
        safetensors.save_file({name: tensor}, file)
    sources = [
        source
        for name in ("standard-1", "pytree-2", "v1-3", "rich-4", "model-5")
        for source in sources_of(tmp_path / name)
    ]
    assert [step for _, step in ingest(tmp_path / "root", sources)] == [1, 2, 3, 4, 5]
    assert_same(
        load(tmp_path / "root", 5),
        {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
    )
    root = open_root(tmp_path / "root")
    for step in (1, 2, 3, 4):
        write_orbax(tmp_path / f"out-{step}", root, root.manifest(step))
        with tree_checkpointer() as checkpointer:
            exported = checkpointer.restore(tmp_path / f"out-{step}")
        for restored in (load(root.path, step), exported):
            # Without rich types, Orbax does not record that a sequence is a tuple.
            assert type(restored["pair"]) is (tuple if step == 4 else list)
            restored["pair"] = tuple(restored["pair"])
            expected = tree if step > 1 else {**tree, "note": 1}
            assert_same(with_key_data(restored), with_key_data(expected))
            assert restored["key"].dtype == tree["key"].dtype
            assert restored["keys"].dtype == tree["keys"].dtype


def with_key_data(tree: Any) -> Any:
    return {
        name: jax.random.key_data(leaf) if name in ("key", "keys") else leaf
        for name, leaf in tree.items()
    }


def test_a_folder_of_one_checkpoint_needs_a_number(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    with pytest.raises(ValueError, match="no checkpoint of Orbax"):
        sources_of(final)
    (final / "_METADATA").touch()
    with pytest.raises(ValueError, match=r"final has no number.*--step"):
        sources_of(final)
    assert sources_of(final, 7) == [(7, final)]
    plain(tmp_path / "plain", 2)
    assert sources_of(tmp_path / "plain" / "2") == [(2, tmp_path / "plain" / "2")]
    with pytest.raises(ValueError, match=r"has the steps \[2\]"):
        sources_of(tmp_path / "plain", 7)


def test_a_step_of_torch_is_exported_for_orbax(tmp_path: Path) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(
            1,
            {"a": {"w": torch.arange(6, dtype=torch.int64).reshape(2, 3)}, "name": "x", "on": True},
        )
    assert (
        main(
            ["export", str(tmp_path / "root"), "1", "--to", "orbax", "--out", str(tmp_path / "out")]
        )
        == OK
    )
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    assert (found["name"], found["on"]) == ("x", True)
    with ocp.StandardCheckpointer() as standard:
        np.testing.assert_array_equal(standard.restore(tmp_path / "out")["a"]["w"], found["a"]["w"])
    np.testing.assert_array_equal(
        found["a"]["w"], load_torch(tmp_path / "root")["a"]["w"].numpy(), strict=True
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "root"),
                "1",
                "--to",
                "orbax",
                "--leaves",
                "a/*",
                "--out",
                str(tmp_path / "flat"),
            ]
        )
        == OK
    )
    assert list(ocp.PyTreeCheckpointer().restore(tmp_path / "flat")) == ["a/w"]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [(torch.empty(0, 3), "'v' is empty"), (b"raw", "'v' is b'raw'"), (2**70, "'v' is 11805")],
)
def test_what_orbax_does_not_keep_is_refused_by_name(
    leaf: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"v": leaf, "w": torch.ones(2)})
    assert (
        main(["export", str(tmp_path / "root"), "1", "--out", str(tmp_path / "out.orbax")])
        == REFUSED
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.orbax").exists()


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a command on stderr, in one line."""
    return capsys.readouterr().err.replace("\n", "")


def test_misuse_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain(tmp_path / "plain", 2)
    (tmp_path / "empty").mkdir()
    root, source = str(tmp_path / "root"), str(tmp_path / "plain")
    assert main(["import", root, str(tmp_path / "empty")]) == MISUSE
    assert main(["import", root, source, "other.pt"]) == MISUSE
    assert main(["import", root, source, "--item", "weights"]) == NOT_FOUND
    assert main(["import", source, root]) == MISUSE
    assert f"deltacheck import {root} {source}" in words(capsys)
    assert main(["import", root, source]) == OK
    assert main(["import", root, source]) == MISUSE
    assert "has step 2 already" in words(capsys)
    assert main(["import", source, root]) == MISUSE
    assert "is a root of deltacheck" in words(capsys)
    assert deltacheck.open(root).steps() == [2]
    for _ in range(2):
        code = main(["export", root, "2", "--out", str(tmp_path / "out.orbax")])
    assert code == REFUSED  # what is there stays


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a.b": np.ones(2), "a": {"b": np.zeros(2)}}, "would both be called 'a.b'"),
        ({"a.b": 1, "a": {"b": 2}}, "would both be called 'a.b'"),
        ({"a": np.ones(2), "a/": np.zeros(2)}, "would both be called 'a'"),
        ({"l": [np.ones(2)], "l.0": np.zeros(2)}, "would both be called 'l.0'"),
        ({"l": {0: np.ones(2), "x": np.ones(2)}}, "both integer and text keys"),
        ({"x": np.zeros(2, ml_dtypes.uint4)}, "'x' of type uint4 cannot be put"),
        ({"x": np.zeros(2, ml_dtypes.uint2)}, "'x' of type uint2 cannot be put"),
        ({"x": np.zeros(2, ml_dtypes.float8_e4m3)}, "'x' of type float8_e4m3 cannot be put"),
    ],
)
def test_values_that_orbax_would_mix_or_lose_are_refused_before_a_file_is_made(
    state: Any, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, state)
    words = ["export", str(tmp_path / "root"), "1", "--to", "orbax", "--out", str(tmp_path / "o")]
    assert main(words) == REFUSED
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize("dtype", sorted(FORMAT_TYPES["orbax"]))
def test_every_type_of_the_table_comes_out_of_orbax_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    bits = np.arange(2 if dtype in ("bool", "int2") else 16, dtype=np.uint8)
    element = dtype_named(dtype)
    values = np.repeat(bits, 2 * element.item_bytes).view(element.numpy)
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"x": values, "scalar": values[:1].reshape(())})
    root = open_root(tmp_path / "root")
    write_orbax(tmp_path / "out", root, root.manifest(1))
    with tree_checkpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "out")
    for stored, expected in ((found["x"], values), (found["scalar"], values[0])):
        assert stored.dtype == expected.dtype
        assert np.asarray(stored).tobytes() == np.asarray(expected).tobytes()


def test_an_export_that_stores_another_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"x": np.arange(3.0)})
    root = open_root(tmp_path / "root")
    monkeypatch.setattr(orbax_import, "_read", lambda folder: {"x": np.arange(1.0, 4.0)})
    with pytest.raises(UnsupportedLeaf, match=r"the value 'x' of step 1"):
        write_orbax(tmp_path / "out", root, root.manifest(1))
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_full_disk_under_orbax_is_told_in_a_line_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tmp_path / "root") as engine:
        engine.save(1, {"x": np.arange(3.0)})

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *details: object) -> None:
            pass

        def save(self, folder: Path, **options: object) -> None:
            folder.with_name("content.orbax-checkpoint-tmp").mkdir()
            logging.getLogger("absl").error("Traceback (most recent call last)")
            raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")

    monkeypatch.setattr(orbax_import, "tree_checkpointer", Full)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # it is changed
    words = ["export", str(tmp_path / "root"), "1", "--to", "orbax", "--out", str(tmp_path / "o")]
    assert main(words) == REFUSED
    error = capfd.readouterr().err
    assert "No space left on device" in error
    assert "defect" not in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
