"""The Orbax handler: what ``CheckpointManager`` promises with it, and what the trees of JAX, Flax
and Optax come back as.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=4"

import asyncio
import contextlib
import gc
import itertools
import logging
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import ml_dtypes
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.orbax import (
    DeltaCheckpointHandler,
    DeltaRestoreArgs,
    DeltaSaveArgs,
    item,
    load,
    manager,
)
from deltacheck.backends.orbax.capture.array_codec import leaf_codec
from deltacheck.backends.orbax.manager_root import commit_gate
from deltacheck.backends.orbax.manager_root.commit_gate import Gate
from deltacheck.codec import host_memory
from deltacheck.errors import (
    BudgetExceeded,
    NotACheckpointRoot,
    SaveFailed,
    SnapshotTorn,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
)
from deltacheck.policy import Policy
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.saver import Saver
from deltacheck.store.files import arrays
from deltacheck.store.files.background import Background
from deltacheck.store.roots.opening import open_root
from tests.support.waiting import open_when_called, wait_until

Options = ocp.CheckpointManagerOptions


def bits(value: Any) -> bytes:
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return np.ascontiguousarray(np.asarray(data)).tobytes()


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Return where two trees differ: in type, structure, dtype, shape, or in a single bit."""
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        if not isinstance(b, jax.Array | np.ndarray | np.generic) or isinstance(
            a, jax.Array
        ) != isinstance(b, jax.Array):
            yield f"{path}: {type(a).__name__} against {type(b).__name__}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{path}: {a.dtype}{a.shape} against {b.dtype}{b.shape}"
        elif bits(a) != bits(b):
            yield f"{path}: bits differ"
    elif isinstance(a, dict | OrderedDict):
        if type(a) is not type(b) or list(a) != list(b):
            yield (
                f"{path}: {type(a).__name__} {list(a)} against {type(b).__name__}"
                f" {list(b) if isinstance(b, dict) else ''}"
            )
        else:
            for key in a:
                yield from differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple | deque):
        if type(a) is not type(b) or len(a) != len(b):
            yield f"{path}: {type(a).__name__} of {len(a)} against {type(b).__name__}"
        else:
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                yield from differences(x, y, f"{path}/{number}")
    elif type(a) is not type(b) or (a != b and not (a != a and b != b)):
        yield f"{path}: {a!r} against {b!r}"


def assert_same(a: Any, b: Any) -> None:
    found = list(differences(a, b))
    assert not found, found[:5]


def assert_same_leaves(a: Any, b: Any) -> None:
    """The same pytree, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert_same(jax.tree.leaves(a), jax.tree.leaves(b))


def small_state(step: int = 0) -> dict[str, Any]:
    """A leaf with an array of its own, a packed one, and a number."""
    weights = np.random.default_rng(7).standard_normal((300, 400)).astype(np.float32)
    weights[step % 300] += step
    return {
        "params": {"w": jnp.asarray(weights), "b": jnp.full(5, step, jnp.bfloat16)},
        "step": step,
    }


def save(mngr: Any, step: int, tree: Any, **more: Any) -> None:
    assert mngr.save(step, args=DeltaSaveArgs(tree), **more)
    mngr.wait_until_finished()


def is_delta(root: Path, step: int) -> bool:
    """Return whether a step needs segments of earlier saves."""
    return len(deltacheck.open(root).manifest(step).segments) > 1


def mesh(*shape: int) -> Mesh:
    assert len(jax.devices()) == 4, "these tests need --xla_force_host_platform_device_count=4"
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])


def sharded(*spec: str | None, shape: tuple[int, ...] = (4,)) -> NamedSharding:
    return NamedSharding(mesh(*shape), PartitionSpec(*spec))


# --- saves ----------------------------------------------------------------------------------------


def test_a_manager_saves_and_restores_in_a_new_process_with_and_without_arguments(
    tmp_path: Path,
) -> None:
    state = small_state(3)
    with manager(tmp_path / "run") as mngr:
        save(mngr, 3, state)
    code = f"""
        import numpy as np
        from deltacheck.backends.orbax import DeltaRestoreArgs, manager
        with manager({str(tmp_path / "run")!r}) as mngr:
            assert mngr.latest_step() == 3 and mngr.all_steps() == [3]
            print(mngr.item_metadata(3)["params"]["w"].shape)
            by_arguments = mngr.restore(3, args=DeltaRestoreArgs())
            for restored in (mngr.restore(3), by_arguments, mngr.restore(None)):
                print(restored["step"])
                np.save({str(tmp_path / "w.npy")!r}, restored["params"]["w"])
    """
    out = run_python(code)
    assert out.splitlines() == ["(300, 400)", "3", "3", "3"]
    assert bits(np.load(tmp_path / "w.npy")) == bits(state["params"]["w"])


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Segments become durable only once the event is set."""
    event, finish = threading.Event(), SaveJob.finish_segment

    def wait(work: SaveJob) -> Any:
        assert event.wait(240)
        return finish(work)

    monkeypatch.setattr(SaveJob, "finish_segment", wait)
    yield event
    event.set()


