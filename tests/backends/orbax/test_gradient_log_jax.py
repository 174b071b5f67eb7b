"""The gradient log of JAX: whatever it stores of a step, a restore gives the state as it was, bit
for bit, or says why it cannot.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=4"

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import deltacheck
from deltacheck import Policy, SaveOptions, errors
from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, GradientLog, load, manager
from deltacheck.leaf.spec import LeafKind
from deltacheck.restore.values import load_leaves
from tests.backends.orbax.test_orbax import assert_same_leaves, bits

Options = ocp.CheckpointManagerOptions


class Learner(NamedTuple):
    """The argument of the updates: bfloat16 weights, and the float32 state of AdamW."""

    params: Any
    master: Any
    opt_state: Any


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.01),
    optax.adamw(optax.schedules.warmup_cosine_decay_schedule(1e-4, 1e-2, 3, 20), weight_decay=0.1),
)


def plain_update(learner: Learner, gradients: Any) -> Learner:
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, opt_state = OPTIMIZER.update(gradients, learner.opt_state, learner.master)
    master = optax.apply_updates(learner.master, updates)
    return Learner(jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), master, opt_state)


update = jax.jit(plain_update, donate_argnums=(0, 1))


@jax.jit
def other_update(learner: Learner, gradients: Any) -> Learner:
    """Another kernel: the last bit of one weight is another."""
    result = plain_update(learner, gradients)
    master = result.master | {"b": jnp.nextafter(result.master["b"], jnp.float32(jnp.inf))}
    return result._replace(master=master)


@jax.jit
def gradients_of(params: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        x = jax.random.normal(key, (16, 48), jnp.bfloat16)
        return jnp.square(jnp.tanh(x @ params["a"]) @ params["c"] + params["b"]).mean()

    return jax.grad(loss)(params)


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


class Run:
    """A small training; the updates donate learner and gradients."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(3), 3)
        master = {
            "a": jax.random.normal(keys[0], (48, 300)),
            "b": jnp.zeros(8),
            "c": jax.random.normal(keys[1], (300, 8)),
        }
        params = jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)
        learner = Learner(params, master, OPTIMIZER.init(master))
        self.state: dict[str, Any] = {
            "learner": learner,
            "key": keys[2],
            "seen": np.zeros(5),
            "step": 0,
        }
        self.saved: dict[int, Any] = {}

    def train_step(self, log: GradientLog) -> None:
        state = self.state
        key, used = jax.random.split(state["key"])
        learner = log.update(state["learner"], gradients_of(state["learner"].params, used))
        self.state = {
            "learner": learner,
            "key": key,
            "seen": state["seen"] + 1,
            "step": state["step"] + 1,
        }

    def save(self, log: GradientLog) -> Any:
        self.saved[self.state["step"]] = copied(self.state)
        return log.save(self.state["step"], self.state)

    def train_and_save(self, log: GradientLog, steps: int) -> list[Any]:
        """The reports of ``steps`` saves, one after each training step."""
        reports = []
        for _ in range(steps):
            self.train_step(log)
            reports.append(self.save(log).result(240))
        return reports


def learner_of(state: dict[str, Any]) -> Any:
    return state["learner"]


class Opened:
    """A manager and a log on it, as a process has them."""

    def __init__(
        self, root: Path, update: Callable[..., Any] = update, options: Any = None, **limits: int
    ) -> None:
        self.manager = manager(root, options or Options(max_to_keep=None))
        self.log = GradientLog(self.manager, update, learner_of, **limits)

    def __enter__(self) -> GradientLog:
        return self.log

    def __exit__(self, *error: object) -> None:
        self.log.close()
        self.manager.close()


@pytest.fixture
def run() -> Run:
    return Run()


def assert_all_restored(run: Run, root: Path, steps: Any = None) -> None:
    with Opened(root) as log:
        for step in steps or run.saved:
            assert_same_leaves(run.saved[step], log.restore(step, Run().state))


# --- what is stored and comes back ----------------------------------------------------------------


def test_every_logged_step_is_restored_bit_for_bit_by_the_same_manager_and_by_a_new_one(
    run: Run, tmp_path: Path
) -> None:
    with Opened(tmp_path) as log:
        assert run.save(log).result(240).replayed_steps == 0  # before the first update
        assert [report.replayed_steps for report in run.train_and_save(log, 5)] == [1, 2, 3, 4, 5]
        log._manager.wait_until_finished()
        assert_same_leaves(run.saved[4], log.restore(4, run.state))
        shapes = run.state | {"learner": jax.eval_shape(lambda: Run().state["learner"])}
        assert_same_leaves(run.saved[5], log.restore(target=shapes))
    assert_all_restored(run, tmp_path, (5, 1, 3, 0, 2, 4))
    assert deltacheck.open(tmp_path).verify(deep=True) == []


