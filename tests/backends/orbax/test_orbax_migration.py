"""Claims of ``docs/how-to/orbax.md``: calls run with Orbax's handlers and with ours."""

from __future__ import annotations

import datetime
import gc
import re
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from deltacheck import SaveOptions
from deltacheck.backends.orbax import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
    load,
    manager,
)
from deltacheck.backends.orbax import v1 as delta_v1
from deltacheck.errors import ContractNotMet, TreeMismatch, UnsupportedLeaf

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
Options = ocp.CheckpointManagerOptions
abstract = jax.ShapeDtypeStruct


# --- options of the manager -----------------------------------------------------------------------


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(4.0) + step, "n": step}


def calls(root: Path, make: Callable[[], Any], save: Any, restore: Any) -> list[Any]:
    """Return what a manager returns and leaves behind in two runs."""
    with make() as mngr:
        saved = [
            mngr.save(step, args=save(state(step)), metrics={"loss": abs(step - 2.5)})
            for step in range(5)
        ]
        mngr.wait_until_finished()
        seen = [saved, mngr.all_steps(), mngr.latest_step(), mngr.best_step(), mngr.should_save(6)]
    with make() as mngr:
        steps = mngr.all_steps()
        seen += [steps, mngr.latest_step(), mngr.best_step()]
        seen += [int(mngr.restore(step, args=restore(state(0)))["n"]) for step in steps]
        seen += [mngr.metrics(step) for step in steps]
    folders = [path for path in root.glob("*") if path.is_dir() and path.name != "deltacheck"]
    return [*seen, sorted((path.name, path.stat().st_mode) for path in folders)]


OPTIONS: dict[str, dict[str, Any]] = {
    "intervals": {
        "save_interval_steps": 2,
        "max_to_keep": 1,
        "keep_period": 4,
        "step_prefix": "s",
        "step_format_fixed_length": 4,
        "save_root_metadata": False,
        "num_deletion_threads": 2,
        "file_options": ocp.options.FileOptions(path_permission_mode=0o700),
        "async_options": ocp.AsyncOptions(timeout_secs=99),
    },
    "metrics": {
        "best_fn": lambda metrics: metrics["loss"],
        "best_mode": "min",
        "max_to_keep": 2,
        "keep_checkpoints_without_metrics": False,
        "enable_async_checkpointing": False,
        "lightweight_initialize": True,
    },
    "functions": {
        "should_save_fn": lambda step, last: step != 1,
        "max_to_keep": 2,
        "todelete_subdir": "trash",
        "step_name_format": ocp.step.standard_name_format(step_prefix="n"),
        "cleanup_tmp_directories": True,
    },
    "policies": {
        "save_decision_policy": policies.FixedIntervalPolicy(2),
        "preservation_policy": policies.LatestN(2),
        "prevent_write_metrics": True,
        "single_host_load_and_broadcast": True,
        "enable_should_save_is_saving_in_progress_check": False,
    },
    "steps": {
        "save_on_steps": [1, 3],
        "save_interval_steps": 4,
        "max_to_keep": 1,
        "keep_time_interval": datetime.timedelta(hours=1),
        "enable_background_delete": True,
    },
    "in place": {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath}
    if hasattr(ocp.path, "atomicity")
    else {},
    "read only": {"read_only": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_manager_have_the_same_effect(tmp_path: Path, name: str) -> None:
    plain, ours = tmp_path / "orbax", tmp_path / "deltacheck"
    expected = calls(
        plain,
        lambda: ocp.CheckpointManager(plain, options=Options(**OPTIONS[name])),
        ocp.args.StandardSave,
        ocp.args.StandardRestore,
    )
    seen = calls(
        ours,
        lambda: manager(
            ours, options=Options(**OPTIONS[name]), save_options=SaveOptions(durability="process")
        ),
        DeltaSaveArgs,
        DeltaRestoreArgs,
    )
    assert seen == expected


@pytest.mark.parametrize("make", [ocp.CheckpointManager, manager])
def test_a_folder_that_does_not_exist_is_not_created_without_create(
    tmp_path: Path, make: Any
) -> None:
    with make(tmp_path / "none", options=Options(create=False)) as mngr:
        assert mngr.all_steps() == []
    assert list(tmp_path.iterdir()) == []


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ocp.CheckpointManager, manager])
def test_other_items_of_a_step_are_kept(tmp_path: Path, make: Any) -> None:
    args, tree = ocp.args, state(1)
    save, restore = args.StandardSave, args.StandardRestore
    if make is manager:
        save, restore = DeltaSaveArgs, DeltaRestoreArgs
    saves = {
        "json": args.JsonSave({"epoch": [1, "a"]}),
        "array": args.ArraySave(jnp.arange(3)),
        "key": args.JaxRandomKeySave(jax.random.key(1)),
        "numpy": args.NumpyRandomKeySave(np.random.get_state()),
        "standard": args.StandardSave(tree),
        "pytree": args.PyTreeSave(tree),
    }
    restores = {
        "json": args.JsonRestore(),
        "array": args.ArrayRestore(),
        "key": args.JaxRandomKeyRestore(),
        "numpy": args.NumpyRandomKeyRestore(),
        "standard": args.StandardRestore(tree),
        "pytree": args.PyTreeRestore(tree),
    }
    with make(tmp_path) as mngr:
        mngr.save(0, args=args.Composite(state=save(tree), **saves))
    with make(tmp_path) as mngr:
        restored = mngr.restore(0, args=args.Composite(state=restore(), **restores))
        assert restored["json"] == {"epoch": [1, "a"]}
        assert (restored["array"] == jnp.arange(3)).all()
        assert (jax.random.key_data(restored["key"]) == jnp.array([0, 1])).all()
        assert (restored["numpy"][1] == np.random.get_state()[1]).all()
        for item in ("state", "standard", "pytree"):
            assert jax.tree.map(np.array_equal, restored[item], tree) == {"w": True, "n": True}


