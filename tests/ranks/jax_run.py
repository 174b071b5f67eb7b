"""Define the jobs that the processes of a JAX run execute in the tests.

Each process imports this module. The parent uses only the names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import deltacheck
from deltacheck import Profiler, SaveOptions
from deltacheck.backends.orbax import (
    DeltaRestoreArgs,
    DeltaSaveArgs,
    load,
    manager,
    restore_whole,
)
from deltacheck.backends.orbax.group.coordination import join
from deltacheck.backends.orbax.manager import handler_of
from deltacheck.backends.orbax.manager_root.commit_gate import Gate
from deltacheck.backends.orbax.manager_root.jax_internals import coordination_client
from deltacheck.errors import Damaged, RankFailed, TreeMismatch
from deltacheck.policy import Policy
from deltacheck.restore import read
from deltacheck.restore.content import chunk_bytes
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.ranks.channel import consult
from tests.support.waiting import wait_until

load_module = importlib.import_module(
    "deltacheck.backends.orbax.state.load"
)  # the package has a function of that name
SPREAD = (4 << 20) + 8  # float32 elements: enough for each of two processes to write a part


def start(rank: int, size: int, port: int, **options: Any) -> None:
    jax.config.update("jax_platforms", "cpu")
    if size > 1:
        jax.distributed.initialize(
            f"localhost:{port}", num_processes=size, process_id=rank, **options
        )
    assert len(jax.local_devices()) == 2, "XLA_FLAGS asks for two devices"


def mesh(*shape: int) -> Mesh:
    names = ("x", "y")[: len(shape)]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def put(values: np.ndarray, on: Mesh, *spec: Any) -> jax.Array:
    values = np.asarray(values)
    return jax.make_array_from_callback(
        values.shape, NamedSharding(on, P(*spec)), lambda index: values[index]
    )


def numbers(n: int) -> dict[str, np.ndarray]:
    """The values of the state as of update ``n``."""
    rng = np.random.default_rng(5)
    return {
        "rows": rng.standard_normal((4096, 64), np.float32) + np.float32(n),
        "columns": rng.standard_normal((96, 128)).astype(jnp.bfloat16),
        "odd": rng.integers(0, 1 << 30, (3, 5)).astype(np.int32) + n,
        "spread": rng.standard_normal(SPREAD, np.float32),
        "one": np.asarray(np.float32(n)),
        "none": np.zeros((0, 4), np.float32),
    }


def made(n: int, on: Mesh, specs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    state: dict[str, Any] = {
        name: put(values, on, *specs.get(name, ())) for name, values in numbers(n).items()
    }
    key = jax.jit(lambda: jax.random.key(7), out_shardings=NamedSharding(on, P()))()
    return {"arrays": state, "key": key, "host": np.arange(5), "n": n}


def like(on: Mesh, specs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    arrays = {
        name: jax.ShapeDtypeStruct(
            values.shape, values.dtype, sharding=NamedSharding(on, P(*specs.get(name, ())))
        )
        for name, values in numbers(0).items()
    }
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(on, P()))
    return {"arrays": arrays, "key": key, "host": np.zeros(5, int), "n": 0}


# Dtypes to cast arrays to, by name.
CASTS = {"rows": jnp.bfloat16, "odd": np.float32, "one": np.float16}


def narrow(on: Mesh, specs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a target with other dtypes than the state has."""
    target = like(on, specs)
    for name, dtype in CASTS.items():
        target["arrays"][name] = target["arrays"][name].update(dtype=dtype)
    return {**target, "host": np.zeros(5, np.float16), "n": 0.0}


def check_narrow(state: dict[str, Any], n: int) -> None:
    """Require what a cast to ``narrow`` makes of update ``n``."""
    check(state, n, CASTS)
    assert state["host"].dtype == np.float16
    assert type(state["n"]) is float


