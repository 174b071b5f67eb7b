"""The shared runs: the same recipe gives the same run, and a loaded state continues exactly."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("optax")

ROOT = Path(__file__).parents[2]

from benchmarks.prepared import mature
from benchmarks.workloads import jax_workloads, tasks, torch_workloads
from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.recipe import TASKS, Recipe, recipe, small, tiny

FRAMEWORKS = {"torch": torch_workloads, "jax": jax_workloads}
ALL = [(framework, task) for framework in FRAMEWORKS for task in TASKS]


@pytest.fixture(autouse=True)
def settings_restored() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def started(framework: str, task: str, pretrain: bool = True, **changes: Any) -> Any:
    module = FRAMEWORKS[framework]
    chosen = tiny(task, pretrain_steps=2, **changes)
    return module.Workload(chosen, module.pretrained(chosen) if pretrain else None)


def leaves(run: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Copy every array of the state."""
    if isinstance(run, torch_workloads.Workload):
        states = importlib.import_module("benchmarks.states")
        return {
            path: leaf.detach().float().numpy().copy()
            for path, leaf in states.leaves_of(run.state()).items()
        }
    import jax

    pairs = jax.tree_util.tree_leaves_with_path(
        {**run.state(), "key": jax.random.key_data(run.key)}
    )
    return {jax.tree_util.keystr(path): np.asarray(leaf).astype(np.float32) for path, leaf in pairs}


@pytest.mark.parametrize(("framework", "task"), ALL)
def test_a_loaded_state_goes_on_exactly_as_the_run_did(framework: str, task: str) -> None:
    run = started(framework, task, pretrain=False)
    for _ in range(2):
        run.train_step()
    state = copy.deepcopy(run.state())
    expected = [run.train_step() for _ in range(3)], run.evaluate()
    fresh = FRAMEWORKS[framework].Workload(run.recipe)
    fresh.load(state)
    assert ([fresh.train_step() for _ in range(3)], fresh.evaluate()) == expected
    assert fresh.step == run.step == 5
    assert all(np.array_equal(leaf, leaves(fresh)[path]) for path, leaf in leaves(run).items())


@pytest.mark.parametrize(("framework", "task"), [("torch", "rl"), ("jax", "sft")])
def test_the_same_recipe_gives_the_same_run(framework: str, task: str) -> None:
    def losses() -> list[float]:
        run = started(framework, task)
        return [run.train_step() for _ in range(2)] + [run.evaluate()]

    assert losses() == losses()
    assert (
        started(framework, task, pretrain=False).evaluate() != losses()[-1]
    )  # pre-training has done something


def test_another_seed_gives_another_run_and_another_order_other_batches_only() -> None:
    first, second = started("torch", "sft"), started("torch", "sft", seed=2)
    assert first.train_step() != second.train_step()
    expected, loss = next(copy.deepcopy(first.batches)).tokens, first.evaluate()
    first.reorder(9)
    assert first.evaluate() == loss
    assert not np.array_equal(next(first.batches).tokens, expected)


@pytest.mark.parametrize(("framework", "task"), ALL)
def test_a_trained_parameter_takes_14_bytes_and_a_frozen_one_never_moves(
    framework: str, task: str
) -> None:
    run = started(framework, task, pretrain=False)
    before = leaves(run)
    run.train_step()
    run.train_step()
    now = leaves(run)
    moved = {path for path in before if not np.array_equal(before[path], now[path])}
    if framework == "torch":
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        state = run.optimizer.state
        sizes = [
            p.nbytes + sum(leaf.nbytes for leaf in state[p].values())
            for p in run.model.parameters()
            if p.requires_grad
        ]
        base = {
            path
            for path in before
            if path.startswith("model/") and task == "lora" and "qkv.up" not in path
        }
        base -= {path for path in base if "qkv.down" in path}
    else:
        import jax

        adam = next(
            s
            for s in jax.tree.leaves(run.training["optimizer"], is_leaf=lambda s: hasattr(s, "mu"))
            if hasattr(s, "mu")
        )
        trained = sum(leaf.size for leaf in jax.tree.leaves(run.training["params"]))
        parts = (run.training["params"], run.training["master"], adam.mu, adam.nu)
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(parts)]
        base = {path for path in before if path.startswith("['base']")}
    assert sum(sizes) == 14 * trained
    assert bool(base) == (task == "lora")
    assert not moved & base
    assert len(moved) > 3


def test_rewards_count_right_digits_and_advantages_compare_within_a_prompt() -> None:
    right = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    rewards = tasks.reward(np.array([[1, 2, 3], [0, 2, 3], [0, 0, 0], [9, 9, 9]]), right)
    assert rewards.tolist() == pytest.approx([1, 2 / 3, 0, 0])
    advantages = tasks.advantages(rewards, group=2)
    assert advantages[0] > 0 > advantages[1]
    assert advantages[2] == advantages[3] == 0
    assert advantages[:2].sum() == pytest.approx(0, abs=1e-6)


def test_the_answers_of_sums_are_right_in_training_and_held_out_of_it() -> None:
    chosen = tiny("rl")
    held_out = tasks.evaluation_rows(chosen)
    prompts, right = tasks.prompts_of(held_out)
    for prompt, answer in zip(prompts, right, strict=True):
        left, _, other = bytes(prompt[1:-2].tolist()).decode().partition("+")
        assert int(left) + int(other) == int(bytes(answer.tolist()))
    batches = tasks.training_batches(chosen)
    trained = {tuple(row) for _ in range(200) for row in next(batches).tokens.tolist()}
    assert trained.isdisjoint(map(tuple, held_out.tokens.tolist()))


def test_learning_on_sums_earns_more() -> None:
    """The gradient of the policy points the right way, at a rate that shows it in a few steps."""
    run = started("torch", "rl", rate=3e-3, batch=16, group=8)
    before = sum(run.train_step() for _ in range(5))
    for _ in range(30):
        run.train_step()
    assert sum(run.train_step() for _ in range(5)) < before - 0.3


def test_recipes_differ_in_size_only() -> None:
    for task in TASKS:
        for create in (recipe, small, tiny):
            assert create(task).rate == recipe(task).rate
            assert create(task).betas == (0.9, 0.999)
    assert isinstance(recipe("sft", seed=3), Recipe)


def test_a_matured_optimizer_is_that_of_more_steps_with_the_same_gradients() -> None:
    def trained(steps: int) -> MixedPrecisionAdamW:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = MixedPrecisionAdamW([weight], lr=1e-3, betas=(0.9, 0.99))
        for _ in range(steps):
            weight.grad = torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16)
            optimizer.step()
        return optimizer

    matured, longer = trained(5), trained(205)
    (before,) = (state["master"].clone() for state in matured.state.values())
    mature(matured, 200)
    assert matured.param_groups[0]["step"] == longer.param_groups[0]["step"] == 205
    for state, expected in zip(matured.state.values(), longer.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], expected[name], rtol=1e-4, atol=0.0)
        assert torch.equal(state["master"], before)