def test_arguments_of_orbax_that_cannot_be_followed_are_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as mngr:
        with pytest.raises(ValueError, match=r"JsonSave.*Composite\(NAME=JsonSave"):
            mngr.save(0, args=ocp.args.JsonSave({}))
        assert mngr.all_steps() == []
        mngr.save(0, args=DeltaSaveArgs(state(0)))
        with pytest.raises(ValueError, match=r"JsonRestore.*DeltaRestoreArgs\(item\)"):
            mngr.restore(0, args=ocp.args.JsonRestore())
        loose = ocp.ArrayRestoreArgs(strict=False)
        for args in (
            ocp.args.StandardRestore(state(0), strict=False),
            ocp.args.PyTreeRestore(state(0), {"w": loose, "n": ocp.RestoreArgs()}),
        ):
            with pytest.raises(ValueError, match=r"strict=False.*jnp\.pad"):
                mngr.restore(0, args=args)
        narrow = {"w": abstract((4,), jnp.bfloat16), "n": 0}
        with pytest.raises(TreeMismatch, match="cast=True"):
            mngr.restore(0, args=ocp.args.StandardRestore(narrow))
        assert mngr.restore(0)["n"] == 0
    with pytest.raises(ValueError, match=r"strict=False.*jnp\.pad"):
        DeltaRestoreArgs(state(0), strict=False)