def test_save_returns_before_anything_is_durable_and_the_step_appears_when_all_is(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    state = small_state(1)
    with manager(tmp_path) as mngr:
        mngr.save(1, args=DeltaSaveArgs(state))
        assert not (tmp_path / "1").exists()
        assert deltacheck.open(tmp_path).steps() == []
        slow_disk.set()
        mngr.wait_until_finished()
        assert deltacheck.open(tmp_path).steps() == [1]
        assert_same(mngr.restore(1), state)


def test_an_eager_save_has_read_every_array_when_it_returns(
    tmp_path: Path, slow_disk: threading.Event
) -> None:
    donated, deleted = jnp.arange(90_000.0).reshape(300, 300), jnp.arange(1000)
    sharded_one = jax.device_put(jnp.arange(4096.0), sharded("x"))
    written = np.arange(70_000.0)
    before = [np.array(x) for x in (donated, deleted, sharded_one, written)]
    pointer = donated.unsafe_buffer_pointer()
    with manager(tmp_path, save_options=SaveOptions(capture="eager")) as mngr:
        mngr.save(0, args=DeltaSaveArgs([donated, deleted, sharded_one, written]))
        updated = jax.jit(lambda x: x * 0, donate_argnums=0)(donated)
        assert donated.is_deleted()
        assert updated.unsafe_buffer_pointer() == pointer, (
            "a view held by the save kept the buffer from being donated"
        )
        deleted.delete()
        sharded_one.delete()
        written[:] = -1
        slow_disk.set()
        mngr.wait_until_finished()
        assert_same([np.asarray(x) for x in mngr.restore(0)], before)


@pytest.fixture
def may_read(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the encoder thread back before each capture, until the event is set."""
    event = threading.Event()
    capture = SaveJob.capture

    def late(self: SaveJob, sources: Any) -> None:
        if threading.current_thread().name == "deltacheck-encoder":
            assert event.wait(240)
        capture(self, sources)

    monkeypatch.setattr(SaveJob, "capture", late)
    return event


def test_a_host_array_that_a_jax_array_shares_and_that_is_overwritten_tears_the_save(
    tmp_path: Path, may_read: threading.Event
) -> None:
    # JAX shares memory that is aligned to a cache line.
    memory = np.zeros(4 * 70_000 + 64, np.uint8)
    host = memory[-memory.ctypes.data % 64 :][: 4 * 70_000].view(np.float32)
    array = jax.device_put(host, may_alias=True)
    if array.unsafe_buffer_pointer() != host.ctypes.data:
        pytest.skip("this JAX copies host arrays")
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": array}))
        host[:] = 1
        may_read.set()
        with pytest.raises(SnapshotTorn, match=r"leaf 'w'.*eager"):
            mngr.wait_until_finished()


def test_a_lazy_save_holds_what_it_has_not_read_yet_whatever_becomes_of_the_array(
    tmp_path: Path, may_read: threading.Event
) -> None:
    """Arrays on the processor are read behind the training: until then donation gives other memory,
    and deletion frees none.
    """
    with manager(tmp_path) as mngr:
        for step in range(2):
            may_read.clear()
            donated, deleted = (
                jnp.arange(90_000.0).reshape(300, 300) + step,
                jnp.arange(100_000) * (step + 1),
            )
            shared, written = (
                jax.device_put(jnp.arange(4096.0) - step, sharded("x")),
                np.arange(70_000.0) + step,
            )
            before = [np.array(x) for x in (donated, deleted, shared, written)]
            pointer = donated.unsafe_buffer_pointer()
            mngr.save(step, args=DeltaSaveArgs([donated, deleted, shared, written]))
            updated = jax.jit(lambda x: x * 0, donate_argnums=0)(donated)
            assert updated.unsafe_buffer_pointer() != pointer
            for array in (deleted, shared):
                array.delete()
            written[:] = -1
            del donated, deleted
            fresh = [
                jnp.full((300, 300), 7.0 + n) for n in range(20)
            ]  # would take the memory if it were free
            jax.block_until_ready(fresh)
            may_read.set()
            mngr.wait_until_finished()
            assert_same([np.asarray(x) for x in mngr.restore(step)], before)
    assert is_delta(tmp_path, 1)
    with pytest.raises(ValueError, match="capture must be 'auto' or 'eager', not 'lazy'"):
        manager(tmp_path / "other", save_options=SaveOptions(capture="lazy"))


def test_a_save_under_way_keeps_no_array_alive(tmp_path: Path, slow_disk: threading.Event) -> None:
    array = jnp.arange(100_000.0)
    watched = weakref.ref(array)
    with manager(tmp_path) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": array}))
        del array
        # The array is read behind the training, before anything waits for the disk.
        wait_until(lambda: watched() is None)
        slow_disk.set()


def test_a_delta_covers_every_change_since_its_base_and_unchanged_leaves_are_not_written(
    tmp_path: Path,
) -> None:
    states = [small_state(step) for step in range(4)]
    with manager(tmp_path) as mngr:
        for step, state in enumerate(states):
            save(mngr, step, state)
        segments = [ref.id for ref in deltacheck.open(tmp_path).manifest(3).segments]
        assert len(segments) == 4
        for step, state in enumerate(states):
            assert_same(mngr.restore(step), state)
        save(mngr, 4, states[3])
        assert [ref.id for ref in deltacheck.open(tmp_path).manifest(4).segments] == segments
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_deltas_are_merged_behind_the_saves_of_a_manager(tmp_path: Path) -> None:
    weights = np.arange(100_000, dtype=np.float32)
    merged: list[int] = []
    with manager(
        tmp_path, policy=Policy.exact(max_chain_depth=4), save_options=SaveOptions(grace_seconds=0)
    ) as mngr:
        for step in range(60):
            weights[step::1000] += 1
            save(mngr, step, {"w": jnp.asarray(weights), "step": step})
            merged.append(deltacheck.open(tmp_path).manifest(step).merged_bytes)
            if sum(map(bool, merged)) == 3:
                break
        assert sum(map(bool, merged)) == 3
        assert_same(mngr.restore(step), {"w": jnp.asarray(weights), "step": step})
        for earlier in mngr.all_steps():
            assert mngr.restore(earlier)["step"] == earlier
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_saving_without_async_checkpointing_works_too(tmp_path: Path) -> None:
    with manager(tmp_path, Options(enable_async_checkpointing=False)) as mngr:
        for step in range(2):
            assert mngr.save(step, args=DeltaSaveArgs(small_state(step)))
            assert deltacheck.open(tmp_path).steps() == list(range(step + 1))
        assert_same(mngr.restore(1), small_state(1))
    assert is_delta(tmp_path, 1)


def test_the_plain_checkpoint_manager_finds_the_root_by_itself(tmp_path: Path) -> None:
    with ocp.CheckpointManager(
        tmp_path, options=Options(step_prefix="ckpt", step_format_fixed_length=6)
    ) as mngr:
        mngr.save(12, args=DeltaSaveArgs(small_state(1)))
        mngr.save(13, args=DeltaSaveArgs(small_state(2)))
        mngr.wait_until_finished()
        assert_same(mngr.restore(12, args=DeltaRestoreArgs()), small_state(1))
    assert (tmp_path / "ckpt_000012").is_dir()
    assert deltacheck.open(tmp_path).steps() == [12, 13]
    assert is_delta(tmp_path, 13)


@pytest.mark.parametrize("value", [[1.0, 2.0], np.ones(2), "0.5x", None, {"a": 1}])
def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with manager(tmp_path) as mngr:
        with pytest.raises(ValueError, match="metric 'loss' must be a number"):
            mngr.save(0, args=DeltaSaveArgs({"x": jnp.ones(2)}, metrics={"loss": value}))
        for number in (np.float32(0.5), np.ones(1) / 2, jnp.float32(0.5)):
            args = DeltaSaveArgs({"x": jnp.ones(2)}, metrics={"loss": number})
            mngr.save((mngr.latest_step() or 0) + 1, args=args)
        mngr.wait_until_finished()
    run = open_root(tmp_path)
    assert [run.manifest(step).metrics for step in (1, 2, 3)] == [{"loss": 0.5}] * 3


def test_metrics_are_kept_with_the_step_and_best_fn_chooses_by_orbaxs_own(tmp_path: Path) -> None:
    options = Options(max_to_keep=1, best_fn=lambda m: m["loss"], best_mode="min")
    with manager(tmp_path, options, save_options=SaveOptions(grace_seconds=0)) as mngr:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            mngr.save(
                step,
                args=DeltaSaveArgs(small_state(step), metrics={"loss": loss}),
                metrics={"loss": loss},
            )
        mngr.wait_until_finished()
        assert mngr.best_step() == 1
        assert mngr.all_steps() == [1]
        assert_same(mngr.restore(1), small_state(1))
    assert deltacheck.open(tmp_path).manifest(1).metrics == {"loss": 1.0}


def test_the_chain_goes_on_over_a_step_that_orbax_deletes_at_once(tmp_path: Path) -> None:
    options = Options(max_to_keep=1, best_fn=lambda m: m["loss"], best_mode="min")
    with manager(tmp_path, options, save_options=SaveOptions(grace_seconds=0)) as mngr:
        for step, loss in enumerate([3.0, 5.0, 6.0, 1.0]):
            mngr.save(step, args=DeltaSaveArgs(small_state(step)), metrics={"loss": loss})
        mngr.wait_until_finished()
        assert mngr.all_steps() == [3]
    found = deltacheck.open(tmp_path)
    assert len(found.manifest(3).segments) == 4, (
        "steps 1 and 2 were committed, so step 3 may build on them"
    )
    assert found.verify(deep=True) == []


@pytest.mark.parametrize(
    ("on_processor", "calls"),
    [
        pytest.param(True, [[(300, 400)], [(500, 300)], [(400, 300)]], id="one by one"),
        pytest.param(False, [[(300, 400), (500, 300)], [(400, 300)]], id="grouped"),
    ],
)
def test_large_arrays_are_encoded_by_xla_and_the_rest_in_host_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_processor: bool,
    calls: list[list[tuple[int, ...]]],
) -> None:
    ffi = pytest.importorskip("deltacheck.backends.orbax.capture.ffi")
    if not ffi.available():
        pytest.skip("this build has no XLA handlers")
    monkeypatch.setattr(
        "deltacheck.backends.orbax.capture.array_codec._on_processor", lambda array: on_processor
    )
    seen: list[list[tuple[int, ...]]] = []
    encode_group = ffi.FfiCodec.encode_group

    def watched(codec: Any, jobs: Any, *rest: Any) -> Any:
        seen.append([job.current.shape for job in jobs])
        return encode_group(codec, jobs, *rest)

    monkeypatch.setattr(ffi.FfiCodec, "encode_group", watched)
    tree = {
        "large": jnp.zeros((300, 400)),
        "larger": jnp.zeros((500, 300)),
        "numpy": np.zeros((500, 500)),
        "packed by XLA": jnp.zeros((600, 600), jnp.int4),
        "sharded": jax.device_put(jnp.zeros((400, 300)), sharded("x")),
        "small": jnp.zeros(100),
    }

    def at(step: int) -> Any:
        return jax.tree.map(lambda x: x + np.array(step, x.dtype), tree)

    with manager(tmp_path, save_options=SaveOptions(capture="eager")) as mngr:
        for step in range(3):
            mngr.save(step, args=DeltaSaveArgs(at(step)))
        mngr.wait_until_finished()
        for step in range(3):
            assert_same(mngr.restore(step), at(step))
    assert seen == calls * 2


@pytest.mark.parametrize(
    ("axes", "order", "by_shard"),
    [
        pytest.param(("x",), (0, 1, 2, 3), True, id="rows"),
        pytest.param(("x",), (2, 0, 3, 1), True, id="rows on devices in another order"),
        pytest.param((None, "x"), (0, 1, 2, 3), False, id="columns"),
    ],
)
def test_each_device_encodes_the_shards_that_are_whole_chunks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    axes: tuple[str | None, ...],
    order: tuple[int, ...],
    by_shard: bool,
) -> None:
    ffi = pytest.importorskip("deltacheck.backends.orbax.capture.ffi")
    if not ffi.available() or len(jax.devices()) < 4:
        pytest.skip("needs XLA handlers and four devices")
    monkeypatch.setattr(
        "deltacheck.backends.orbax.capture.array_codec._on_processor", lambda array: False
    )
    seen: list[tuple[int, ...]] = []
    encode_group = ffi.FfiCodec.encode_group

    def watched(codec: Any, jobs: Any, *rest: Any) -> Any:
        seen.extend(job.current.shape for job in jobs)
        return encode_group(codec, jobs, *rest)

    monkeypatch.setattr(ffi.FfiCodec, "encode_group", watched)
    mesh = jax.sharding.Mesh(np.array(jax.devices())[list(order)], "x")
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    content = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)  # four chunks
    kernel = jax.device_put(content, where)
    with manager(tmp_path, save_options=SaveOptions(capture="eager")) as mngr:
        for step in range(3):
            mngr.save(
                step,
                args=DeltaSaveArgs(
                    {"kernel": kernel.at[step::7].add(1), "bias": jnp.full(70_000, step)}
                ),
            )
        mngr.wait_until_finished()
        for step in range(3):
            assert_same(
                mngr.restore(step),
                {"kernel": kernel.at[step::7].add(1), "bias": jnp.full(70_000, step)},
            )
    assert seen.count((256, 1024)) == (8 if by_shard else 0)
    assert seen.count((1024, 1024)) == (0 if by_shard else 2)
    assert seen.count((70_000,)) == 2
    found = deltacheck.open(tmp_path)
    assert len(found.manifest(2).segments) == 3, "one keyframe, two deltas"
    assert found.verify(deep=True) == []


def test_without_xla_handlers_everything_is_encoded_in_host_memory_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("deltacheck.backends.orbax.capture.ffi")
    monkeypatch.setattr("deltacheck.backends.orbax.capture.ffi.available", lambda: False)
    leaf_codec.cache_clear()
    try:
        with manager(tmp_path) as mngr:
            for step in range(2):
                save(mngr, step, small_state(step))
            assert_same(mngr.restore(1), small_state(1))
        assert "JAX arrays are encoded in host memory" in caplog.text
    finally:
        leaf_codec.cache_clear()


def test_a_leaf_may_change_its_kind_and_its_place_and_stays_a_delta(tmp_path: Path) -> None:
    content = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    places: list[Any] = [
        content.copy(),
        jnp.asarray(content),
        jax.device_put(content, jax.devices()[2]),
        jax.device_put(content, sharded("x")),
        content.copy(),
        jax.device_put(content, sharded()),
    ]
    with manager(tmp_path) as mngr:
        for step, value in enumerate(places):
            changed = value + np.float32(step == 5)
            save(mngr, step, {"w": changed})
            assert len(deltacheck.open(tmp_path).manifest(step).segments) == (1 if step < 5 else 2)
            if step in (2, 4):  # else the base is what the save before left
                restored = mngr.restore(step)["w"]
                assert isinstance(restored, np.ndarray) == isinstance(value, np.ndarray)
                assert bits(restored) == bits(changed)
            assert bits(deltacheck.open(tmp_path).restore()["w"]) == bits(changed)


EXPLICIT = (AxisType.Explicit, AxisType.Explicit)


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.set_mesh(mesh(4)),
        lambda: jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=EXPLICIT)),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.default_device(jax.devices()[3]),
    ],
    ids=["mesh", "explicit mesh", "transfer guard", "debug_nans", "default device"],
)
def test_saves_and_restores_work_whatever_the_training_has_set(
    tmp_path: Path, context: Any
) -> None:
    values = jnp.arange(90_000.0).at[7].set(jnp.nan)
    states = [
        {
            "w": values + step,
            "s": jax.device_put(values[:4096] + step, sharded("x")),
            "key": jax.random.key(step),
        }
        for step in range(2)
    ]
    with manager(tmp_path) as mngr:
        for step, state in enumerate(states):
            with context():
                mngr.save(step, args=DeltaSaveArgs(state))
                mngr.wait_until_finished()
                plain, targeted = (
                    mngr.restore(step),
                    mngr.restore(step, args=DeltaRestoreArgs(state)),
                )
            assert_same(plain, state)
            assert_same_leaves(targeted, state)


# --- retention and collection ---------------------------------------------------------------------


def segments_on_disk(root: Path) -> set[str]:
    return {path.name for path in (root / "deltacheck" / "segments").iterdir() if path.is_dir()}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_deleting_steps_in_any_order_never_harms_another(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    states = [small_state(step) for step in range(3)]
    with manager(tmp_path, save_options=SaveOptions(grace_seconds=0)) as mngr:
        for step in range(3):
            save(mngr, step, states[step])
        left = {0, 1, 2}
        for number, step in enumerate(order[:2]):
            mngr.delete(step)
            left.discard(step)
            save(mngr, 3 + number, states[step])  # a save collects what the deletion left
            for other in left:
                assert_same(mngr.restore(other), states[other])
    assert deltacheck.open(tmp_path).verify(deep=True) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_is_synced_before_the_rename_that_makes_it_exist_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    from deltacheck.backends.orbax.manager_root import durable

    seen: list[tuple[str, bool, bool]] = []
    original = durable.sync_directory

    def noting(path: Path) -> None:
        original(path)
        seen.append((path.name, (tmp_path / "1").exists(), (tmp_path / "0").exists()))

    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=is_async)
    with manager(tmp_path, options) as mngr:
        save(mngr, 0, small_state(0))
        monkeypatch.setattr(durable, "sync_directory", noting)
        save(mngr, 1, small_state(1))
        mngr.wait_until_finished()
        assert not (tmp_path / "0").exists()
    assert ("1.orbax-checkpoint-tmp", False, True) in seen  # the step's content, before the step
    assert seen[-1] == (
        tmp_path.name,
        True,
        True,
    )  # the step's name, before the deletion of the older one
    assert options.temporary_path_class is None  # the caller's options are the caller's


def test_durability_process_leaves_orbax_as_it_is_and_a_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.store.files import durability

    monkeypatch.setattr(
        durability.os, "fsync", lambda descriptor: pytest.fail("something was synced")
    )
    with manager(tmp_path, save_options=SaveOptions(durability="process")) as mngr:
        save(mngr, 0, small_state(0))
        mngr.wait_until_finished()
    assert deltacheck.open(tmp_path).manifest(0).durability == "process"
    with pytest.raises(ValueError, match="durability must be 'power' or 'process'"):
        manager(tmp_path, save_options=SaveOptions(durability="none"))


def test_max_to_keep_deletes_old_steps_and_their_segments_go_when_nobody_needs_them(
    tmp_path: Path,
) -> None:
    with manager(
        tmp_path,
        Options(max_to_keep=2),
        policy=Policy.exact(max_chain_depth=2),
        save_options=SaveOptions(grace_seconds=0),
    ) as mngr:
        for step in range(10):
            save(mngr, step, small_state(step))
        assert mngr.all_steps() == [8, 9]
        for step in (8, 9):
            assert_same(mngr.restore(step), small_state(step))
        live = {
            ref.id
            for step in (7, 8, 9)
            for ref in deltacheck.open(tmp_path).manifest(max(step, 8)).segments
        }
        assert live <= segments_on_disk(tmp_path)
        assert len(segments_on_disk(tmp_path)) < 7, "segments of deleted steps are collected"


def test_a_segment_stays_for_the_grace_period(tmp_path: Path) -> None:
    with manager(
        tmp_path,
        Options(max_to_keep=1),
        policy=Policy.exact(max_chain_depth=0),
        save_options=SaveOptions(grace_seconds=3600),
    ) as mngr:
        for step in range(4):
            save(mngr, step, small_state(step))
        assert len(segments_on_disk(tmp_path)) == 4


def test_steps_that_are_set_aside_stay_restorable(tmp_path: Path) -> None:
    options = Options(max_to_keep=1, todelete_subdir="aside")
    with manager(
        tmp_path,
        options,
        policy=Policy.exact(max_chain_depth=0),
        save_options=SaveOptions(grace_seconds=0),
    ) as mngr:
        for step in range(4):
            save(mngr, step, small_state(step))
    assert (tmp_path / "aside" / "0").is_dir()
    shutil.move(tmp_path / "aside" / "0", tmp_path / "0")
    assert_same(load(tmp_path, 0), small_state(0))


def test_nothing_is_collected_while_another_formats_step_lies_beside_ours_but_ours_is_whole(
    tmp_path: Path,
) -> None:
    """A foreign zarr.json at the depth where set-aside manifests lie neither stops a collection nor
    counts as a manifest.
    """
    foreign = tmp_path / "archive" / "params" / "w"
    foreign.mkdir(parents=True)
    (foreign / "zarr.json").write_text('{"zarr_format": 3, "node_type": "array"}')
    with manager(
        tmp_path,
        Options(max_to_keep=1),
        policy=Policy.exact(max_chain_depth=0),
        save_options=SaveOptions(grace_seconds=0),
    ) as mngr:
        for step in range(4):
            save(mngr, step, small_state(step))
        assert len(segments_on_disk(tmp_path)) == 2


def test_a_damaged_manifest_stops_the_collection_and_not_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(
        tmp_path,
        Options(max_to_keep=2),
        policy=Policy.exact(max_chain_depth=0),
        save_options=SaveOptions(grace_seconds=0),
    ) as mngr:
        for step in range(3):
            save(mngr, step, small_state(step))
        before = segments_on_disk(tmp_path)
        manifest = tmp_path / "2" / "default" / "zarr.json"
        manifest.write_text(manifest.read_text().replace('"seq":2', '"seq":7'))
        save(mngr, 3, small_state(3))
        assert before <= segments_on_disk(tmp_path)
        assert "could not be removed" in caplog.text
        assert_same(mngr.restore(3), small_state(3))


def test_a_manager_that_only_reads_takes_no_lock_and_collects_nothing(tmp_path: Path) -> None:
    with manager(tmp_path) as writer:
        save(writer, 0, small_state(0))
        with manager(tmp_path, Options(read_only=True)) as reader:
            assert_same(reader.restore(0), small_state(0))
            assert reader.save(1, args=DeltaSaveArgs(small_state(1))) is False
        other = f"""
            from deltacheck.backends.orbax import manager
            with manager({str(tmp_path)!r}) as mngr:
                print(mngr.restore(0)["step"])
        """
        assert run_python(other) == "0\n"
        save(writer, 1, small_state(1))
    assert is_delta(tmp_path, 1)


@pytest.mark.parametrize("read_only", [False, True])
def test_only_a_manager_that_may_save_keeps_a_copy_of_what_it_restored(
    tmp_path: Path, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[weakref.ref[Any]] = []
    empty = host_memory.empty

    def recorded(size: int) -> Any:
        buffer = empty(size)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(host_memory, "empty", recorded)
    state = {"w": jnp.arange(2_000_000.0)}
    with manager(tmp_path) as mngr:
        save(mngr, 0, state)
    with manager(tmp_path, Options(read_only=read_only)) as mngr:
        buffers.clear()
        mngr.restore(0)
        gc.collect()
        kept = sum(buffer.nbytes for ref in buffers if (buffer := ref()) is not None)
    assert buffers
    assert (kept >= 8_000_000) == (not read_only)


def test_two_processes_may_not_write_to_one_root(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        code = f"""
            import jax.numpy as jnp
            from deltacheck.backends.orbax import DeltaSaveArgs, manager
            from deltacheck.errors import RootBusy
            mngr = manager({str(tmp_path)!r})
            try:
                mngr.save(1, args=DeltaSaveArgs({{"w": jnp.ones(3)}}))
            except RootBusy as error:
                print(error)
        """
        assert f"process {os.getpid()}" in run_python(code)
        save(mngr, 1, small_state(1))
    with manager(tmp_path) as mngr:  # given back on close
        save(mngr, 2, small_state(2))


def test_two_managers_of_one_process_share_the_right_to_write(tmp_path: Path) -> None:
    first, second = manager(tmp_path), manager(tmp_path)
    save(first, 0, small_state(0))
    second.reload()
    save(second, 1, small_state(1))
    first.close()
    save(second, 2, small_state(2))
    second.close()
    found = deltacheck.open(tmp_path)
    assert found.verify(deep=True) == []
    seqs = [found.manifest(step).seq for step in (0, 1, 2)]
    assert seqs == sorted(set(seqs))


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While the event is set, writes of tables fail as on a full disk."""
    event, write = threading.Event(), arrays.write_document

    def failing(*args: Any) -> Any:
        if event.is_set():
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")
        return write(*args)

    monkeypatch.setattr(arrays, "write_document", failing)
    return event


def test_a_failed_save_is_told_leaves_earlier_steps_alone_and_the_next_is_whole(
    tmp_path: Path, full_disk: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        full_disk.set()
        mngr.save(1, args=DeltaSaveArgs(small_state(1)))
        with pytest.raises(SaveFailed, match=r"the save of step 1 failed.*No space left on device"):
            mngr.wait_until_finished()
        assert "the save of step 1 failed" in caplog.text
        full_disk.clear()
        assert deltacheck.open(tmp_path).steps() == [0]
        assert_same(mngr.restore(0), small_state(0))
        mngr.save(2, args=DeltaSaveArgs(small_state(2)))
        mngr.wait_until_finished()
        assert_same(mngr.restore(2), small_state(2))
        assert mngr.all_steps() == [0, 2]
    assert deltacheck.open(tmp_path).verify(deep=True) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_on_error_log_goes_on_without_the_failed_steps_until_there_are_too_many(
    tmp_path: Path, full_disk: threading.Event, is_async: bool
) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=is_async)
    with manager(
        tmp_path, options, save_options=SaveOptions(on_error="log", max_failures=3)
    ) as mngr:
        for step in (0, 1):
            save(mngr, step, small_state(step))
        full_disk.set()
        for step in (2, 3):
            mngr.save(step, args=DeltaSaveArgs(small_state(step)))
            mngr.wait_until_finished()
        full_disk.clear()
        # The step that the failed save would have replaced is still there, and still known.
        assert mngr.all_steps() == [0, 1]
        save(mngr, 4, small_state(4))
        save(mngr, 5, small_state(5))
        assert mngr.all_steps() == [4, 5]
        assert not is_delta(tmp_path, 4)
        assert is_delta(tmp_path, 5)
        for step in (4, 5):
            assert_same(mngr.restore(step), small_state(step))
        manifests = [deltacheck.open(tmp_path)._root.manifest(step) for step in (4, 5)]
        assert [manifest.failed_saves for manifest in manifests] == [2, 0]
        full_disk.set()
        for step in (6, 7):
            mngr.save(step, args=DeltaSaveArgs(small_state(step)))
        with pytest.raises(SaveFailed, match="the save of step 8 failed"):
            save(mngr, 8, small_state(8))
        full_disk.clear()
        save(mngr, 9, small_state(9))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_on_error_log_is_refused_in_a_run_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="on_error='log' is of one process"):
        manager(tmp_path / "run", save_options=SaveOptions(on_error="log"))
    assert not (tmp_path / "run").exists()


def test_a_failure_that_nobody_waited_for_surfaces_at_the_next_save_and_the_one_after_works(
    tmp_path: Path, full_disk: threading.Event
) -> None:
    with manager(tmp_path) as mngr:
        full_disk.set()
        mngr.save(0, args=DeltaSaveArgs(small_state(0)))
        with pytest.raises(SaveFailed, match="the save of step 0 failed"):
            mngr.save(1, args=DeltaSaveArgs(small_state(1)))
        full_disk.clear()
        save(mngr, 1, small_state(1))
        assert_same(mngr.restore(1), small_state(1))


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_capture_without_device_memory_is_a_failed_save_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    def full(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")

    with manager(tmp_path, save_options=SaveOptions(on_error=on_error)) as mngr:
        save(mngr, 0, small_state(0))
        with monkeypatch.context() as patch:
            patch.setattr(item, "planned", full)
            if on_error == "log":
                mngr.save(1, args=DeltaSaveArgs(small_state(1)))
            else:
                with pytest.raises(SaveFailed, match=r"step 1 failed.*Free memory") as caught:
                    mngr.save(1, args=DeltaSaveArgs(small_state(1)))
                assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        save(mngr, 2, small_state(2))
        assert deltacheck.open(tmp_path).steps() == [0, 2]
        assert deltacheck.open(tmp_path).manifest(2).failed_saves == 1


def test_a_step_that_orbax_failed_to_rename_is_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        finalize = DeltaCheckpointHandler.finalize

        def fail(handler: DeltaCheckpointHandler, directory: Any) -> None:
            raise OSError("the rename failed")

        monkeypatch.setattr(DeltaCheckpointHandler, "finalize", fail)
        mngr.save(1, args=DeltaSaveArgs(small_state(1)))
        with pytest.raises(OSError, match="the rename failed"):
            mngr.wait_until_finished()
        monkeypatch.setattr(DeltaCheckpointHandler, "finalize", finalize)
        save(mngr, 2, small_state(2))
        assert not is_delta(tmp_path, 2)
        assert deltacheck.open(tmp_path).steps() == [0, 2]
        assert_same(mngr.restore(2), small_state(2))


class NoDirectory:
    """Stands for Orbax's future of a directory that could not be created."""

    def __init__(self, opening: Any, name: str) -> None: ...

    def result(self, timeout: float | None = None) -> None:
        raise PermissionError("no directory today")

    def cancel(self) -> None: ...


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_save_whose_directory_is_never_created_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    with manager(tmp_path) as mngr:
        if cancelled and not hasattr(mngr._checkpointer, "cancel"):
            pytest.skip("this Orbax cannot cancel a save")
        save(mngr, 0, small_state(0))
        with monkeypatch.context() as patch:
            patch.setattr(commit_gate, "CommitFutureAwaitingContractedSignals", NoDirectory)
            mngr.save(1, args=DeltaSaveArgs(small_state(1)))
            if cancelled:
                mngr._checkpointer.cancel()
            with (
                contextlib.suppress(SaveFailed, OSError)
                if cancelled
                else pytest.raises(PermissionError, match="no directory today")
            ):
                mngr.wait_until_finished()
        save(mngr, 2, small_state(2))
        assert_same(mngr.restore(2), small_state(2))
        assert deltacheck.open(tmp_path).steps() == [0, 2]


def test_the_manifest_waits_for_the_directory_that_orbax_has_yet_to_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, committing, commit = (
        CommitFutureAwaitingContractedSignals,
        threading.Event(),
        Gate.write_manifest,
    )
    gates: list[Gate] = []

    def watched(gate: Gate, manifest: Any) -> Any:
        gates.append(gate)
        open_when_called(monkeypatch, gate._changed, "wait", committing)
        try:
            return commit(gate, manifest)
        finally:
            committing.set()

    def late(opening: Any, name: str) -> Any:
        async def wait() -> None:
            await asyncio.to_thread(committing.wait)
            assert not (gates[0]._directory / "zarr.json").exists()
            await opening

        return real(wait(), name=name)

    monkeypatch.setattr(Gate, "write_manifest", watched)
    monkeypatch.setattr(commit_gate, "CommitFutureAwaitingContractedSignals", late)
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        assert_same(mngr.restore(0), small_state(0))


def test_what_cannot_be_saved_is_refused_at_the_call_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    deleted = jnp.ones(3)
    deleted.delete()
    bad: list[tuple[Any, str]] = [
        ({"a": {"b": deleted}}, "leaf 'a/b': its buffer was deleted or donated"),
        ({"a": object()}, r"leaf 'a' is of type builtins\.object"),
        ({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}, "leaf 'a' is of type .*ShapeDtypeStruct"),
        ({("a", 1): jnp.ones(2)}, "a key of type tuple"),
    ]
    with manager(tmp_path) as mngr:
        for tree, message in bad:
            with pytest.raises(UnsupportedLeaf, match=message):
                mngr.save(0, args=DeltaSaveArgs(tree))
        with pytest.raises(UnsupportedLeaf, match="a traced array has no content"):
            jax.jit(lambda x: mngr.save(0, args=DeltaSaveArgs({"x": x})))(1.0)
        save(mngr, 0, small_state(0))
        assert_same(mngr.restore(0), small_state(0))
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in left:
        thread.join(240)  # it may be ending just now
    assert [thread.name for thread in left if thread.is_alive()] == [], (
        "they would block the program's end"
    )


def test_a_closed_manager_stops_its_threads_and_gives_the_root_back(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    mngr = manager(tmp_path)
    save(mngr, 0, small_state(0))

    def ours() -> list[str]:
        return [
            thread.name
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("deltacheck-")
        ]

    assert ours()
    mngr.close()
    assert ours() == []
    handler = DeltaCheckpointHandler(tmp_path)
    handler.close()
    with pytest.raises(SaveFailed, match="this handler is closed"):
        handler.save(tmp_path / "1" / "default", args=DeltaSaveArgs(small_state(1)))


def test_a_program_that_ends_with_a_save_under_way_finishes_it(tmp_path: Path) -> None:
    code = f"""
        import threading
        import jax.numpy as jnp
        from deltacheck.backends.orbax import DeltaSaveArgs, manager
        from deltacheck.save.job.save_job import SaveJob
        finish, ending = SaveJob.finish_segment, threading.Event()
        SaveJob.finish_segment = lambda work: (ending.wait(), finish(work))[1]
        manager({str(tmp_path / "held")!r}).save(5, args=DeltaSaveArgs({{"w": jnp.arange(1000.0)}}))
        mngr = manager({str(tmp_path / "named")!r})
        mngr.save(5, args=DeltaSaveArgs({{"w": jnp.arange(1000.0)}}))
        # The last one that is registered is the first one that is called.
        threading._register_atexit(ending.set)
    """
    run_python(code)
    for root in ("held", "named"):
        assert_same(load(tmp_path / root), {"w": jnp.arange(1000.0)})


def test_a_save_under_way_starts_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, none can be started while the program ends."""
    has_returned = threading.Event()
    plan = Saver._plan_later

    def plan_after_the_return(self: Saver, *arguments: Any) -> Any:
        assert has_returned.wait(240)
        return plan(self, *arguments)

    def refused(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(Saver, "_plan_later", plan_after_the_return)
    mngr = manager(tmp_path)
    mngr.save(0, args=DeltaSaveArgs({"w": jnp.arange(1000.0)}))
    with monkeypatch.context() as patch:
        patch.setattr(Background, "__init__", refused)
        has_returned.set()
        mngr.wait_until_finished()
    mngr.close()
    assert_same(load(tmp_path), {"w": jnp.arange(1000.0)})


# --- chains over restores -------------------------------------------------------------------------


@pytest.mark.parametrize("with_target", [False, True])
def test_after_a_restore_in_a_new_manager_the_next_save_is_a_delta(
    tmp_path: Path, with_target: bool
) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    with manager(tmp_path) as mngr:
        target = mngr.item_metadata(0) if with_target else None
        restored = mngr.restore(0, args=DeltaRestoreArgs(target))
        restored["params"]["w"] = restored["params"]["w"].at[0, 0].add(1)
        save(mngr, 1, restored)
        assert is_delta(tmp_path, 1)
        assert_same(mngr.restore(1), restored)
        assert_same(mngr.restore(0), small_state(0))


def test_what_was_restored_does_not_change_with_the_next_save(tmp_path: Path) -> None:
    """The restored bytes become the base of the next delta, and the base is updated in place: the
    arrays must not share it.
    """
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"j": jnp.arange(80_000.0), "n": np.arange(90_000.0)})
    with manager(tmp_path) as mngr:
        restored = mngr.restore(0)
        save(mngr, 1, {"j": restored["j"] * -1, "n": restored["n"] * -1})
        assert_same(restored, {"j": jnp.arange(80_000.0), "n": np.arange(90_000.0)})


def test_a_restore_keeps_nothing_of_what_it_gave_away(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    with manager(tmp_path) as mngr:
        for args in (DeltaRestoreArgs(), DeltaRestoreArgs(small_state(0))):
            restored = mngr.restore(0, args=args)
            watched = weakref.ref(restored["params"]["w"])
            del restored
            gc.collect()
            assert watched() is None


def test_a_manager_that_restored_nothing_starts_with_keyframes(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    with manager(tmp_path) as mngr:
        save(mngr, 1, small_state(1))
    assert not is_delta(tmp_path, 1)


def test_segments_that_were_collected_since_the_restore_are_not_built_on(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    with manager(tmp_path, save_options=SaveOptions(grace_seconds=0)) as late:
        late.restore(0)
        with manager(
            tmp_path,
            Options(max_to_keep=1),
            policy=Policy.exact(0),
            save_options=SaveOptions(grace_seconds=0),
        ) as mngr:
            for step in (1, 2, 3):
                save(mngr, step, small_state(step))
        late.reload()
        shutil.rmtree(tmp_path / "deltacheck" / "segments" / min(segments_on_disk(tmp_path)))
        save(late, 4, small_state(4))
    assert not is_delta(tmp_path, 4)
    assert_same(load(tmp_path, 4), small_state(4))


def test_restored_arrays_can_be_donated(tmp_path: Path) -> None:
    shardings = {"whole": None, "split": sharded("x"), "copied": sharded()}
    tree = {name: jnp.arange(65536.0) for name in shardings}
    with manager(tmp_path) as mngr:
        save(mngr, 0, tree)
        targets = {
            name: jax.ShapeDtypeStruct((65536,), jnp.float32, sharding=sharding)
            for name, sharding in shardings.items()
        }
        restored = mngr.restore(0, args=DeltaRestoreArgs(targets))
    for name, array in restored.items():
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        result = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert array.is_deleted(), name
        assert [
            shard.data.unsafe_buffer_pointer() for shard in result.addressable_shards
        ] == pointers, name


# --- what trees come back as ----------------------------------------------------------------------


DTYPES = [
    *"bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64 bfloat16".split(),
    *"float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2"
    " float8_e5m2fnuz".split(),
    *"float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4".split(),
]


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bits, NaN payloads among them; valid values for types that do not use all of
    theirs.
    """
    rng = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if dtype == "bool" or dtype.endswith(("int2", "int4", "e2m1fn")):
        return rng.integers(0, 2, shape).astype(kind)
    raw = rng.integers(0, 256, (int(np.prod(shape)) * kind.itemsize,)).astype(np.uint8)
    return raw.view(kind).reshape(shape)


def test_every_dtype_shape_and_kind_of_leaf_comes_back_bit_for_bit(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0), (7,), (130, 515)]
    tree: dict[str, Any] = {
        "jax": {
            d: [jnp.asarray(random_array(d, s, n)) for n, s in enumerate(shapes)] for d in DTYPES
        },
        "numpy": {
            d: [random_array(d, s, n) for n, s in enumerate(shapes)]
            for d in [*DTYPES, "int64", "float64", "complex128"]
        },
        "numpy scalars": [
            np.int64(-5),
            np.float32(np.nan),
            np.bool_(True),
            np.array(3, ml_dtypes.bfloat16)[()],
        ],
        "python": [1, -(2**70), 1.5, float("nan"), -0.0, True, None, "text", "", b"bytes", 2 + 3j],
        "text keys": {"0": jnp.ones(2), "a/b": jnp.ones(3), "": 1, "%": 2},
        "integer keys": {0: jnp.zeros(2), 10: jnp.ones(1), 2: 5},
        "containers": (
            OrderedDict(z=jnp.ones(1), a=2),
            deque([jnp.zeros(2), 3], maxlen=7),
            [],
            {},
            (),
            [[{}]],
        ),
        "prng": {
            "one": jax.random.key(1),
            "many": jax.random.split(jax.random.key(2), (2, 3)),
            "rbg": jax.random.key(3, impl="rbg"),
            "raw": jax.random.PRNGKey(4),
        },
    }
    with manager(tmp_path) as mngr:
        save(mngr, 0, tree)
        restored = mngr.restore(0)
        assert_same(restored, tree)
        assert jax.random.key_impl(restored["prng"]["rbg"]) == "rbg"
        changed = jax.tree.map(lambda x: x, tree)
        changed["jax"]["bfloat16"][4] = changed["jax"]["bfloat16"][4].at[5].set(1.5)
        changed["prng"]["one"] = jax.random.key(9)
        save(mngr, 1, changed)
        assert_same(mngr.restore(1), changed)
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_bare_array_is_a_tree_too(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, jnp.arange(4))
        assert_same(mngr.restore(0), jnp.arange(4))
        assert_same(
            mngr.restore(0, args=DeltaRestoreArgs(jax.ShapeDtypeStruct((4,), jnp.int32))),
            jnp.arange(4),
        )


class Pair(NamedTuple):
    left: Any
    right: Any


@partial(jax.tree_util.register_dataclass, data_fields=["w", "inner"], meta_fields=["name"])
class Node:
    def __init__(self, w: Any, inner: Any, name: str = "x") -> None:
        self.w, self.inner, self.name = w, inner, name


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A node that was registered without names for its children."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Unnamed:
        return cls(*children)


def test_pytree_nodes_are_kept_as_named_fields_and_built_again_from_a_target(
    tmp_path: Path,
) -> None:
    tree = {
        "pair": Pair(jnp.ones(2), 3),
        "node": Node(jnp.zeros(3), [jnp.ones(1)]),
        "unnamed": Unnamed(jnp.ones(4), None),
    }
    with manager(tmp_path) as mngr:
        save(mngr, 0, tree)
        plain = mngr.restore(0)
        assert_same(
            plain,
            {
                "pair": {"left": jnp.ones(2), "right": 3},
                "node": {"w": jnp.zeros(3), "inner": [jnp.ones(1)]},
                "unnamed": {0: jnp.ones(4), 1: None},
            },
        )
        empty = {
            "pair": Pair(jnp.zeros(2), 0),
            "node": Node(jnp.zeros(3), [jnp.zeros(1)]),
            "unnamed": Unnamed(jnp.zeros(4), None),
        }
        again = mngr.restore(0, args=DeltaRestoreArgs(empty))
        assert type(again["node"]) is Node
        assert_same_leaves(again, tree)
    leaves = sorted(deltacheck.open(tmp_path).manifest(0).leaves)
    assert leaves == ["node/inner/0", "node/w", "pair/left", "unnamed/0"]


def test_the_same_array_at_two_places_is_stored_once_and_comes_back_as_two_that_can_be_donated(
    tmp_path: Path,
) -> None:
    shared = jnp.arange(70_000.0)
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"params": shared, "ema": shared})
        assert sorted(deltacheck.open(tmp_path).manifest(0).leaves) == ["ema"]
        restored = mngr.restore(0)
        assert_same(restored, {"params": shared, "ema": shared})
        jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(
            restored["params"], restored["ema"]
        )
        save(mngr, 1, {"params": shared + 1, "ema": shared})  # and may go separate ways
        assert_same(mngr.restore(1), {"params": shared + 1, "ema": shared})


