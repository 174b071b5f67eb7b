"""Define the jobs of JAX processes that save through Orbax's v1 interface.

Each process imports this module. The parent uses only the names.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import CheckpointManagerOptions
from orbax.checkpoint import v1 as ocp

from deltacheck import Profiler
from deltacheck.backends.orbax import DeltaSaveArgs, manager, v1
from deltacheck.errors import RankFailed, SaveFailed, TreeMismatch
from deltacheck.policy import Policy
from deltacheck.save.job.save_job import SaveJob
from tests.ranks import jax_run
from tests.support.adam_run import AdamRun

POLICIES = ("derive", "auto", "bounded", "exact")
FIRST, EVERY = 100, 10


def policies() -> dict[str, Policy]:
    """Return a policy of each kind for ``AdamRun``."""
    run, profiler = AdamRun(), Profiler(interval_steps=EVERY)
    for _ in range(25):
        run.advance(EVERY)
        profiler.observe(run.step, run.state())
    return {
        "derive": Policy.exact(derive=True),
        "auto": Policy.auto(derive=False),
        "bounded": Policy.auto(profiler.profile(), weights="bounded"),
        "exact": Policy.exact(),
    }


def train(rank: int, size: int, port: int, root: str, saves: int, killed: bool) -> list[int]:
    """Save a run under each policy, in a folder of its name, and return the resumed steps.

    With ``killed``, the process kills itself behind the beginning of the last save of all.
    """
    jax_run.start(rank, size, port)
    mesh, resumed = jax_run.mesh(2 * size), []

    def placed(values: Any) -> Any:
        if isinstance(values, dict):
            return {key: placed(item) for key, item in values.items()}
        is_matrix = isinstance(values, np.ndarray) and values.ndim > 1
        return jax_run.put(values, mesh, "x") if is_matrix else values

    for name, policy in policies().items():
        path, run = Path(root, name), AdamRun()
        with v1.context(path, policy=policy), ocp.training.Checkpointer(path) as checkpointer:
            newest = checkpointer.latest.step if checkpointer.latest else 0
            run.advance(newest or FIRST)
            if newest:
                loaded = checkpointer.load(newest, jax.tree.map(_abstract, placed(run.state())))
                if name == "exact":
                    _require_equal(loaded, run.state())
            resumed.append(newest)
            for number in range(saves):
                run.advance(EVERY)
                response = checkpointer.save_async(
                    run.step, placed(run.state()), metrics={"loss": 1.0 / run.step}
                )
                if killed and name == POLICIES[-1] and number == saves - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                assert response.result()
    return resumed


def _abstract(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _require_equal(loaded: Any, state: Any) -> None:
    """Fail if a shard that lies in this process differs from the live state."""
    for array, values in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        if not isinstance(array, jax.Array):
            assert np.array_equal(array, values)
            continue
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


def fail_in_one(rank: int, size: int, port: int, root: str) -> dict[str, str]:
    """Fail in process 1 only, and return the message of each failure."""
    jax_run.start(rank, size, port)
    mesh, messages = jax_run.mesh(2 * size), {}
    # Orbax's default policy takes a save that was refused for one under way, and skips the next.
    policy = ocp.training.save_decision_policies.FixedIntervalPolicy(1)
    with (
        v1.context(root) as context,
        ocp.training.Checkpointer(root, save_decision_policy=policy) as checkpointer,
    ):
        assert checkpointer.save(0, jax_run.made(0, mesh, jax_run.ROWS))
        error = OSError("no space left")
        with contextlib.ExitStack() as stack:
            if rank == 1:
                stack.enter_context(mock.patch.object(SaveJob, "finish_segment", side_effect=error))
            with pytest.raises(Exception) as info:  # noqa: PT011 - the parent compares the message
                checkpointer.save(1, jax_run.made(1, mesh, jax_run.ROWS))
        messages["disk"] = f"{info.value}"
        # Orbax raises the failure of a save in each thread that waits for it: ``save`` has one.
        with pytest.raises(SaveFailed if rank else RankFailed, match="no space left"):
            checkpointer.wait()
        state = {**jax_run.made(2, mesh, jax_run.ROWS), "host": np.arange(5) + rank}
        with pytest.raises(Exception) as info:  # noqa: PT011
            checkpointer.save(2, state)
        messages["array"] = f"{info.value}"
        assert checkpointer.save(3, jax_run.made(3, mesh, jax_run.ROWS))
        jax_run.check(checkpointer.load(3), 3)
        grid = NamedSharding(jax_run.mesh(2, size), P("y", "x"))
        target = {"arrays": {"rows": jax.ShapeDtypeStruct((4096, 64), np.float32, sharding=grid)}}
        part = ocp.Context(context)
        part.pytree.loading.partial_load = True
        with part:
            assert checkpointer.load(3, target)["arrays"]["rows"].sharding == grid
        narrow = jax_run.narrow(mesh, jax_run.ROWS)
        with pytest.raises(TreeMismatch, match="cast=True"):
            checkpointer.load(3, narrow)
    with v1.context(root, cast=True), ocp.training.Checkpointer(root) as checkpointer:
        loaded = checkpointer.load(3, narrow)
        jax_run.check_narrow(loaded, 3)
        assert checkpointer.save(4, loaded)  # continues from a step of other dtypes
        jax_run.check_narrow(checkpointer.load(4), 3)
    base = ocp.Context()
    base.multiprocessing.primary_host = 1
    with (
        pytest.raises(ValueError, match=r"multiprocessing.*process 0 commits"),
        v1.context(root, base),
    ):
        pass
    return messages


def train_until_preempted(rank: int, size: int, port: int, root: str) -> int:
    """Send SIGTERM to process 1, and return the step at which all processes have saved."""
    jax_run.start(rank, size, port)
    mesh, policies = jax_run.mesh(2 * size), ocp.training.save_decision_policies
    options = CheckpointManagerOptions(save_interval_steps=1_000_000)
    with (
        v1.context(f"{root}/v1"),
        ocp.training.Checkpointer(
            f"{root}/v1", save_decision_policy=policies.PreemptionCheckpointingPolicy()
        ) as checkpointer,
        manager(f"{root}/v0", options) as checkpoints,
    ):
        for step in itertools.count():
            state = {"w": jax_run.put(np.full((8, 8), step, np.float32), mesh, "x"), "step": step}
            is_first = checkpoints.save(step, args=DeltaSaveArgs(state)) and step == 0
            assert is_first == (step == 0)
            assert checkpointer.save(step, state) == checkpoints.reached_preemption(step)
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.reached_preemption(step):
                return step
            time.sleep(0.01)  # a step of the training
    raise AssertionError