def test_arguments_that_are_refused_have_an_effect_in_orbax(tmp_path: Path) -> None:
    args, tree = ocp.args, state(0)
    half, here = np.dtype("float16"), SingleDeviceSharding(jax.devices()[-1])
    with ocp.CheckpointManager(tmp_path / "pytree") as mngr:
        casts = {"w": ocp.SaveArgs(dtype=half), "n": ocp.SaveArgs()}
        mngr.save(0, args=args.PyTreeSave(tree, save_args=casts))
        mngr.wait_until_finished()
        assert mngr.restore(0, args=args.PyTreeRestore())["w"].dtype == half
        renamed = args.PyTreeRestore(
            {"v": jnp.zeros(4)},
            restore_args={"v": ocp.ArrayRestoreArgs()},
            transforms={"v": ocp.Transform(original_key="w")},
        )
        assert mngr.restore(0, args=renamed)["v"].tolist() == [0, 1, 2, 3]
    with ocp.CheckpointManager(tmp_path / "standard") as mngr:
        mngr.save(0, args=args.StandardSave(tree))
        mngr.wait_until_finished()
        for values in ([0, 1, 2, 3, 0, 0], [0, 1]):
            target = {"w": jnp.zeros(len(values)), "n": 0}
            restored = mngr.restore(0, args=args.StandardRestore(target, strict=False))
            assert restored["w"].tolist() == values
        for options in ({"support_layout": True}, {"fallback_sharding": here}):
            restored = mngr.restore(0, args=args.StandardRestore(tree, **options))
            assert restored["w"].tolist() == [0, 1, 2, 3]
    with ocp.CheckpointManager(tmp_path / "json") as mngr:
        mngr.save(0, args=args.JsonSave({"a": 1}))
        mngr.wait_until_finished()
        assert mngr.restore(0, args=args.JsonRestore()) == {"a": 1}