def test_sixty_four_bit_leaves_come_back_as_numpy_where_jax_would_round_them(
    tmp_path: Path,
) -> None:
    exact = np.array([2**60 + 1, -1])
    with manager(tmp_path) as mngr:
        with jax.enable_x64(True):
            wide = jnp.asarray(exact)
            assert wide.dtype == jnp.int64
            save(mngr, 0, {"wide": wide})
            assert_same(mngr.restore(0), {"wide": wide})
        assert_same(mngr.restore(0), {"wide": exact})
        assert_same(
            mngr.restore(0, args=DeltaRestoreArgs({"wide": np.zeros(2, np.int64)})), {"wide": exact}
        )
        assert_same(mngr.restore(0, args=DeltaRestoreArgs(mngr.item_metadata(0))), {"wide": exact})


def test_flax_train_state_with_optax_continues_bit_for_bit(tmp_path: Path) -> None:
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask={"w": True, "b": False})
    )

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["w"] + p["b"]

    def fresh() -> TrainState:
        params = {"w": jax.random.normal(jax.random.key(0), (300, 300)), "b": jnp.zeros(300)}
        return TrainState.create(apply_fn=apply, params=params, tx=optimizer)

    @jax.jit
    def step(state: TrainState, x: jax.Array) -> TrainState:
        return state.apply_gradients(
            grads=jax.grad(lambda p: (state.apply_fn(p, x) ** 2).mean())(state.params)
        )

    x = jnp.ones((4, 300))
    state = fresh()
    with manager(tmp_path) as mngr:
        save(mngr, 0, state)
        assert_same_leaves(mngr.restore(0, args=DeltaRestoreArgs(fresh())), state)
        state = step(step(state, x), x)
        save(mngr, 2, state)
    with manager(tmp_path) as mngr:
        restored = mngr.restore(
            2, args=DeltaRestoreArgs(fresh())
        )  # whose step is the number 0, and no array
        assert int(restored.step) == 2
        assert_same_leaves(restored, state)
        assert_same_leaves(step(restored, x), step(state, x))
        abstract = jax.eval_shape(step, state, x)
        assert_same_leaves(mngr.restore(2, args=DeltaRestoreArgs(abstract)), state)
    leaves = deltacheck.open(tmp_path).manifest(2).leaves
    assert "opt_state/1/0/mu/w" in leaves
    assert {"params/w", "params/b", "step"} <= set(leaves)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(20, 30, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(30, 30, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def test_flax_nnx_state_is_split_saved_and_merged_again(tmp_path: Path) -> None:
    model = Model(nnx.Rngs(0, dropout=7))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m(jnp.ones((2, 20))) ** 2).mean())(model)
    optimizer.update(model, grads)
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    with manager(tmp_path) as mngr:
        definition, abstract = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0, dropout=7))))
        target = {"model": abstract, "optimizer": nnx.state(optimizer)}
        restored = mngr.restore(0, args=DeltaRestoreArgs(target))
        assert type(restored["model"]) is nnx.State
        assert_same_leaves(restored, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
        again = nnx.merge(definition, restored["model"])
        assert_same(
            again(jnp.ones((2, 20))), model(jnp.ones((2, 20)))
        )  # the dropout's key and count too
        plain = mngr.restore(0)
        assert_same(plain["model"]["first"]["kernel"]["value"], model.first.kernel[...])


# --- targets, shardings, partial restores ---------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["params"].update(w=jnp.zeros((300, 401))),
            r"leaf 'params/w' is float32\[300, 400\] in step 0, float32\[300, 401\]",
        ),
        (
            lambda t: t["params"].update(w=jnp.zeros((300, 400), jnp.int32)),
            r"float32\[300, 400\] in step 0, int32\[300, 400\] in the t",
        ),
        (
            lambda t: t["params"].update(more=jnp.zeros(1)),
            r"leaf 'params/more' of the target is not in step 0 \(float32\[1\] in the target\)",
        ),
        (lambda t: t["params"].pop("b"), "leaf 'params/b' of step 0 is not in the target"),
        (
            lambda t: t["params"].update(w={"in": jnp.zeros(1)}),
            r"leaf 'params/w' is float32\[300, 400\] in step 0, a subtree in the target \(its leaf"
            r" 'params/w/in' is float32\[1\]\)",
        ),
        (
            lambda t: t.update(params=jnp.zeros(1)),
            r"leaf 'params' is float32\[1\] in the target, a subtree in step 0 \(its leaf",
        ),
        (
            lambda t: t.update(step={"0": 1}),
            "leaf 'step' is 0 in step 0, a subtree in the target",
        ),
        (
            lambda t: t.update(step=jnp.zeros(2, jnp.int32)),
            r"leaf 'step' is 0 in step 0, int32\[2\] in the target",
        ),
        (lambda t: t.update(name="x"), "leaf 'name' of the target is not in step 0"),
        (lambda t: t.pop("step"), "leaf 'step' of step 0 is not in the target"),
        (
            lambda t: t["params"].update(b="x"),
            r"leaf 'params/b' is bfloat16\[5\] in step 0, 'x' in the target",
        ),
    ],
)
def test_a_target_that_does_not_match_is_refused_naming_leaf_and_both_values(
    tmp_path: Path, change: Any, message: str
) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        target = small_state(0)
        change(target)
        with pytest.raises(TreeMismatch, match=message) as refusal:
            mngr.restore(0, args=DeltaRestoreArgs(target))
        # Callers of Orbax handle one or the other; the text of a plain KeyError would be quoted.
        assert isinstance(refusal.value, ValueError)
        assert isinstance(refusal.value, KeyError)
        assert str(refusal.value).startswith("leaf ")
        assert_same_leaves(mngr.restore(0, args=DeltaRestoreArgs(small_state(0))), small_state(0))


