"""Test profiles of recorded series of real training, and of small states with known answers."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from deltacheck import Profile, Profiler
from deltacheck.policy.events import Detector, RunObservation
from deltacheck.profile.analyse import History, analyse
from deltacheck.profile.measure import Observed
from deltacheck.profile.record import AdamRule

SERIES = Path(__file__).parents[1] / "series"
CHANGE = 160  # the step of the event of a recorded run, as in make_series.py


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(gzip.decompress((SERIES / f"{name}.json.gz").read_bytes()))
    return result


def history(name: str, kind: str = "sampled") -> History:
    return msgspec.convert(recorded(name)[kind], History)


def profile(name: str, kind: str = "sampled") -> Profile:
    return analyse(history(name, kind))


def second_moments(result: Profile) -> dict[str, Any]:
    return {path: leaf for path, leaf in result.leaves.items() if leaf.role == "second_moment"}


def start_by_drift_alone(result: History, path: str, after: int = 0) -> int:
    """Return the stable start by its definition.

    It is the third observation in a row with a median drift of at most .1.
    """
    good = 0
    for observed in result.observed:
        if observed.step > after and path in observed.leaves:
            good = good + 1 if observed.leaves[path].drift <= 0.1 else 0
            if good == 3:
                return observed.step
    raise AssertionError(f"{path} was never stable")


# --- recorded series ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "slow-warmup", "jump", "shift", "restart"])
def test_the_sample_finds_the_stable_start_of_the_whole_series(name: str) -> None:
    sampled, full = profile(name), profile(name, "full")
    assert full.stable_start is not None
    assert sampled.stable_start == pytest.approx(full.stable_start, rel=0.2)
    assert sampled.confidence == pytest.approx(full.confidence, abs=0.1)


def test_the_stable_start_of_a_plain_run_is_where_its_drift_settles() -> None:
    """The formula gives step 102: .72 * 10 / t = .1 at t = 72, and three more observations."""
    whole, result = history("plain", "full"), profile("plain")
    starts = {
        path: leaf.stable_from
        for path, leaf in second_moments(result).items()
        if leaf.stable_from is not None
    }
    assert len(starts) == 14
    for path, start in starts.items():
        # A save decides before it measures, so it knows the drift up to the save before.
        assert start == pytest.approx(start_by_drift_alone(whole, path) + 10, rel=0.2)
    assert result.stable_start == pytest.approx(102, rel=0.2)
    assert result.confidence > 0.5
    assert result.events == ()
    assert result.optimizer == AdamRule(0.9, 0.999, 1e-8)


def test_no_start_before_the_end_of_the_warmup() -> None:
    assert (
        start_by_drift_alone(history("slow-warmup", "full"), "optimizer/state/11/exp_avg_sq") < 100
    )
    for leaf in second_moments(profile("slow-warmup")).values():
        assert leaf.stable_from is None or leaf.stable_from > 0.9 * 150


@pytest.mark.parametrize(
    ("name", "event"), [("jump", "learning-rate"), ("shift", "loss"), ("restart", "resume")]
)
def test_what_happens_to_a_run_ends_its_stage_and_begins_another(name: str, event: str) -> None:
    result, whole = profile(name), history(name)
    event_step = next(e.step for e in result.events if e.what == event)
    assert CHANGE - 25 < event_step <= CHANGE + 10
    # Until the event it was stable, as in the run to which nothing happened.
    assert result.stable_start == pytest.approx(profile("plain").stable_start, rel=0.25)
    after = msgspec.structs.replace(
        whole, observed=tuple(o for o in whole.observed if o.step > event_step - 10)
    )
    start = analyse(after).stable_start
    assert start is not None
    assert start >= event_step + 25


def test_a_memory_too_short_for_any_reuse_is_never_stable_however_little_v_drifts() -> None:
    """Test law 7: the permitted age follows from beta2, however steady the gradients are."""
    steady = history("plain")
    leaves = {
        path: msgspec.structs.replace(facts, rule=facts.rule and AdamRule(0.9, 0.95))
        for path, facts in steady.leaves.items()
    }
    assert analyse(msgspec.structs.replace(steady, leaves=leaves)).stable_start is None


def test_confidence_grows_with_the_windows_that_confirm_it() -> None:
    whole = history("plain")
    part = msgspec.structs.replace(
        whole, observed=tuple(o for o in whole.observed if o.step <= 121)
    )
    assert 0 < analyse(part).confidence < 0.7 < analyse(whole).confidence < 1


def test_a_short_memory_is_never_stable() -> None:
    result = profile("short-memory")
    assert result.stable_start is None
    assert {leaf.stable_from for leaf in second_moments(result).values()} == {None}


@pytest.mark.parametrize("name", ["plain", "slow-warmup", "jump"])
def test_loss_and_gradients_of_real_training_raise_no_alarm(name: str) -> None:
    detector, result = Detector(), []
    for step, (loss, norm) in enumerate(
        zip(recorded(name)["loss"], recorded(name)["gradient_norm"], strict=True)
    ):
        detector, events = detector.advance(RunObservation(step, loss, norm))
        result += events
    assert result == []


def test_weights_and_first_moments_are_never_stable() -> None:
    """Test laws 1 and 3."""
    result = profile("plain")
    for leaf in result.leaves.values():
        stable = leaf.kind == "stable-changing"
        assert stable == (leaf.stable_from is not None)
        assert not stable or leaf.role == "second_moment"


def test_the_unit_of_a_drift_is_that_of_the_role() -> None:
    leaves = profile("plain").leaves
    leaf = leaves["optimizer/state/11/exp_avg_sq"]
    assert (leaf.drift_unit, leaf.drift.steps) == ("octaves", leaf.density.steps)
    assert leaves["optimizer/state/11/master"].drift_unit == "lr"


def test_weights_of_a_narrow_type_are_the_cast_of_their_masters() -> None:
    matrices = [
        leaf
        for leaf in profile("plain").leaves.values()
        if leaf.role == "weight" and len(leaf.shape) == 2
    ]
    assert {leaf.how for leaf in matrices} == {"cast"}


def test_an_optimizer_that_breaks_adams_law_is_not_trusted() -> None:
    broken = history("plain")
    path = "optimizer/state/11/exp_avg_sq"

    def breaking(observed: Observed) -> Observed:
        leaves = {
            p: msgspec.structs.replace(m, violations=1) if p == path else m
            for p, m in observed.leaves.items()
        }
        return msgspec.structs.replace(observed, leaves=leaves)

    result = analyse(
        msgspec.structs.replace(broken, observed=tuple(map(breaking, broken.observed)))
    )
    assert result.leaves[path].stable_from is None
    assert result.stable_start is not None  # the others


# --- the profiler ---------------------------------------------------------------------------------


class Adam:
    """An Adam on two matrices with random gradients, as NumPy arrays in the form of optax."""

    def __init__(self, rows: int = 40, extra: dict[str, Any] | None = None) -> None:
        self.random = np.random.default_rng(0)
        self.master = {
            "a": self.random.standard_normal((rows, 100)).astype(np.float32),
            "b": np.ones(7, np.float32),
        }
        self.mu, self.nu = ({k: np.zeros_like(v) for k, v in self.master.items()} for _ in range(2))
        self.frozen = self.random.standard_normal((rows, 100)).astype(ml_dtypes.bfloat16)
        self.step, self.extra = 0, extra or {}

    def advance(self) -> None:
        self.step += 1
        for name, master in self.master.items():
            g = self.random.standard_normal(master.shape).astype(np.float32) * np.float32(1e-3)
            self.mu[name] = np.float32(0.9) * self.mu[name] + np.float32(0.1) * g
            self.nu[name] = np.float32(0.999) * self.nu[name] + np.float32(0.001) * g * g
            u = (
                self.mu[name]
                / (1 - 0.9**self.step)
                / (np.sqrt(self.nu[name] / (1 - 0.999**self.step)) + 1e-8)
            )
            self.master[name] = master - np.float32(1e-5) * u.astype(np.float32)

    def state(self) -> dict[str, Any]:
        weights = {name: master.astype(ml_dtypes.bfloat16) for name, master in self.master.items()}
        rates = {"learning_rate": np.float32(1e-5), "b1": np.float32(0.9), "b2": np.float32(0.999)}
        inner = {"count": np.int32(self.step), "mu": self.mu, "nu": self.nu, **self.extra}
        return {
            "params": {**weights, "frozen": self.frozen, "copy": weights["a"].copy()},
            "master": self.master,
            "opt_state": {"hyperparams": rates, "inner": inner},
            "step": self.step,
        }


def run(adam: Adam, steps: int, profiler: Profiler | None = None) -> Profiler:
    profiler = profiler or Profiler()
    for _ in range(steps):
        adam.advance()
        profiler.observe(adam.step, adam.state(), loss=2.0)
    return profiler


def test_a_run_of_numpy_arrays_is_told_apart_into_its_kinds() -> None:
    result = run(Adam(), 121).profile()
    kinds = {path: (leaf.role, leaf.kind) for path, leaf in result.leaves.items()}
    assert kinds["params/frozen"] == ("weight", "frozen")
    assert kinds["params/a"] == ("weight", "derived")
    assert kinds["params/copy"][1] == "derived"
    assert kinds["master/a"] == ("master", "active")
    assert kinds["opt_state/inner/mu/a"] == ("first_moment", "active")
    assert kinds["opt_state/inner/nu/a"] == ("second_moment", "stable-changing")
    assert kinds["opt_state/inner/count"][0] == "count"
    assert {
        (leaf.derived_from, leaf.how) for leaf in result.leaves.values() if leaf.kind == "derived"
    } == {
        ("master/a", "cast"),
        ("master/b", "cast"),  # ones, that such steps do not move
        ("params/a", "same"),
    }
    assert result.leaves["params/frozen"].density.values == (0.0,) * 12
    assert result.interval_steps == 10
    assert result.optimizer == AdamRule(float(np.float32(0.9)), float(np.float32(0.999)), 1e-8)
    assert result.learning_rate.values[0] == pytest.approx(1e-5)
    assert result.loss.values == (2.0,) * 13


def test_a_weight_is_derived_though_it_never_changed_where_the_sample_looked() -> None:
    """At the rates of reinforcement learning, no bf16 weight of a sample may change."""
    adam = Adam()
    middles = adam.random.uniform(0.5, 1.0, (40, 100)).astype(ml_dtypes.bfloat16)
    adam.master["a"] = middles.astype(np.float32)  # 100 steps from the ends of their cells
    result = run(adam, 41, Profiler(interval_steps=1)).profile()
    weight, master = result.leaves["params/a"], result.leaves["master/a"]
    assert max(weight.density.values) == 0 < min(master.density.values)
    assert (weight.kind, weight.derived_from, weight.how) == ("derived", "master/a", "cast")


def test_a_frozen_leaf_is_never_called_stable() -> None:
    leaf = run(Adam(), 121).profile().leaves["params/frozen"]
    assert (leaf.kind, leaf.stable_from, leaf.confidence) == ("frozen", None, 0.0)


def test_an_unknown_optimizer_has_no_stable_start() -> None:
    adam = Adam(
        extra={"momentum": {"a": np.zeros((40, 100), np.float32), "b": np.zeros(7, np.float32)}}
    )
    result = run(adam, 121).profile()
    assert (result.optimizer, result.stable_start, result.confidence) == (None, None, 0.0)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = run(Adam(), 41, Profiler(source="run 7")).write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == written
    assert written.source == "run 7"


def test_between_intervals_the_state_is_not_looked_at() -> None:
    profiler = Profiler(interval_steps=5)
    adam = Adam()
    adam.advance()
    calls = []

    def state() -> Any:
        calls.append(len(calls))
        return adam.state()

    samples = [profiler.observe(step, state) for step in range(1, 12)]
    assert len(calls) == 3
    assert samples == [step % 5 == 1 for step in range(1, 12)]
    with pytest.raises(ValueError, match="interval_steps"):
        Profiler(interval_steps=0)


def test_a_master_that_is_as_wide_as_its_weight_proves_it_too() -> None:
    """In torch's numbered states, a weight may be equal to its master."""
    random = np.random.default_rng(0)
    masters = [random.standard_normal((8, 8)).astype(np.float32) for _ in range(2)]

    def state() -> dict[str, Any]:
        moments = {
            i: {"master": m, "exp_avg": 0 * m, "exp_avg_sq": 0 * m} for i, m in enumerate(masters)
        }
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}]
        weights = {
            "x": masters[1].copy(),
            "y": masters[0].copy(),
        }  # not in the order of the optimizer
        return {"model": weights, "optimizer": {"state": moments, "param_groups": groups}}

    profiler = Profiler(interval_steps=1)
    for step in range(3):
        profiler.observe(step, state())
        for master in masters:
            master += np.float32(1e-3)
    leaves = profiler.profile().leaves
    assert {path: leaf.role for path, leaf in leaves.items() if path.startswith("model")} == {
        "model/x": "weight",
        "model/y": "weight",
    }
    assert {
        (path, leaf.derived_from, leaf.how)
        for path, leaf in leaves.items()
        if leaf.kind == "derived"
    } == {
        ("optimizer/state/1/master", "model/x", "same"),
        ("optimizer/state/0/master", "model/y", "same"),
    }