def check(state: dict[str, Any], n: int, casts: Mapping[str, Any] = {}) -> None:
    """Every shard that lies here has the values of update ``n``, bit for bit."""
    for name, values in numbers(n).items():
        values = values.astype(casts.get(name, values.dtype))
        assert state["arrays"][name].dtype == values.dtype
        for shard in state["arrays"][name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes(), (
                name,
                shard.index,
            )
    key = state["key"]
    assert all(
        (jax.random.key_data(shard.data) == jax.random.key_data(jax.random.key(7))).all()
        for shard in key.addressable_shards
    )
    assert (state["host"] == np.arange(5)).all()
    assert state["n"] == n


ROWS = {"rows": ("x",), "columns": (None, "x")}
GRID = {"rows": (("x", "y"),), "columns": ("y", "x"), "spread": ("y",)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that are read and decoded meanwhile."""
    found, original = [0], read.read_chunks

    def counting(chains: Any, reads: Any) -> Any:
        found[0] += sum(chunk_bytes(chains[path].spec, chunks) for path, chunks in reads.items())
        return original(chains, reads)

    read.read_chunks = counting
    try:
        yield found
    finally:
        read.read_chunks = original


def report(m: Any) -> Any:
    """Of this process's part of the last save."""
    (item,) = handler_of(m)._items.values()
    return item._last.handle.report


# --- what the processes do ------------------------------------------------------------------------


def save_and_restore(rank: int, size: int, port: int, root: str) -> dict[str, Any]:
    start(rank, size, port)
    told: dict[str, Any] = {}
    policy = Policy.exact(max_restore_ratio=None)  # rows change everywhere, at every save
    for processes in ({"primary_host": 1}, {"active_processes": {0}}):
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=ocp.options.MultiprocessingOptions(**processes)
        )
        with pytest.raises(ValueError, match="process 0 commits"):
            manager(root, options)
    with manager(
        root,
        ocp.CheckpointManagerOptions(max_to_keep=2),
        policy=policy,
        save_options=SaveOptions(grace_seconds=0),
    ) as m:
        for n in range(5):
            state = made(n, mesh(4), ROWS)
            m.save(n, args=DeltaSaveArgs(state, metrics={"n": n}))
            jax.tree.map(
                lambda x: x.delete() if isinstance(x, jax.Array) else None, state
            )  # as a donation would
            m.wait_until_finished()
            told.setdefault("kinds", []).append(
                {leaf.path: leaf.kind.value for leaf in report(m).leaves}
            )
            told.setdefault("stored", []).append(report(m).stored_bytes)
        assert m.all_steps() == [3, 4]
    target = like(mesh(2, 2), GRID)
    with manager(root, policy=policy, save_options=SaveOptions(grace_seconds=0)) as m:
        for step in (3, 4):
            with counted() as read:
                state = m.restore(step, args=DeltaRestoreArgs(target))
            check(state, step)
        told["read"] = read[0]
        rows = state["arrays"]["rows"]
        pointers = [shard.data.unsafe_buffer_pointer() for shard in rows.addressable_shards]
        state["arrays"]["rows"] = jax.jit(
            lambda x: x * 2, donate_argnums=0, out_shardings=rows.sharding
        )(rows)
        told["donated"] = rows.is_deleted()
        told["in_place"] = pointers == [
            shard.data.unsafe_buffer_pointer()
            for shard in state["arrays"]["rows"].addressable_shards
        ]
        m.save(5, args=DeltaSaveArgs(state))
        m.wait_until_finished()
        told["after"] = {leaf.path: leaf.kind.value for leaf in report(m).leaves}
        told["after_bytes"] = report(m).stored_bytes
        state["arrays"]["rows"] = state["arrays"]["rows"] / 2
        state["arrays"]["rows"].block_until_ready()
        m.save(6, args=DeltaSaveArgs(state))
        m.wait_until_finished()
        target = narrow(mesh(2, 2), GRID)
        with pytest.raises(TreeMismatch, match="cast=True"):
            m.restore(6, args=DeltaRestoreArgs(target))
        state = m.restore(6, args=DeltaRestoreArgs(target, cast=True))
        check_narrow(state, 4)
        m.save(7, args=DeltaSaveArgs(state))  # continues from a step of other dtypes
        m.wait_until_finished()
        check_narrow(m.restore(7, args=DeltaRestoreArgs(target)), 4)
    # Whole, in this process.
    alone = load(root, 6, shardings=jax.local_devices()[0])
    assert all(
        (np.asarray(alone["arrays"][name]) == values).all() for name, values in numbers(4).items()
    )
    return told


def under_policies(rank: int, size: int, port: int, root: str, saves: int) -> dict[int, Any]:
    """Train with a save every ten updates, from the newest step on; what was live at each.

    The same run is saved under three policies, each in a folder of its name below ``root``.
    """
    from tests.support.adam_run import AdamRun

    start(rank, size, port)
    on, run, live, profiler = mesh(2 * size), AdamRun(), {}, Profiler(interval_steps=10)

    def placed(values: Any) -> Any:
        if isinstance(values, dict):
            return {key: placed(item) for key, item in values.items()}
        return (
            put(values, on, "x") if isinstance(values, np.ndarray) and values.ndim > 1 else values
        )

    for _ in range(25):
        run.advance(10)
        profiler.observe(run.step, run.state())
    policies = {
        "derive": Policy.exact(derive=True),
        "auto": Policy.auto(derive=False),
        "bounded": Policy.auto(profiler.profile(), weights="bounded"),
    }
    run = AdamRun()
    with contextlib.ExitStack() as stack:
        managers = [
            stack.enter_context(manager(f"{root}/{name}", policy=policy))
            for name, policy in policies.items()
        ]
        newest = managers[0].latest_step()
        run.advance(100 if newest is None else newest)
        for m in managers:
            if newest is not None:
                m.restore(newest)
        for _ in range(saves):
            run.advance(10)
            live[run.step] = run.state()
            for m in managers:
                m.save(run.step, args=DeltaSaveArgs(placed(live[run.step])))
                m.wait_until_finished()
    return live


def merge(rank: int, size: int, port: int, root: str, saves: int) -> tuple[Any, int]:
    """Save an array of which little changes, with short chains and the newest two steps kept.

    Return the kinds of its parts by save in this process, and the bytes of merges that steps state.
    """
    start(rank, size, port)
    on, kinds, merged_bytes = mesh(2 * size), [], 0
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    policy = Policy.exact(max_chain_depth=6)
    with manager(root, options, policy=policy, save_options=SaveOptions(grace_seconds=0)) as m:
        first = m.latest_step() or 0
        if first:
            sharding = NamedSharding(on, P("x"))
            target = jax.ShapeDtypeStruct((400, 1000), np.float32, sharding=sharding)
            m.restore(first, args=DeltaRestoreArgs({"w": target}))
        for step in range(first + 1, first + saves + 1):
            m.save(step, args=DeltaSaveArgs({"w": put(merged_content(step), on, "x")}))
            m.wait_until_finished()
            kinds.append({leaf.kind.value for leaf in report(m).leaves})
            merged_bytes += deltacheck.open(root).manifest(step).merged_bytes
            # The merge that was planned with the save is taken by the next one.
            (item,) = handler_of(m)._items.values()
            assert item._saver is not None
            assert item._saver.chains.compactor is not None
            item._saver.chains.compactor.wait()
            multihost_utils.sync_global_devices(f"merged {step}")
    return kinds, merged_bytes


def merged_content(step: int) -> np.ndarray:
    """Return the content of the array of ``merge`` at a step."""
    content = np.arange(400_000, dtype=np.float32).reshape(400, 1000)
    for number in range(1, step + 1):
        content.reshape(-1)[number * 37 :: 1009] += 1.0
    return content


def fail_apart(rank: int, size: int, port: int, root: str) -> dict[str, str]:
    """One process fails where the other does not; the save after it goes well. What each was told,
    and after how many seconds.
    """
    start(rank, size, port)
    on = mesh(4)
    told: dict[str, str] = {}
    steps: Iterator[int] = itertools.count()
    with manager(
        root, save_options=SaveOptions(grace_seconds=0, io_timeout_seconds=3600)
    ) as m:  # nobody may wait so long

        def fails(name: str, state: Any, *broken: Any) -> None:
            n = next(steps)
            with contextlib.ExitStack() as stack:
                for one in broken:
                    stack.enter_context(one)
                with pytest.raises(Exception) as info:  # noqa: PT011, PT012 - the caller looks at it
                    m.save(n, args=DeltaSaveArgs(state))
                    m.wait_until_finished()
                told[name] = f"{info.typename}: {info.value}"
            n = next(steps)
            m.save(n, args=DeltaSaveArgs(made(n, on, ROWS)))
            m.wait_until_finished()
            check(m.restore(n, args=DeltaRestoreArgs(like(on, ROWS))), n)

        def on_rank(which: int, what: Any, name: str, error: Exception) -> Any:
            return (
                mock.patch.object(what, name, side_effect=error)
                if rank == which
                else contextlib.nullcontext()
            )

        good = made(0, on, ROWS)
        m.save(next(steps), args=DeltaSaveArgs(good))
        m.wait_until_finished()
        fails("disk", good, on_rank(1, SaveJob, "finish_segment", OSError("no space left")))
        fails("manifest", good, on_rank(0, Gate, "write_manifest", OSError("read-only")))
        fails("capture", good, on_rank(1, SaveJob, "capture", OSError("a bus error")))
        fails(
            "local", {**good, "new": jnp.ones(3)} if rank else {**good, "new": put(np.ones(3), on)}
        )
        fails("array", {**good, "host": np.arange(5) + rank})
        fails("number", {**good, "n": rank})
        fails("shape", {**good, "host": np.arange(5 + rank)})
        newest = max(m.all_steps())
        with (
            on_rank(1, read, "read_chunks", Damaged("a flipped bit")),
            pytest.raises(Damaged) as info,
        ):
            m.restore(newest, args=DeltaRestoreArgs(like(on, ROWS)))
        told["damage"] = str(info.value)
        told["whole"] = str(restored_beside_damage(rank, m, like(on, ROWS)))
    return told


def restored_beside_damage(rank: int, m: Any, target: Any) -> int:
    """Return the step that ``restore_whole`` gives if process 1 cannot read the newest."""
    original, newest = load_module._restore_tree, max(m.all_steps())

    def broken(root: Any, manifest: Any, *more: Any) -> Any:
        if rank == 1 and manifest.step == newest:
            raise Damaged("a flipped bit")
        return original(root, manifest, *more)

    with mock.patch.object(load_module, "_restore_tree", broken):
        return restore_whole(m, DeltaRestoreArgs(target)).step


def die_in_save(rank: int, size: int, port: int, root: str, victim: int) -> None:
    """Process ``victim`` is killed while the second save is written. The other writes down what the
    log says, and when.
    """
    start(rank, size, port, heartbeat_timeout_seconds=30)

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if rank != victim:
                Path(root, "..", "told").write_text(record.getMessage())

    def die(work: SaveJob) -> None:
        time.sleep(2)  # the training goes on meanwhile
        os.kill(os.getpid(), signal.SIGKILL)

    on = mesh(4)
    m = manager(root, save_options=SaveOptions(grace_seconds=0))
    m.save(0, args=DeltaSaveArgs(made(0, on, ROWS)))
    m.wait_until_finished()
    logging.getLogger("deltacheck").addHandler(Told())
    if rank == victim:
        SaveJob.finish_segment = die  # type: ignore[assignment,method-assign]
    for item in handler_of(m)._items.values():
        # Waits for the dead for less time than JAX, which ends this process.
        item._group.joint.ranks.end._timeout_seconds = 3.0  # type: ignore[union-attr]
    m.save(1, args=DeltaSaveArgs(made(1, on, ROWS)))
    m.wait_until_finished()  # Orbax waits here for the dead, until JAX ends this process


def collect_at_the_worst_moment(rank: int, size: int, port: int, root: str) -> dict[str, list[str]]:
    """Process 0 collects all that it may: while process 1 has written a segment that no manifest
    names
    yet, and after Orbax has deleted the step that the next save stands on.
    """
    start(rank, size, port)
    on = mesh(4)
    segments = Path(root, "deltacheck", "segments")
    seen: dict[str, list[str]] = {}
    finish = SaveJob.finish_segment

    def slow(work: SaveJob) -> Any:
        made = finish(work)
        wait_until(Path(root, "..", "collected").exists)
        return made

    def collected(m: Any) -> list[str]:
        (item,) = (item for (_, name), item in handler_of(m)._items.items() if name == "default")
        item.writer.collect(0.0, 30.0)
        return sorted(path.parent.name for path in segments.glob("s*/zarr.json"))

    def save(m: Any, step: int, n: int, value: float) -> None:
        m.save(step, args=DeltaSaveArgs(made(n, on, ROWS)), metrics={"value": value})

    def best(count: int | None) -> Any:
        return ocp.CheckpointManagerOptions(
            max_to_keep=count, best_fn=lambda metrics: metrics["value"]
        )

    policy = Policy.exact(max_chain_depth=2)
    target = like(on, ROWS)
    with manager(root, best(None), policy=policy, save_options=SaveOptions(grace_seconds=0)) as m:
        for n in range(5):  # keyframes at steps 0 and 3
            SaveJob.finish_segment = slow if (rank, n) == (1, 4) else finish  # type: ignore[assignment,method-assign]
            save(m, n, n, float(n))
            if rank == 0 and n == 4:
                wait_until(lambda: len(list(segments.glob("s0000000004-*/zarr.json"))) == 2)
                seen["under way"] = collected(m)
                Path(root, "..", "collected").touch()
            m.wait_until_finished()
        SaveJob.finish_segment = finish  # type: ignore[method-assign]
    with manager(root, best(1), policy=policy, save_options=SaveOptions(grace_seconds=0)) as m:
        check(m.restore(1, args=DeltaRestoreArgs(target)), 1)
        save(m, 5, 5, -1.0)
        m.wait_until_finished()
        assert m.all_steps() == [4], (
            m.all_steps()
        )  # the step that the next one stands on is gone already
        gc.collect()  # what has restored step 1 pins its segments
        multihost_utils.sync_global_devices("nothing is pinned")
        if rank == 0:
            seen["base deleted"] = collected(m)
        save(m, 6, 6, 9.0)
        m.wait_until_finished()
        assert m.all_steps() == [6]
        check(m.restore(6, args=DeltaRestoreArgs(target)), 6)
        save(m, 7, 7, 10.0)  # what nobody needs goes with the next save
    if rank == 0:
        seen["after"] = sorted(path.parent.name for path in segments.glob("s*/zarr.json"))
    return seen


def read_foreign(rank: int, size: int, port: int, root: str) -> tuple[int, int]:
    """A torch root, onto the devices of all processes: bytes read here, and those of what lies
    here.
    """
    start(rank, size, port)
    placed = NamedSharding(mesh(4), P("x"))
    with counted() as read:
        state = load(root, shardings=placed)
    weight = np.arange(16384 * 256, dtype=np.float32).reshape(16384, 256)
    for shard in state["w"].addressable_shards:
        assert (np.asarray(shard.data) == weight[shard.index]).all()
    return read[0], sum(shard.data.nbytes for shard in state["w"].addressable_shards)


def talk(rank: int, size: int, port: int) -> list[str]:
    """Conversations over the store: large ones, failures, one that is late."""
    start(rank, size, port)
    told = []
    channel = join("talk", 240.0).begin
    store = coordination_client()
    large = bytes(range(256)) * (5 << 12) + b"end"
    assert consult(channel, large, lambda got: [got[1], got[0]]) == large
    with pytest.raises(RankFailed) as info:
        consult(channel, ValueError("mine") if rank == 1 else b"", lambda got: [b"", b""])
    told.append(str(info.value))
    hasty = join("hasty", 240.0 if rank else 1.0).begin  # rank 0 gives up, rank 1 hears of it
    if rank == 1:
        wait_until(lambda: store.key_value_dir_get("deltacheck/hasty/0/begin/1/down"))
    with pytest.raises(RankFailed) as info:
        consult(hasty, b"late", lambda got: [b"", b""])
    told.append(str(info.value))
    consult(channel, b"", lambda got: [b"", b""])
    wait_until(lambda: not store.key_value_dir_get("deltacheck/"))  # each deletes its own
    return [*told, *(key for key, _ in store.key_value_dir_get("deltacheck/"))]