def test_a_number_and_an_array_of_one_number_are_targets_for_each_other(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"a": 3, "b": jnp.int32(4), "c": np.int64(5), "d": 2.5})
        numbers = {"a": 0, "b": 0, "c": 0, "d": 0.0}
        restored = mngr.restore(0, args=DeltaRestoreArgs(numbers))
        assert_same(restored, {"a": 3, "b": jnp.int32(4), "c": np.int64(5), "d": 2.5})
        abstract = {
            "a": jax.ShapeDtypeStruct((), jnp.int32),
            "b": jnp.int32(0),
            "c": np.int64(0),
            "d": np.zeros((), np.float32),
        }
        restored = mngr.restore(0, args=DeltaRestoreArgs(abstract))
        assert_same(
            restored,
            {
                "a": jnp.int32(3),
                "b": jnp.int32(4),
                "c": np.int64(5),
                "d": np.array(2.5, np.float32),
            },
        )
        save(mngr, 1, {"a": 300, "b": 0.1})
        with pytest.raises(
            TreeMismatch, match=r"leaf 'a' is 300 in step 1, int8\[\] in the target"
        ):
            mngr.restore(1, args=DeltaRestoreArgs({"a": jnp.int8(0), "b": 0.0}))
        with pytest.raises(
            TreeMismatch, match=r"leaf 'a' is 300 in step 1, float32\[\] in the target"
        ):
            mngr.restore(1, args=DeltaRestoreArgs({"a": jnp.float32(0), "b": 0.0}))
        with pytest.raises(
            TreeMismatch, match=r"leaf 'b' is 0\.1 in step 1, float32\[\] in the target"
        ):
            mngr.restore(1, args=DeltaRestoreArgs({"a": 0, "b": jnp.float32(0)}))