def test_another_layout_is_an_event_and_begins_anew() -> None:
    adam = Adam()
    profiler = run(adam, 41)
    adam.extra = {"another": np.zeros(3, np.float32)}
    result = run(adam, 21, profiler).profile()
    assert [(event.step, event.what) for event in result.events] == [(51, "optimizer")]
    assert result.leaves["master/a"].density.steps == (11, 21, 31, 41, 61)


def test_a_resume_forgets_the_steps_that_are_done_again() -> None:
    adam = Adam()
    profiler = run(adam, 41)
    adam.step = 25
    result = run(adam, 26, profiler).profile()
    assert [(event.step, event.what) for event in result.events] == [(26, "resume")]
    assert result.leaves["master/a"].density.steps == (11, 21, 36, 46)
    assert result.loss.steps == (1, 11, 21, 26, 36, 46)


def test_a_leaf_of_which_few_elements_change_is_sparse() -> None:
    random = np.random.default_rng(0)
    profiler = Profiler(interval_steps=1)
    table = np.zeros((64, 64), np.uint16)
    for step in range(3):
        table = table.copy()
        table.reshape(-1)[random.choice(4096, 204, replace=False)] += 1
        profiler.observe(step, {"sparse": table, "dense": table + step})
    kinds = {path: leaf.kind for path, leaf in profiler.profile().leaves.items()}
    assert kinds == {"sparse": "sparse", "dense": "active"}


