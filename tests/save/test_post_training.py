"""From the offline phase to the online one: what a profile finds is what a policy then leaves
out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import deltacheck
from deltacheck import Policy, Profile, Profiler
from deltacheck.backends.numpy_leaves import describe_numpy, numpy_bytes
from deltacheck.backends.torch import Engine
from deltacheck.evaluate.comparison import contract, snapshot
from deltacheck.leaf.contracts import Bounded, Reused
from deltacheck.leaf.tree import flatten
from deltacheck.policy.stage import STABLE, stable_start
from deltacheck.store.files.arrays import bytes_on_disk
from tests.support.adam_run import AdamRun


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Of a run of 250 steps, written and read again."""
    run, profiler = AdamRun(), Profiler(interval_steps=10)
    for _ in range(25):
        run.advance(10)
        profiler.observe(run.step, run.state())
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profiler.write(path)
    return Profile.read(path)


def test_the_stable_set_is_bounded_and_reused_from_its_stable_start_on(
    profile: Profile, tmp_path: Path
) -> None:
    assert profile.stable_start is not None
    run = AdamRun(seed=1)
    stages = {}
    with Engine(tmp_path, policy=Policy.auto(profile)) as engine:
        for _ in range(20):
            run.advance(10)
            engine.save(run.step, run.state()).result()
            stages[run.step] = deltacheck.open(tmp_path).manifest().stage
    stable = [step for step, stage in stages.items() if stage == STABLE]
    assert stable
    assert min(stable) >= profile.stable_start
    contracts = deltacheck.open(tmp_path).manifest().contracts
    kinds = {path: type(promise.terms) for path, promise in contracts.items()}
    for number in (0, 1):
        assert kinds[f"optimizer/state/{number}/master"] is Bounded
        assert kinds[f"optimizer/state/{number}/exp_avg_sq"] is Reused
    assert not any(path.startswith("model/") for path in contracts)
    np.testing.assert_equal(deltacheck.open(tmp_path).restore()["model"], run.state()["model"])


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.9, 0.98), (0.9, 0.95)])
def test_a_profile_names_the_save_at_which_the_policy_begins_to_reuse(
    betas: tuple[float, float], tmp_path: Path
) -> None:
    run, profiler = AdamRun(betas=betas), Profiler(interval_steps=10)
    stages, reused = {}, []
    with Engine(tmp_path, policy=Policy.auto()) as engine:
        for _ in range(25):
            run.advance(10)
            profiler.observe(run.step, run.state())
            engine.save(run.step, run.state()).result()
            manifest = deltacheck.open(tmp_path).manifest()
            stages[run.step] = manifest.stage
            if any(isinstance(p.terms, Reused) for p in manifest.contracts.values()):
                reused.append(run.step)
    start = stable_start(stages.items())
    assert start == (reused[0] if reused else None)
    assert (start is None) == (betas[1] < 0.99)
    # Both sample other elements, so that the median may cross the limit one save apart.
    found = profiler.profile().stable_start
    assert found == (None if start is None else pytest.approx(start, abs=10))


def test_bounded_weights_are_not_stored_and_stay_close(profile: Profile, tmp_path: Path) -> None:
    run = AdamRun(seed=1)
    with Engine(tmp_path, policy=Policy.auto(profile, weights="bounded")) as engine:
        for _ in range(20):
            run.advance(10)
            engine.save(run.step, run.state()).result()
    manifest = deltacheck.open(tmp_path).manifest()
    assert "model/w0" not in manifest.leaves
    assert manifest.contracts["model/w0"].terms == Bounded(0.02, "l2")
    found, live = deltacheck.open(tmp_path).restore()["model"]["w0"], run.state()["model"]["w0"]
    error = np.linalg.norm(found.astype(float) - live.astype(float)) / np.linalg.norm(
        live.astype(float)
    )
    assert 0 < error == pytest.approx(manifest.contracts["model/w0"].measured)


def test_a_profile_without_a_stable_start_leaves_it_to_the_saves_to_find_it(
    tmp_path: Path,
) -> None:
    run, profiler = AdamRun(), Profiler(interval_steps=10)
    for _ in range(4):
        run.advance(10)
        profiler.observe(run.step, run.state())
    profile = profiler.profile()
    assert profile.stable_start is None
    stages = []
    with Engine(tmp_path, policy=Policy.auto(profile)) as engine:
        for _ in range(16):
            run.advance(10)
            engine.save(run.step, run.state()).result()
            stages.append(deltacheck.open(tmp_path).manifest().stage)
    assert stages[:3] == ["warm"] * 3
    assert stages[-1] == STABLE


def dense(seed: int) -> AdamRun:
    return AdamRun(seed=seed)