def test_a_target_says_whether_a_leaf_comes_back_as_jax_numpy_or_key(tmp_path: Path) -> None:
    key = jax.random.key(5)
    with manager(tmp_path) as mngr:
        save(
            mngr,
            0,
            {
                "a": jnp.arange(3),
                "b": np.arange(3, dtype=np.int32),
                "key": key,
                "raw": jax.random.key_data(key),
            },
        )
        target = {
            "a": np.zeros(3, np.int32),
            "b": jax.ShapeDtypeStruct((3,), jnp.int32),
            "key": jnp.zeros(2, jnp.uint32),
            "raw": jax.eval_shape(lambda: key),
        }
        restored = mngr.restore(0, args=DeltaRestoreArgs(target))
        expected = {
            "a": np.arange(3, dtype=np.int32),
            "b": jnp.arange(3),
            "key": jax.random.key_data(key),
            "raw": key,
        }
        assert_same(restored, expected)


def test_a_key_of_another_implementation_is_refused(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"key": jax.random.key(0, impl="rbg")})
        with pytest.raises(
            TreeMismatch,
            match=r"leaf 'key' is a jax\.key:rbg in step 0, a jax\.key:unsafe_rbg in the target",
        ):
            mngr.restore(0, args=DeltaRestoreArgs({"key": jax.random.key(0, impl="unsafe_rbg")}))