def test_an_embedding_is_a_class_of_its_own() -> None:
    """Its rows change at very different rates; among larger matrices it would get few blocks."""
    profiler = Profiler()
    profiler.observe(
        0, {"embed": np.zeros((100, 64), np.float32), "other": np.zeros((4000, 100), np.float32)}
    )
    assert profiler._plan is not None
    assert {path: len(starts) for path, starts in profiler._plan.starts.items()} == {
        "embed": 64,
        "other": 64,
    }


def test_samples_of_a_wide_state_are_few() -> None:
    adam = Adam(rows=4000)
    profiler = run(adam, 1)
    assert sum(sample.size for sample in profiler._samples.values()) < 64 * 64 * 10
    assert profiler._plan is not None
    starts = profiler._plan.starts
    assert np.array_equal(starts["params/a"], starts["opt_state/inner/nu/a"])
    assert len(starts["params/a"]) == 21  # of 64, as three weights share them


def test_importing_the_profiler_imports_no_framework() -> None:
    code = (
        "import deltacheck, sys; deltacheck.Profiler().observe(0, {}); assert not {'torch', 'jax'}"
        " & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- frameworks -----------------------------------------------------------------------------------


def test_torch_and_numpy_give_the_same_profile() -> None:
    torch = pytest.importorskip("torch")

    def as_tensors(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: as_tensors(value) for key, value in tree.items()}
        if not isinstance(tree, np.ndarray):
            return tree
        if tree.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(tree.view(np.int16).copy()).view(torch.bfloat16)
        result = torch.from_numpy(tree.copy())
        return result.T.contiguous().T if result.ndim == 2 else result  # not in C order

    adam, expected_profiler, profiler = Adam(), Profiler(), Profiler()
    for _ in range(41):
        adam.advance()
        expected_profiler.observe(adam.step, adam.state())
        profiler.observe(adam.step, as_tensors(adam.state()))
    assert profiler.profile() == expected_profiler.profile()


@pytest.mark.parametrize("on_host", [True, False])
def test_jax_and_numpy_give_the_same_profile(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``on_host=False``, arrays are read as on a device, by a gather for each shard."""
    jax = pytest.importorskip("jax")
    from deltacheck.backends.orbax.state import sampling as adapter

    monkeypatch.setattr(adapter, "_on_host", lambda shard: on_host)
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices("cpu")[:4])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))

    def as_jax(value: Any) -> Any:
        return jax.device_put(value, split) if value.ndim == 2 else jax.numpy.asarray(value)

    adam, expected_profiler, profiler = Adam(), Profiler(), Profiler()
    for _ in range(21):
        adam.advance()
        state = adam.state()
        expected_profiler.observe(adam.step, state)
        arrays = {key: state[key] for key in ("params", "master", "opt_state")}
        profiler.observe(adam.step, {**jax.tree.map(as_jax, arrays), "step": adam.step})
    assert profiler.profile() == expected_profiler.profile()


def test_optax_states_are_known_once_their_betas_are_given() -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    params = {"dense": jax.numpy.ones((40, 100))}
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)
    profiler = Profiler(interval_steps=1, optimizer=AdamRule(0.9, 0.999))
    for step in range(3):
        updates, state = optimizer.update({"dense": params["dense"] * 1e-3}, state, params)
        params = optax.apply_updates(params, updates)
        profiler.observe(step, {"params": params, "opt_state": state})
    result = profiler.profile()
    assert result.optimizer == AdamRule(0.9, 0.999)
    roles = {path: leaf.role for path, leaf in result.leaves.items()}
    assert roles["opt_state/0/nu/dense"] == "second_moment"
    assert result.leaves["params/dense"].drift_unit == "relative"