def embedding(seed: int) -> AdamRun:
    """Rows of an embedding that no batch has reached yet, and one more in every save."""
    run = AdamRun((96, 64), 2, seed=seed)
    run.scale[0][10:] = 0
    advance = run.advance

    def reach(steps: int = 1, size: float = 1.0) -> None:
        run.scale[0][10 + run.step // 10] = 1e-3
        advance(steps, size)

    run.advance = reach  # type: ignore[method-assign]
    return run


def adapters(seed: int) -> AdamRun:
    return AdamRun((4, 256), 6, seed=seed)


def small(seed: int) -> AdamRun:
    return AdamRun((16, 16), 6, seed=seed)


def decaying(seed: int) -> AdamRun:
    run = AdamRun(seed=seed)
    advance = run.advance

    def slower(steps: int = 1, size: float = 1.0) -> None:
        run.rate *= 0.9
        advance(steps, size)

    run.advance = slower  # type: ignore[method-assign]
    return run


def short_memory(seed: int) -> AdamRun:
    return AdamRun(seed=seed, betas=(0.9, 0.95))


@pytest.mark.parametrize("make", [dense, embedding, adapters, small, decaying, short_memory])
def test_a_profile_never_makes_saves_larger(make: Callable[[int], AdamRun], tmp_path: Path) -> None:
    """A run is profiled while it is saved without a profile, and then saved with it."""
    profiler, stored = Profiler(interval_steps=10), {}
    policy = Policy.auto(derive=False)
    for name in ("without", "with"):
        run = make(1)
        with Engine(tmp_path / name, policy=policy) as engine:
            reports = []
            for _ in range(25):
                run.advance(10)
                reports.append(engine.save(run.step, run.state()).result())
                if name == "without":
                    profiler.observe(run.step, run.state())
            profile = profiler.profile()
            policy = Policy.auto(profile)
        stored[name] = sum(report.stored_bytes for report in reports)
    # The digits of times in manifests differ.
    assert stored["with"] <= stored["without"] + 16 * len(reports)


# --- float32 weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["float32", "float16"])
def test_float32_weights_are_bounded_only_if_asked_for_by_name(
    profile: Profile, weights: str, tmp_path: Path
) -> None:
    target = "model/w0" if weights == "float32" else "optimizer/state/0/master"
    stored = {}
    for choice in ("exact", "bounded"):
        root, run = tmp_path / choice, AdamRun(seed=1, weights=weights)
        live = {}
        policy = Policy.auto(profile, float32_weights=choice)
        with Engine(root, policy=policy) as engine:
            for number in range(20):
                run.rate *= 0.95 if number > 10 else 1  # a schedule
                run.advance(10)
                live[run.step] = run.state()
                engine.save(run.step, run.state()).result()
                if number == 16:  # a process goes on from what it can restore
                    restored = engine.restore()
                    run.masters = [
                        (
                            restored["model"][f"w{n}"]
                            if weights == "float32"
                            else restored["optimizer"]["state"][n]["master"]
                        ).copy()
                        for n in range(3)
                    ]
        reader = deltacheck.open(root)
        stored[choice] = bytes_on_disk(root)
        bounded_steps = 0
        for step, state in live.items():
            promises = reader.manifest(step).contracts
            if target in promises:
                bounded_steps += 1
                assert promises[target].terms == Bounded(min(32.0, step / 2), "lr")
            restored = reader.restore(step)
            checks = contract.check(
                taken(state),
                taken(restored),
                promises,
                step,
                lambda earlier, live=live: taken(live[earlier]),  # type: ignore[misc]
            )
            assert [check for check in checks if check.problem] == []
            wide = [s["model"]["w0"] for s in (restored, state)]
            if weights == "float16":
                assert np.array_equal(*wide)
                wide = [s["optimizer"]["state"][0]["master"] for s in (restored, state)]
            error = np.abs(wide[0] - wide[1]).max() / state["optimizer"]["param_groups"][0]["lr"]
            assert (error > 0) == (target in promises)
            if target in promises:
                assert error == pytest.approx(promises[target].measured)
        assert (bounded_steps > 5) == (choice == "bounded")
    assert stored["bounded"] < stored["exact"]


def taken(state: object) -> snapshot.Snapshot:
    return snapshot.take(flatten(state, describe_numpy), numpy_bytes)


def test_a_frozen_float32_weight_of_the_same_shape_is_not_bounded(
    profile: Profile, tmp_path: Path
) -> None:
    """The numbers of a torch optimizer do not tell which weights it trains; their changes do."""
    run = AdamRun(seed=1, weights="float32")
    frozen = np.ones((64, 96), np.float32)
    with Engine(tmp_path, policy=Policy.auto(profile, float32_weights="bounded")) as engine:
        for _ in range(20):
            run.advance(10)
            state = run.state()
            state["model"] = {"frozen": frozen, **state["model"]}
            engine.save(run.step, state).result()
    manifest = deltacheck.open(tmp_path).manifest()
    assert manifest.stage == STABLE
    bounded = {path for path in manifest.contracts if path.startswith("model/")}
    assert bounded == {"model/w0", "model/w1"}


@pytest.mark.parametrize("option", ["weights", "float32_weights", "moments"])
def test_options_are_named_in_a_refusal(profile: Profile, option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be one of"):
        Policy.auto(profile, **{option: "some"})  # type: ignore[arg-type]