def test_a_sharded_array_is_restored_under_any_other_sharding_and_as_numpy(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    tree = {
        "rows": jax.device_put(whole, sharded("x")),
        "columns": jax.device_put(whole, sharded(None, "x")),
        "both": jax.device_put(whole, sharded("x", "y", shape=(2, 2))),
        "partly": jax.device_put(whole, sharded("x", shape=(2, 2))),
        "replicated": jax.device_put(whole, sharded()),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), sharded("x")),
    }
    with manager(tmp_path) as mngr:
        save(mngr, 0, tree)
        plain = mngr.restore(0)
        for path, array in plain.items():  # as they were saved
            assert array.sharding.is_equivalent_to(tree[path].sharding, array.ndim), path
        for wanted in (
            sharded("x"),
            sharded(None, "x"),
            sharded("y", "x", shape=(2, 2)),
            sharded(),
            jax.devices()[2],
        ):
            arrays_only = [path for path in tree if path != "keys"]
            some = mngr.restore(0, args=DeltaRestoreArgs(leaves=arrays_only, shardings=wanted))
            for path, array in some.items():
                assert bits(array) == bits(whole), (path, wanted)
                if isinstance(wanted, NamedSharding):
                    assert array.sharding.is_equivalent_to(wanted, 2)
                else:
                    assert array.devices() == {wanted}
        same = mngr.restore(0, args=DeltaRestoreArgs(tree))  # a target brings its shardings
        for path, array in same.items():
            assert array.sharding.is_equivalent_to(tree[path].sharding, array.ndim), path
            assert bits(array) == bits(tree[path])
        turned = mngr.restore(
            0, args=DeltaRestoreArgs(tree, shardings={"rows": sharded(None, "x")})
        )
        assert turned["rows"].sharding.is_equivalent_to(sharded(None, "x"), 2)
        assert turned["columns"].sharding.is_equivalent_to(tree["columns"].sharding, 2)
    assert bits(deltacheck.open(tmp_path).restore()["both"]) == bits(whole)