RESUMED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.backends.orbax.test_gradient_log_jax import Opened, Run, hexed
with Opened(Path(sys.argv[1])) as log:
    print(hexed(log.restore(target=Run().state)))
"""


def hexed(state: Any) -> str:
    return " ".join(
        bits(leaf).hex() if hasattr(leaf, "dtype") else repr(leaf)
        for leaf in jax.tree.leaves(state)
    )


def test_another_process_replays_the_same_bits(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 3)
    arguments = [sys.executable, "-c", RESUMED, str(tmp_path), str(Path(__file__).parents[3])]
    done = subprocess.run(arguments, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == hexed(run.saved[3])


def test_a_logged_step_stores_gradients_and_nothing_of_the_learner(
    run: Run, tmp_path: Path
) -> None:
    with Opened(tmp_path) as log:
        report = run.train_and_save(log, 3)[-1]
    kinds = {leaf.path: leaf.kind for leaf in report.leaves}
    assert {path for path, kind in kinds.items() if kind is not LeafKind.UNCHANGED} == {
        *(f"%gradient/1/0/{name}" for name in "abc"), "key", "seen",
    }  # fmt: skip
    assert any(path.startswith("learner/opt_state/") for path in kinds)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path / "whole") as log:
        run.train_and_save(log, 7)
    first, resumed = Run(), Run()
    with Opened(tmp_path / "parts") as log:
        first.train_and_save(log, 3)
    with Opened(tmp_path / "parts") as log:
        resumed.state = log.restore(target=resumed.state)
        reports = resumed.train_and_save(log, 4)
    assert_same_leaves(run.state, resumed.state)
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 3]
    assert "no checkpoint of this log yet" in reports[0].note
    run.saved = first.saved | resumed.saved
    assert_all_restored(run, tmp_path / "parts")


def test_several_updates_between_two_saves_are_all_replayed(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path, max_steps_per_save=2) as log:
        for steps, replayed in ((1, 0), (2, 2), (1, 3), (3, 0), (1, 1)):
            for _ in range(steps):
                run.train_step(log)
            report = run.save(log).result(240)
            assert report.replayed_steps == replayed
            assert ("max_steps_per_save=2" in report.note) == (steps == 3)
    assert_all_restored(run, tmp_path)


def test_the_state_itself_is_stored_often_enough(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path, max_replay_steps=2) as log:
        reports = run.train_and_save(log, 5)
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 0, 1]
    assert "max_replay_steps=2" in reports[3].note
    assert_all_restored(run, tmp_path)


def test_a_train_state_that_is_all_the_state_needs_no_accessor(tmp_path: Path) -> None:
    @jax.jit
    def step_of(state: TrainState, gradients: Any) -> TrainState:
        return state.apply_gradients(grads=gradients)

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=print, params={"w": jnp.ones((30, 40))}, tx=OPTIMIZER)

    state, saved, reports = fresh(), {}, []
    with manager(tmp_path) as mngr, GradientLog(mngr, step_of) as log:
        for number in range(1, 5):
            state = log.update(state, {"w": jnp.full((30, 40), number, jnp.float32)})
            reports.append(log.save(number, state).result(240))
            saved[number] = state
    assert [report.replayed_steps for report in reports] == [0, 1, 2, 3]
    with manager(tmp_path) as mngr, GradientLog(mngr, step_of) as log:
        found = log.restore(4, fresh())
    assert found.step == 4
    assert_same_leaves((saved[4].params, saved[4].opt_state), (found.params, found.opt_state))


def test_whatever_else_an_update_takes_is_stored_too(tmp_path: Path) -> None:
    @jax.jit
    def noisy(learner: Any, gradients: Any, key: Any, rate: float) -> Any:
        noise = jax.random.normal(key, learner["w"].shape)
        return {"w": learner["w"] - rate * (gradients[0] + noise)}

    state = {"w": jnp.ones((20, 30))}
    with manager(tmp_path) as mngr, GradientLog(mngr, noisy) as log:
        for number in range(1, 4):
            state = log.update(
                state,
                [np.full((20, 30), number, np.float32), None],
                jax.random.key(number),
                0.1 * number,
            )
            report = log.save(number, state).result(240)
        assert report.replayed_steps == 2
    with manager(tmp_path) as mngr, GradientLog(mngr, noisy) as log:
        assert_same_leaves(state, log.restore(3, {"w": jnp.zeros((20, 30))}))


def test_shardings_of_the_target_are_those_of_the_replay(tmp_path: Path) -> None:
    where = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))

    @jax.jit
    def step_of(learner: Any, gradients: Any) -> Any:
        return {"w": learner["w"] - gradients["w"] / jnp.linalg.norm(gradients["w"])}

    state = {"w": jax.device_put(jnp.ones((40, 30)), where)}
    with manager(tmp_path) as mngr, GradientLog(mngr, step_of) as log:
        for number in range(1, 4):
            state = log.update(
                state, jax.device_put({"w": jnp.arange(1200.0).reshape(40, 30) + number}, where)
            )
            report = log.save(number, state).result(240)
        assert report.replayed_steps == 2
        mngr.wait_until_finished()
        found = log.restore(3, state)
    assert found["w"].sharding == where
    assert_same_leaves(state, found)


def test_a_replay_runs_under_the_mesh_of_the_training(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), "x", axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    def step_of(learner: Any, gradients: Any) -> Any:
        return learner - jax.lax.with_sharding_constraint(
            gradients, PartitionSpec("x")
        )  # which mesh: the one around the call

    state = jnp.ones((40, 30))
    with jax.set_mesh(mesh), manager(tmp_path) as mngr, GradientLog(mngr, step_of) as log:
        for number in range(1, 4):
            state = log.update(state, jnp.arange(1200.0).reshape(40, 30) + number)
            report = log.save(number, state).result(240)
        assert report.replayed_steps == 2
        mngr.wait_until_finished()
        assert bits(log.restore(3, state)) == bits(state)


# --- what cannot be replayed ----------------------------------------------------------------------


def test_a_weight_that_somebody_else_wrote_to_between_updates_is_stored_itself(
    run: Run, tmp_path: Path
) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 2)
        learner = run.state["learner"]
        run.state["learner"] = learner._replace(
            master=learner.master | {"b": learner.master["b"] + 0.5}
        )
        report = run.train_and_save(log, 1)[0]
        assert report.replayed_steps == 0
        assert "'learner/master/b'" in report.note
        run.train_step(log)
        learner = run.state["learner"]  # and after the last one
        run.state["learner"] = learner._replace(
            params=learner.params | {"b": learner.params["b"] + 0.5}
        )
        report = run.save(log).result(240)
        assert "'learner/params/b'" in report.note
        assert [report.replayed_steps for report in run.train_and_save(log, 2)] == [1, 2]
    assert_all_restored(run, tmp_path)


def test_a_log_gives_up_after_three_saves_that_it_could_not_replay(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))

    def restless(learner: Learner, gradients: Any) -> Learner:
        return update(learner, jax.tree.map(lambda g: g * next(calls), gradients))

    with Opened(tmp_path, restless) as log:
        reports = run.train_and_save(log, 6)
    assert not any(report.replayed_steps for report in reports)
    assert "the last 3 replays" in reports[-1].note
    assert len([record for record in caplog.records if "gives up" in record.message]) == 1
    assert_all_restored(run, tmp_path, (6,))


class Odd(NamedTuple):
    a: Any
    b: Any
    c: Any


def test_gradients_in_containers_that_a_restore_could_not_build_are_not_logged(
    run: Run, tmp_path: Path
) -> None:
    def from_odd(learner: Learner, gradients: Odd) -> Learner:
        return update(learner, gradients._asdict() if isinstance(gradients, Odd) else gradients)

    with Opened(tmp_path, from_odd) as log:
        run.train_and_save(log, 1)
        run.state["learner"] = log.update(
            run.state["learner"], Odd(**gradients_of(run.state["learner"].params, run.state["key"]))
        )
        report = log.save(2, run.state).result(240)
        assert report.replayed_steps == 0
        assert "Odd again; give the update dicts, lists and tuples" in report.note
        log._manager.wait_until_finished()
        assert_same_leaves(run.state, log.restore(2, run.state))


def test_arrays_of_the_learner_that_are_not_in_the_state_are_never_logged(
    run: Run, tmp_path: Path
) -> None:
    with (
        manager(tmp_path) as mngr,
        GradientLog(mngr, update, lambda state: copied(state["learner"])) as log,
    ):
        assert [report.replayed_steps for report in run.train_and_save(log, 3)] == [0, 0, 0]


def test_a_learner_that_the_state_does_not_have_is_refused_before_the_save_begins(
    run: Run, tmp_path: Path
) -> None:
    with manager(tmp_path) as mngr, GradientLog(mngr, update, lambda state: state["model"]) as log:
        with pytest.raises(KeyError, match="model"):
            log.save(1, run.state)
        assert mngr.all_steps() == []


def test_a_log_takes_no_base_from_another_root(run: Run, tmp_path: Path) -> None:
    with (
        manager(tmp_path / "one") as one,
        manager(tmp_path / "two") as two,
        GradientLog(one, update, learner_of) as log,
    ):
        run.train_step(log)
        log.save(1, run.state).result(240)
        two.save(1, args=DeltaSaveArgs(Run().state))
        run.train_step(log)
        two.save(2, args=DeltaSaveArgs(run.state, log=log))
        two.wait_until_finished()
        assert_same_leaves(run.state, load(tmp_path / "two", 2, run.state))


def test_an_update_that_raises_is_not_recorded(run: Run, tmp_path: Path) -> None:
    def picky(learner: Learner, gradients: Any) -> Learner:
        if gradients is None:
            raise ValueError("no gradients")
        return update(learner, gradients)

    with Opened(tmp_path, picky) as log:
        run.train_and_save(log, 1)
        with pytest.raises(ValueError, match="no gradients"):
            log.update(run.state["learner"], None)
        assert [report.replayed_steps for report in run.train_and_save(log, 2)] == [1, 2]


def test_a_log_inside_of_jit_is_refused(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path) as log, pytest.raises(TypeError, match="jit the update"):
        jax.jit(log.update)(run.state["learner"], run.state["learner"].params)


def test_another_manager_or_policy_is_refused(tmp_path: Path) -> None:
    with (
        ocp.CheckpointManager(tmp_path / "plain") as mngr,
        pytest.raises(ValueError, match=r"not made by deltacheck"),
    ):
        GradientLog(mngr, update)
    with manager(tmp_path / "derived", policy=Policy.exact(derive=True)) as mngr:  # noqa: SIM117
        with pytest.raises(ValueError, match="the state itself"):
            GradientLog(mngr, update)


def test_a_failed_save_is_followed_by_one_that_stores_the_state_itself(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltacheck.backends.orbax.manager_root.commit_gate import Gate

    def fail(*arguments: object) -> int:
        raise OSError("no space left")

    with Opened(tmp_path) as log:
        run.train_and_save(log, 2)
        run.train_step(log)
        with monkeypatch.context() as patched:
            patched.setattr(Gate, "commit", fail)
            assert isinstance(log.save(3, run.state).exception(240), errors.SaveFailed)
            with pytest.raises(errors.SaveFailed):
                log._manager.wait_until_finished()
        assert [report.replayed_steps for report in run.train_and_save(log, 2)] == [0, 1]
    assert_all_restored(run, tmp_path)


def test_updates_of_a_step_that_orbax_leaves_out_are_in_the_next(run: Run, tmp_path: Path) -> None:
    options = Options(save_interval_steps=2, enable_async_checkpointing=False)
    with Opened(tmp_path, options=options) as log:
        run.train_step(log)
        handles = []
        for _ in range(4):
            run.train_step(log)
            handles.append(run.save(log))
        assert [handle.state == "skipped" for handle in handles] == [False, True, False, True]
        assert handles[2].result(240).replayed_steps == 2
    assert_all_restored(run, tmp_path, (2, 4))


def test_a_log_of_one_item_of_several_stores_that_item(run: Run, tmp_path: Path) -> None:
    with (
        manager(tmp_path, items=("state", "data")) as mngr,
        GradientLog(mngr, update, learner_of) as log,
    ):
        for step in (1, 2, 3):
            run.train_step(log)
            args = ocp.args.Composite(
                state=DeltaSaveArgs(run.state, log=log), data=DeltaSaveArgs({"cursor": step})
            )
            mngr.save(step, args=args)
        mngr.wait_until_finished()
        asked = ocp.args.Composite(
            state=DeltaRestoreArgs(Run().state, log=log), data=DeltaRestoreArgs()
        )
        found = mngr.restore(3, args=asked)
    assert found["data"] == {"cursor": 3}
    assert_same_leaves(run.state, found["state"])
    replay = deltacheck.open(tmp_path, item="state").manifest(3).replay
    assert replay is not None
    assert len(replay.steps) == 2


# --- refusals and retention -----------------------------------------------------------------------


def test_a_gradient_that_was_forged_with_its_digests_is_refused_by_the_state(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 3)

    def forged(*arguments: Any, **options: Any) -> Any:
        loaded = load_leaves(*arguments, **options)
        loaded["%gradient/1/0/a"].data[101] ^= 0x40
        return loaded

    monkeypatch.setattr("deltacheck.restore.fill.load_leaves", forged)
    with (
        Opened(tmp_path) as log,
        pytest.raises(errors.ReplayDiffers, match=r"leaf 'learner/.*without a replay: 1"),
    ):
        log.restore(3, run.state)


def test_another_update_is_refused_naming_leaf_both_digests_and_the_way_out(
    run: Run, tmp_path: Path
) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 3)
    promised = deltacheck.open(tmp_path).manifest(3).digest_of("learner/master/b")
    with Opened(tmp_path, other_update) as log:
        with pytest.raises(errors.ReplayDiffers) as refused:
            log.restore(3, run.state)
        assert_same_leaves(
            run.saved[1], log.restore(1, run.state)
        )  # the way out that the error names
    text = str(refused.value)
    assert "step 3, leaf 'learner/master/b': replaying 2 updates" in text
    assert promised in text
    assert "other_update" in text
    assert "plain_update" in text
    assert "Newest earlier step that restores without a replay: 1" in text


def test_a_target_of_another_structure_or_shape_is_refused(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 2)
        log._manager.wait_until_finished()
        learner = run.state["learner"]
        with pytest.raises(
            errors.TreeMismatch, match=r"'master/a' is not in what the update works on"
        ):
            log.restore(2, run.state | {"learner": learner._replace(master={})})
        with pytest.raises(
            errors.TreeMismatch, match=r"'master/b' .* float32\[9\], float32\[8\] was logged"
        ):
            log.restore(
                2,
                run.state
                | {"learner": learner._replace(master=learner.master | {"b": jnp.zeros(9)})},
            )
        with pytest.raises(errors.TreeMismatch, match="'more'"):
            log.restore(2, run.state | {"more": 1})


def test_without_the_log_a_logged_step_is_refused_naming_a_step_that_needs_none(
    run: Run, tmp_path: Path
) -> None:
    with Opened(tmp_path) as log:
        run.train_and_save(log, 3)
        log._manager.wait_until_finished()
        refused: tuple[Callable[[], Any], ...] = (
            deltacheck.open(tmp_path).restore,
            lambda: load(tmp_path, target=run.state),
            lambda: log._manager.restore(3, args=DeltaRestoreArgs(run.state)),
            partial(log.restore, 3),
        )
        for call in refused:
            with pytest.raises(
                errors.ReplayNeeded,
                match=r"step 3 .* Newest earlier step that restores without a replay: 1",
            ):
                call()
        found = load(tmp_path, leaves=["key", "%gradient/1/0/a"])
    assert bits(found["key"]) == bits(run.saved[3]["key"])
    assert found["%gradient/1/0/a"].shape == (48, 300)


def test_a_logged_step_outlives_the_checkpoint_that_it_is_replayed_from(
    run: Run, tmp_path: Path
) -> None:
    made = manager(tmp_path, Options(max_to_keep=1), save_options=SaveOptions(grace_seconds=0))
    with made as mngr, GradientLog(mngr, update, learner_of, max_replay_steps=3) as log:
        for _ in range(7):
            run.train_and_save(log, 1)
            mngr.wait_until_finished()
            assert mngr.all_steps() == [run.state["step"]]
            assert deltacheck.open(tmp_path).verify(deep=True) == []
    assert_all_restored(run, tmp_path, (7,))


def test_saves_that_nobody_waits_for_are_all_restored(run: Run, tmp_path: Path) -> None:
    with Opened(tmp_path, max_replay_steps=3) as log:
        handles = []
        for _ in range(6):
            run.train_step(log)
            handles.append(run.save(log))
        assert [handle.result(240).replayed_steps for handle in handles] == [0, 1, 2, 3, 0, 1]
    assert_all_restored(run, tmp_path)