@pytest.mark.parametrize("make", [ocp.CheckpointManager, manager])
def test_a_failed_save_is_raised_by_the_next_and_the_one_after_works(
    tmp_path: Path, make: Any
) -> None:
    failures = [OSError("no space left")]

    class Failing(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        async def finalize(self) -> None:
            if failures:
                raise failures.pop()
            await super().finalize()

    with make(tmp_path, options=Options(temporary_path_class=Failing)) as mngr:
        assert mngr.save(0, args=ocp.args.StandardSave(state(0)))
        with pytest.raises(Exception, match="no space left"):
            mngr.save(1, args=ocp.args.StandardSave(state(1)))
        assert mngr.save(2, args=ocp.args.StandardSave(state(2)))
        mngr.wait_until_finished()
    with make(tmp_path) as mngr:
        assert mngr.all_steps() == [2]
        assert mngr.restore(2, args=ocp.args.StandardRestore(state(0)))["n"] == 2


@pytest.mark.parametrize("make", [ocp.CheckpointManager, manager])
def test_deleted_steps_are_moved_to_a_full_path_on_object_stores_only(
    tmp_path: Path, make: Any
) -> None:
    options = Options(max_to_keep=1, todelete_full_path="trash", enable_async_checkpointing=False)
    with make(tmp_path, options=options) as mngr:
        mngr.save(0, args=ocp.args.StandardSave(state(0)))
        with pytest.raises(NotImplementedError):
            mngr.save(1, args=ocp.args.StandardSave(state(1)))


# --- types ----------------------------------------------------------------------------------------


def _pytree(target: Any, **options: Any) -> Any:
    restore_args = target and ocp.checkpoint_utils.construct_restore_args(target)
    return ocp.args.PyTreeRestore(target, restore_args=restore_args)


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Point:
    x: Any
    y: Any


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A node whose children have no names."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Unnamed:
        return cls(*children)


class Color(Enum):
    RED = 1


HANDLERS = {
    "standard": (
        ocp.StandardCheckpointHandler,
        ocp.args.StandardSave,
        lambda target, cast=False: ocp.args.StandardRestore(target),
    ),
    "pytree": (ocp.PyTreeCheckpointHandler, ocp.args.PyTreeSave, _pytree),
    "deltacheck": (DeltaCheckpointHandler, DeltaSaveArgs, DeltaRestoreArgs),
}


@pytest.fixture(params=HANDLERS)
def through(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Saves a tree with a checkpointer, and returns what comes back for a target."""
    handler, save, restore = HANDLERS[request.param]

    saved: list[Any] = []

    def run(tree: Any, target: Any, **options: Any) -> Any:
        with ocp.Checkpointer(handler()) as checkpointer:
            if not any(tree is other for other in saved):
                checkpointer.save(tmp_path / "run_1", args=save(tree), force=True)
                saved[:] = [tree]
            return checkpointer.restore(tmp_path / "run_1", args=restore(target, **options))

    run.kind = request.param  # type: ignore[attr-defined]
    run.is_ours = request.param == "deltacheck"  # type: ignore[attr-defined]
    return run


def test_a_target_gives_its_types_and_containers(through: Any) -> None:
    tree = {
        "leaves": {"a": jnp.ones(2), "h": np.arange(2), "i": 3, "f": 2.5, "b": True, "n": None},
        "empty": [{}, []],
        "nodes": [Pair(jnp.ones(1), 3), Point(jnp.ones(1), 2), Unnamed(jnp.ones(1), 1)],
        "others": {7: (1, [2])},
    }
    target = jax.tree.map(lambda x: x * 0 if hasattr(x, "shape") else type(x)(), tree)
    restored = through(tree, {**target, "others": {7: [0, (0,)]}})
    assert restored.pop("others") == {7: [1, (2,)]}
    del tree["others"]
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert type(leaf) is type(expected)
        assert np.array_equal(leaf, expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_text_is_kept_except_by_the_standard_handler_of_orbax(through: Any) -> None:
    tree = {"text": "abc", "w": jnp.ones(1)}
    if through.kind == "standard":
        assert "Unsupported type" in refusal(partial(through, tree, tree))
        drop_coroutines()
        return
    assert through(tree, {**tree, "text": ""})["text"] == "abc"
    assert through(tree, None)["text"] == "abc"


def test_a_target_of_key_data_gets_the_data(through: Any) -> None:
    key = jax.random.key(3)
    data = jax.random.key_data(key)
    tree = {"key": key, "host": key, "data": data}
    target = {"key": jnp.zeros(2, jnp.uint32), "host": np.zeros(2, np.uint32), "data": key}
    restored = through(tree, target)
    is_key = {name: "key<" in str(leaf.dtype) for name, leaf in restored.items()}
    # Orbax looks at the saved leaf alone, if the target is a JAX array.
    assert is_key == {"key": not through.is_ours, "host": False, "data": through.is_ours}
    for name, leaf in restored.items():
        assert np.array_equal(jax.random.key_data(leaf) if is_key[name] else leaf, data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_numbers_of_another_type_are_rounded_by_orbax_only(through: Any) -> None:
    tree = {"a": jnp.float32(2.5), "x": 3.5, "s": np.int64(5)}
    restored = through(tree, {"a": 0, "x": 0, "s": 0})
    if not through.is_ours:
        assert [(type(leaf), leaf) for leaf in restored.values()] == [(int, 2), (int, 5), (int, 3)]
        assert "Unsupported type" in refusal(partial(through, tree, {**tree, "s": np.int64(0)}))
        drop_coroutines()
        return
    assert isinstance(restored["a"], jax.Array)
    assert (restored["a"], restored["x"], restored["s"]) == (2.5, 3.5, 5)
    assert type(restored["s"]) is type(through(tree, {**tree, "s": np.int64(0)})["s"]) is np.int64


def test_a_target_decides_between_jax_numpy_and_typed_keys(through: Any) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    tree = {"key": keys, "a": np.arange(3), "b": jnp.arange(3), "n": np.int64(2**62)}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    target |= {"a": jnp.zeros(3, jnp.int32), "n": abstract((), np.int64)}
    target["b"] = np.zeros(3, np.int32)
    restored = through(tree, target, cast=True)
    assert restored["key"].dtype == keys.dtype
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(keys)).all()
    assert isinstance(restored["a"], jax.Array)
    assert isinstance(restored["b"], np.ndarray)
    assert restored["n"].dtype == np.int64
    assert restored["n"] == 2**62


def test_arrays_and_numbers_are_cast_to_the_target_on_request(through: Any) -> None:
    tree = {"a": jnp.arange(9) / 7, "b": np.arange(5) + 0.5, "n": 3, "x": 2.5, "i": jnp.int32(4)}
    target = {"a": jnp.zeros(9, jnp.bfloat16), "b": np.zeros(5, np.float16)}
    target |= {"n": 0.0, "x": 0, "i": 0.0}
    restored = through(tree, target, cast=True)
    for name in "ab":
        expected = np.asarray(tree[name]).astype(target[name].dtype)
        assert restored[name].dtype == expected.dtype
        assert isinstance(restored[name], jax.Array if name == "a" else np.ndarray)
        np.testing.assert_array_equal(restored[name], expected)
    assert [restored["n"], restored["x"], restored["i"]] == [3.0, 2, 4.0]
    assert [type(restored[name]) for name in "nxi"] == [float, int, float]


def test_a_cast_without_a_request_or_under_an_exact_contract_is_refused(tmp_path: Path) -> None:
    narrow, wide = {"w": abstract((4,), jnp.bfloat16), "n": 0}, {"w": np.zeros(4), "n": 0}
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs(state(0)))
        mngr.wait_until_finished()
        with pytest.raises(TreeMismatch, match=r"leaf 'w' is float32\[4\] .*, bfloat16.*cast=True"):
            mngr.restore(0, args=DeltaRestoreArgs(narrow))
        with pytest.raises(ContractNotMet, match="leaf 'w' is float32 in step 0, and bfloat16"):
            mngr.restore(0, args=DeltaRestoreArgs(narrow, cast=True, contract="exact"))
        restored = mngr.restore(0, args=DeltaRestoreArgs(wide, cast=True, contract="exact"))
        assert restored["w"].dtype == np.float64
        restored = mngr.restore(0, args=DeltaRestoreArgs(narrow, cast=True))
        mngr.save(1, args=DeltaSaveArgs(restored))  # continues from a step of another dtype
        mngr.wait_until_finished()
    assert load(tmp_path, 1)["w"].dtype == jnp.bfloat16
    with delta_v1.context(tmp_path), pytest.raises(TreeMismatch, match="cast=True"):
        ocp.v1.load(tmp_path / "0", narrow, checkpointable_name="default")
    with delta_v1.context(tmp_path, cast=True):
        restored = ocp.v1.load(tmp_path / "0", narrow, checkpointable_name="default")
    assert restored["w"].dtype == jnp.bfloat16


def test_without_a_target_tuples_integer_keys_and_numpy_scalars_are_kept(
    through: Any,
) -> None:
    tree = {"t": (1, jnp.ones(2)), "s": np.int64(5), "k": {7: jnp.ones(1)}, "n": None, "e": {}}
    nodes = {"p": Pair(1, 2.5), "d": Point(1, 2), "u": Unnamed(1, 2)}
    restored = through({**tree, **nodes}, None)
    assert restored["p"] == {"left": 1, "right": 2.5}
    assert restored["d"] == {"x": 1, "y": 2}
    assert restored["u"] == ({0: 1, 1: 2} if through.is_ours else [1, 2])
    assert restored["n"] is None
    assert restored["e"] == {}
    # Orbax records none of these types.
    assert [*restored["k"]] == ([7] if through.is_ours else ["7"])
    assert type(restored["t"]) is (tuple if through.is_ours else list)
    assert isinstance(restored["s"], np.int64) is through.is_ours
    assert restored["s"] == 5


def refusal(call: Callable[[], Any]) -> str:
    """Return the text of the error that a call raises."""
    try:
        call()
    except (ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    pytest.fail("it was not refused")


def drop_coroutines() -> None:
    """Collect what a call of Orbax that failed has left: the event loops are closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_leaves_that_orbax_refuses_are_kept(through: Any) -> None:
    for leaf in (deque([1]), time.gmtime(0), jnp.zeros((0, 2)), b"raw", 1j, 2**70):
        tree = {"leaf": leaf}
        if not through.is_ours:
            refusal(partial(through, tree, tree))
            continue
        restored = through(tree, tree)["leaf"]
        assert type(restored) is type(leaf)
        assert restored.shape == (0, 2) if isinstance(leaf, jax.Array) else restored == leaf
    drop_coroutines()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_another_shape_is_refused(through: Any) -> None:
    for shape in ((5,), (2,), (3, 1)):
        text = refusal(partial(through, {"a": jnp.ones(3)}, {"a": jnp.zeros(shape)}))
        if through.is_ours:
            assert "leaf 'a' is float32[3] in step 1, float32[" in text
            assert "neither pads nor cuts" in text
        else:
            assert "not compatible with the stored shape" in text
    drop_coroutines()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_leaves_are_refused_with_path_and_both_values(through: Any) -> None:
    tree, ones = {"a": jnp.ones(3), "n": 3}, jnp.ones(3)
    cases = [
        (
            {"a": {"x": 0}, "n": 3},
            r"'a' is float32\[3\] in step 1, a subtree in the target .*'a/x'",
        ),
        ({"n": 3}, r"'a' of step 1 is not in the target \(float32\[3\] in step 1\)"),
        ({"a": 0, "b": "x"}, "'b' of the target is not in step 1 \\('x' in the target\\)"),
        ({"a": ones, "n": 3, "z": 1}, r"'z' of the target is not in step 1 \(1 in the target\)"),
        ({"a": "x", "n": 3}, r"'a' is float32\[3\] in step 1, 'x' in the target"),
        ({"a": 0, "n": 3}, r"'a' is float32\[3\] in step 1, 0 in the target"),
        ({"a": ones, "n": {1: 3}}, "'n' is 3 in step 1, a subtree in the target"),
        ({"a": ones, "n": "x"}, "'n' is 3 in step 1, 'x' in the target"),
    ]
    for target, message in cases:
        text = refusal(partial(through, tree, target))
        if through.is_ours:
            assert re.match(f"TreeMismatch: leaf .*{message}", text), text
    drop_coroutines()


def test_keys_that_orbax_takes_with_a_target_only_are_refused(through: Any) -> None:
    for key in ((1, 2), Color.RED, True, 2.5):
        tree = {key: jnp.ones(3)}
        if through.is_ours:
            match = rf"{re.escape(repr(key))}.*use text or integer keys"
            with pytest.raises(UnsupportedLeaf, match=match):
                through(tree, tree)
            continue
        assert [*through(tree, tree)] == [key]
        assert [*through(tree, None)] == [str(key)]


def test_a_target_with_a_layout_is_refused(tmp_path: Path) -> None:
    layout = Format(Layout((0, 1)), SingleDeviceSharding(jax.devices()[0]))
    target = {"w": abstract((2, 3), jnp.float32, sharding=layout)}
    with ocp.Checkpointer(DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=DeltaSaveArgs({"w": jnp.ones((2, 3))}))
        with pytest.raises(ValueError, match=r"leaf 'w' .*layout.*jax\.device_put"):
            checkpointer.restore(tmp_path / "a", args=DeltaRestoreArgs(target))


def test_a_key_of_another_type_is_named(tmp_path: Path) -> None:
    with ocp.Checkpointer(DeltaCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "a", args=DeltaSaveArgs({1: jnp.ones(3)}))
        with pytest.raises(TreeMismatch, match=r"'%31' of the target .* which has '1' .*integer"):
            checkpointer.restore(tmp_path / "a", args=DeltaRestoreArgs({"1": jnp.ones(3)}))
        for key in ((1, 2), np.int64(1)):
            with pytest.raises(UnsupportedLeaf, match="use text or integer keys"):
                checkpointer.save(tmp_path / "b", args=DeltaSaveArgs({key: jnp.ones(3)}))
    assert not (tmp_path / "b").exists()