def test_a_chain_goes_on_over_a_change_of_sharding(tmp_path: Path) -> None:
    whole = jnp.asarray(np.random.default_rng(0).standard_normal((64, 4096)), jnp.float32)
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"w": jax.device_put(whole, sharded("x"))})
        changed = whole.at[3, 5].set(0)
        save(mngr, 1, {"w": jax.device_put(changed, sharded(None, "x"))})
        assert is_delta(tmp_path, 1)
        save(mngr, 2, {"w": changed})
        assert len(deltacheck.open(tmp_path).manifest(2).segments) == 2, (
            "nothing changed but where it lies"
        )
        assert_same(mngr.restore(1), {"w": changed})


def test_a_sharding_that_does_not_fit_is_refused_naming_the_leaf(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, {"a": jnp.zeros(8), "b": jnp.zeros(7)})
        with pytest.raises(ValueError, match=r"leaf 'b' of shape \(7,\) cannot be placed"):
            mngr.restore(0, args=DeltaRestoreArgs(shardings=sharded("x")))
        with pytest.raises(StepNotFound, match="shardings name leaf 'c'"):
            mngr.restore(0, args=DeltaRestoreArgs(shardings={"c": sharded("x")}))


def test_some_leaves_can_be_restored_alone(tmp_path: Path) -> None:
    state = small_state(4)
    with manager(tmp_path) as mngr:
        save(mngr, 4, state)
        assert_same(
            mngr.restore(4, args=DeltaRestoreArgs(leaves=["params/b"])),
            {"params/b": state["params"]["b"]},
        )
        with pytest.raises(
            StepNotFound, match=r"step 4 has no leaf 'params/c'; near it: 'params/b'"
        ):
            mngr.restore(4, args=DeltaRestoreArgs(leaves=["params/c"]))
        with pytest.raises(ValueError, match="not both"):
            mngr.restore(4, args=DeltaRestoreArgs(state, leaves=["params/b"]))
        with pytest.raises(BudgetExceeded, match="max_bytes=1000"):
            mngr.restore(4, args=DeltaRestoreArgs(max_bytes=1000))


# --- several items, and neighbours ----------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_pending": 2}, {"on_busy": "skip"}, {"shadow": "none"}])
def test_options_that_orbax_decides_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Orbax's interface has no {next(iter(options))}"):
        manager(tmp_path / "run", save_options=SaveOptions(**options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("instances", ["one", "two"])
def test_two_items_of_one_manager_have_a_chain_each(tmp_path: Path, instances: str) -> None:
    if instances == "one":
        mngr = manager(
            tmp_path, items=("policy", "reference"), save_options=SaveOptions(grace_seconds=0)
        )
    else:
        registry = ocp.DefaultCheckpointHandlerRegistry()
        for item in ("policy", "reference"):
            handler = DeltaCheckpointHandler(tmp_path, save_options=SaveOptions(grace_seconds=0))
            registry.add(item, DeltaSaveArgs, handler)
            registry.add(item, DeltaRestoreArgs, handler)
        mngr = ocp.CheckpointManager(tmp_path, handler_registry=registry)
    with mngr:
        for step in range(3):
            items = {
                "policy": DeltaSaveArgs(small_state(step)),
                "log": ocp.args.JsonSave({"step": step}),
            }
            if step != 1:
                items["reference"] = DeltaSaveArgs(small_state(100 + step))
            mngr.save(step, args=ocp.args.Composite(**items))
        mngr.wait_until_finished()
        mngr.delete(0)
        mngr.save(3, args=ocp.args.Composite(policy=DeltaSaveArgs(small_state(3))))
        mngr.wait_until_finished()
        restored = mngr.restore(
            2, args=ocp.args.Composite(policy=DeltaRestoreArgs(), reference=DeltaRestoreArgs())
        )
        assert_same(restored.policy, small_state(2))
        assert_same(restored.reference, small_state(102))
        assert mngr.item_metadata(2).policy["step"].dtype == np.int64
        assert mngr.restore(1).policy["step"] == 1
    policy, reference = (
        deltacheck.open(tmp_path, item="policy"),
        deltacheck.open(tmp_path, item="reference"),
    )
    assert (policy.steps(), reference.steps()) == ([1, 2, 3], [2])
    assert policy.verify(deep=True) == reference.verify(deep=True) == []
    assert len(policy.manifest(3).segments) == 4
    assert len(reference.manifest(2).segments) == 2
    seqs = [
        found.manifest(step).seq
        for found, steps in ((policy, (1, 2, 3)), (reference, (2,)))
        for step in steps
    ]
    assert len(set(seqs)) == 4
    with pytest.raises(StepNotFound, match="has the items policy, reference"):
        deltacheck.open(tmp_path).manifest(2)


@pytest.mark.parametrize("restored", [False, True])
def test_an_item_that_is_saved_seldom_keeps_its_base_when_all_its_steps_are_gone(
    tmp_path: Path, restored: bool
) -> None:
    def both(step: int) -> Any:
        items = {"often": DeltaSaveArgs(small_state(step))}
        return ocp.args.Composite(
            **items, **({"seldom": DeltaSaveArgs(small_state(step))} if step in (0, 4) else {})
        )

    mngr = manager(tmp_path, Options(max_to_keep=1), save_options=SaveOptions(grace_seconds=0))
    for step in range(6):
        mngr.save(step, args=both(step))
        if step == 0 and restored:
            mngr.close()
            mngr = manager(
                tmp_path, Options(max_to_keep=1), save_options=SaveOptions(grace_seconds=0)
            )
            mngr.restore(
                0, args=ocp.args.Composite(seldom=DeltaRestoreArgs(), often=DeltaRestoreArgs())
            )
        if step == 4:
            mngr.wait_until_finished()
            assert len(deltacheck.open(tmp_path, item="seldom").manifest(4).segments) == 2
            assert deltacheck.open(tmp_path, item="seldom").verify(deep=True) == []
    mngr.close()
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_plain_orbax_fails_clearly_on_our_steps(tmp_path: Path) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    code = f"""
        import orbax.checkpoint as ocp
        for args in (None, ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
            with ocp.CheckpointManager({str(tmp_path)!r}) as mngr:
                assert mngr.all_steps() == [0]
                try:
                    mngr.restore(0, args=args)
                except ValueError as error:
                    print("saved with deltacheck" in str(error))
                else:
                    print("restored something")
    """
    assert run_python(code).split() == ["False", "True", "True"]


def test_an_item_of_plain_orbax_is_refused_clearly(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as mngr:
        mngr.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    with manager(tmp_path) as mngr:
        with pytest.raises(
            NotACheckpointRoot, match=r"plain Orbax.*v1\.context\(root\).*deltacheck import"
        ):
            mngr.restore(0, args=DeltaRestoreArgs())
        save(mngr, 1, small_state(1))
        with pytest.raises(NotACheckpointRoot, match="was not saved with DeltaSaveArgs"):
            mngr.restore(0, args=DeltaRestoreArgs())


def test_a_step_is_read_without_any_framework(tmp_path: Path) -> None:
    state = small_state(2)
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
        save(mngr, 2, {**state, "key": jax.random.key(3)})
    code = f"""
        import sys
        import numpy as np
        import deltacheck
        found = deltacheck.open({str(tmp_path)!r})
        tree = found.restore()
        assert found.verify(deep=True) == []
        np.save({str(tmp_path / "w.npy")!r}, tree["params"]["w"])
        print(found.steps(), tree["params"]["b"].dtype, tree["key"].tolist(), tree["step"])
        assert not {{"jax", "torch", "orbax", "flax"}} & set(sys.modules), sys.modules.keys()
    """
    assert run_python(code) == "[0, 2] bfloat16 [0, 3] 2\n"
    assert bits(np.load(tmp_path / "w.npy")) == bits(state["params"]["w"])


def test_unfinished_steps_of_killed_runs_do_not_disturb_and_orbax_removes_them(
    tmp_path: Path,
) -> None:
    with manager(tmp_path) as mngr:
        save(mngr, 0, small_state(0))
    left = tmp_path / "1.orbax-checkpoint-tmp" / "default.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    shutil.copy(tmp_path / "0" / "default" / "zarr.json", left)
    assert deltacheck.open(tmp_path).steps() == [0]
    with manager(tmp_path, Options(cleanup_tmp_directories=True)) as mngr:
        save(mngr, 1, small_state(1))
    assert not left.exists()
    assert deltacheck.open(tmp_path).steps() == [0, 1]
    assert_same(load(tmp_path, 0), small_state(0))


def test_steps_written_in_place_form_a_chain_and_orbaxs_clean_up_spares_the_store(
    tmp_path: Path,
) -> None:
    if not hasattr(ocp.options, "AtomicityMode"):
        pytest.skip("this Orbax has no public option for it")
    atomicity = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    for first in (0, 2):
        with manager(
            tmp_path, Options(atomicity_options=atomicity, cleanup_tmp_directories=True)
        ) as mngr:
            for step in (first, first + 1):
                save(mngr, step, small_state(step))
        assert is_delta(tmp_path, first + 1)
    assert deltacheck.open(tmp_path).steps() == [0, 1, 2, 3]
    assert deltacheck.open(tmp_path).verify(deep=True) == []


def test_a_handler_logs_nothing_while_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="deltacheck"),
        manager(tmp_path, save_options=SaveOptions(grace_seconds=0)) as mngr,
    ):
        for step in range(3):
            save(mngr, step, small_state(step))
        mngr.restore(2)
    assert [
        record
        for record in caplog.records
        if record.name == "deltacheck" and "NumPy codec" not in record.message
    ] == []


def test_a_long_list_of_numbers_is_restored_with_and_without_a_target(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "losses": [0.5 * step for step in range(300)]}
    with manager(tmp_path) as mngr:
        save(mngr, 0, state)
        mngr.wait_until_finished()
        found = mngr.restore(0)
        assert found["losses"] == state["losses"]
        target = {"w": jnp.zeros(4), "losses": [0.0] * 300}
        found = mngr.restore(0, args=DeltaRestoreArgs(target))
        assert [float(number) for number in found["losses"]] == state["losses"]
        found = mngr.restore(0, args=DeltaRestoreArgs(leaves=["losses/7"]))
        assert found == {"losses/7": 3.5}


@pytest.mark.parametrize("call", ["save", "wait_until_finished", "delete"])
def test_a_call_of_the_manager_is_not_interrupted_while_orbax_holds_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    events: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: events.append("handled"))
    original = getattr(ocp.CheckpointManager, call)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        result = original(*args, **kwargs)
        events.append("done")
        return result

    try:
        with manager(tmp_path) as mngr:
            save(mngr, 0, {"w": jnp.arange(4.0)})
            monkeypatch.setattr(ocp.CheckpointManager, call, interrupted)
            if call == "save":
                save(mngr, 1, {"w": jnp.arange(4.0)})
            else:
                getattr(mngr, call)(*[0] * (call == "delete"))
            monkeypatch.undo()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert events[:2] == ["done", "handled"]
