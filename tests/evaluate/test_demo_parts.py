"""The parts that the demo rests on.

Data that can be resumed, an optimizer that owns its masters, and comparisons that see one bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.demo import other_readers
from benchmarks.demo.demonstration import create_plan
from benchmarks.workloads import equality, text
from benchmarks.workloads.leaf_classes import leaf_class
from benchmarks.workloads.recipe import Recipe, demo, tiny_demo
from deltacheck.backends.torch import Engine

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.workloads.optimizer import MixedPrecisionAdamW
from benchmarks.workloads.torch_workloads import (
    Workload,
    be_deterministic,
    pretraining,
)

SOURCE = '''
def documented(x, *, y=1):
    """Add, *surely*."""
    total = x + y
    return total

def bare(x):
    return x

def only_documented():
    """Nothing follows."""

class Box:
    async def inner(self):
        """Größe."""
        return "é"
'''


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    sizes = {"width": 32, "layers": 1, "context": 128, "batch": 2, "pretrain_batch": 2}
    return tiny_demo(seed=3, **sizes)


@pytest.fixture(scope="module")
def library() -> list[str]:
    return text.standard_library()[:120]


@pytest.fixture(scope="module")
def rows(library: list[str], recipe: Recipe) -> text.Rows:
    return text.finetuning_rows(library, recipe.context)


@pytest.fixture(autouse=True)
def _one_process_among_others():
    """Be deterministic as a worker of the demo is, and restore the settings for other tests."""
    threads = torch.get_num_threads()
    be_deterministic(threads)
    with torch.random.fork_rng(devices=[]):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(threads)


# --- data -----------------------------------------------------------------------------------------


def test_prompt_is_signature_and_docstring_and_answer_is_the_rest() -> None:
    assert list(text.functions(SOURCE)) == [
        (
            'def documented(x, *, y=1):\n    """Add, *surely*."""\n',
            "    total = x + y\n    return total\n",
        ),
        ('    async def inner(self):\n        """Größe."""\n', '        return "é"\n'),
    ]


def test_source_that_does_not_parse_has_no_functions() -> None:
    assert list(text.functions("def broken(:\n")) == []


def test_graded_tokens_are_the_answer_and_its_end_only() -> None:
    rows = text.finetuning_rows([SOURCE], context=128)
    pairs = list(text.functions(SOURCE))
    assert rows.tokens.shape == rows.graded.shape == (2, 129)
    for tokens, graded, (prompt, answer) in zip(rows.tokens, rows.graded, pairs, strict=True):
        assert tokens[graded].tolist() == [*answer.encode(), text.END]
        ungraded = tokens[~graded].tolist()
        spoken = [text.BEGIN, *prompt.encode(), text.ANSWER]
        assert ungraded[: len(spoken)] == spoken
        assert set(ungraded[len(spoken) :]) <= {text.PAD}


def test_a_function_that_does_not_fit_is_left_out() -> None:
    longest = max(len((prompt + answer).encode()) for prompt, answer in text.functions(SOURCE))
    assert len(text.finetuning_rows([SOURCE], context=longest + 2).tokens) == 2
    assert len(text.finetuning_rows([SOURCE], context=longest + 1).tokens) == 1


def test_rows_are_the_same_each_time_and_survive_the_disk(
    library: list[str], rows: text.Rows, recipe: Recipe, tmp_path
) -> None:
    again = text.finetuning_rows(library, recipe.context)
    rows.write(tmp_path / "rows.npz")
    for other in (again, text.Rows.read(tmp_path / "rows.npz")):
        np.testing.assert_array_equal(rows.tokens, other.tokens)
        np.testing.assert_array_equal(rows.graded, other.graded)
    assert len(rows.tokens) >= 50


def test_pretraining_rows_are_the_text_itself() -> None:
    rows = text.pretraining_rows(["abcdefgh", "ijklmnopqr"], context=4)
    assert [bytes(row.astype(np.uint8)) for row in rows.tokens] == [
        b"abcde",
        b"efgh\n",
        b"\nijkl",
        b"lmnop",
    ]
    assert rows.graded.all()


@pytest.mark.parametrize(
    "taken", [0, 1, 7, 24, 25, 26, 60], ids=lambda n: f"after_{n}"
)  # 25 batches of 2 an epoch: its end too
def test_cursor_resumes_exactly(rows: text.Rows, taken: int) -> None:
    some = text.Rows(rows.tokens[:51], rows.graded[:51])
    stream = text.Batches(some, batch=2, seed=5)
    for _ in range(taken):
        next(stream)
    resumed = text.Batches(some, batch=2, seed=99)
    resumed.load_state_dict(stream.state_dict())
    for _ in range(30):
        np.testing.assert_array_equal(next(stream).tokens, next(resumed).tokens)
    assert stream.state_dict() == resumed.state_dict()


def test_an_epoch_shows_every_row_once_in_an_order_of_its_own() -> None:
    tokens = np.arange(8).reshape(8, 1)
    stream = text.Batches(text.Rows(tokens, np.ones_like(tokens, dtype=bool)), batch=4, seed=1)
    epochs = [
        np.concatenate([next(stream).tokens for _ in range(2)]).ravel().tolist() for _ in range(3)
    ]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rows do not fill a batch of 2"):
        text.Batches(text.pretraining_rows(["abcdef"], context=4), batch=2, seed=1)


# --- optimizer ------------------------------------------------------------------------------------


def test_weights_are_the_masters_rounded(recipe: Recipe, rows: text.Rows) -> None:
    training = pretraining(recipe, rows)
    for _ in range(3):
        training.train_step()
    for parameter, state in training.optimizer.state.items():
        assert parameter.dtype == torch.bfloat16
        assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(
            ("master", "exp_avg", "exp_avg_sq"), torch.float32
        )
        assert torch.equal(parameter, state["master"].bfloat16())


def test_updates_below_the_spacing_of_bfloat16_add_up_in_the_master() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))  # next below 1: 1 - 2**-8
    optimizer = MixedPrecisionAdamW([weight], lr=1e-4, weight_decay=0.0)
    moved_after = None
    for step in range(1, 41):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if moved_after is None and (weight != 1).all():
            moved_after = step
    assert moved_after is not None
    assert moved_after > 10


def test_agrees_with_torch_adamw_on_the_masters() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 8).bfloat16())
    twin = torch.nn.Parameter(weight.detach().float())
    ours = MixedPrecisionAdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = torch.optim.AdamW([twin], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(10):
        weight.grad = torch.randn(64, 8).bfloat16()
        twin.grad = weight.grad.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(ours.state[weight]["master"], twin.detach(), rtol=1e-5, atol=1e-6)


def test_global_pre_step_hook_fires_once_a_step_before_anything_moves(
    recipe: Recipe, rows: text.Rows
) -> None:
    training = pretraining(recipe, rows)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    seen = []

    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        weights = training.model.state_dict()
        seen.append(
            optimizer is training.optimizer
            and all(torch.equal(before[name], weights[name]) for name in before)
        )

    registered = register_optimizer_step_pre_hook(hook)
    try:
        training.train_step()
        assert seen == [True]
        training.train_step()
        assert len(seen) == 2
    finally:
        registered.remove()


def test_loading_a_state_keeps_float32(recipe: Recipe, rows: text.Rows) -> None:
    training = pretraining(recipe, rows)
    training.train_step()
    saved = copy.deepcopy(training.optimizer.state_dict())
    other = pretraining(recipe, rows)
    other.optimizer.load_state_dict(saved)
    assert equality.compare("optimizer", saved, other.optimizer.state_dict()).holds
    master = next(iter(other.optimizer.state.values()))["master"]
    assert master.dtype == torch.float32
    assert master.data_ptr() != saved["state"][0]["master"].data_ptr()


# --- the whole state ------------------------------------------------------------------------------


def _finetuning(recipe: Recipe, rows: text.Rows) -> Workload:
    return Workload(recipe, pretraining(recipe, rows).model.state_dict(), rows)


def test_training_repeats_bit_for_bit(recipe: Recipe, rows: text.Rows) -> None:
    def losses() -> list[float]:
        training = _finetuning(recipe, rows)
        return [training.train_step() for _ in range(4)]

    assert losses() == losses()


def test_a_restored_state_goes_on_bit_for_bit(recipe: Recipe, rows: text.Rows) -> None:
    assert recipe.dropout > 0  # so that a lost generator state would show
    training = _finetuning(recipe, rows)
    for _ in range(3):
        training.train_step()
    saved = copy.deepcopy(training.state())
    expected = [training.train_step() for _ in range(4)]
    final = copy.deepcopy(training.state())

    resumed = _finetuning(replace(recipe, seed=77), rows)
    resumed.load(saved)
    assert [resumed.train_step() for _ in range(4)] == expected
    assert equality.compare("final state", final, resumed.state()).holds
    assert equality.compare(
        "tied", final["model"]["embed.weight"], resumed.state()["model"]["head.weight"]
    ).holds


@pytest.mark.parametrize("lost", ["data", "rng", "optimizer", "scheduler"])
def test_a_state_that_lacks_a_part_does_not(recipe: Recipe, rows: text.Rows, lost: str) -> None:
    """The control: the comparison sees each part of the state, so that equality means something."""
    recipe = replace(recipe, rate=1e-2)
    training = _finetuning(recipe, rows)
    for _ in range(3):
        training.train_step()
    saved = copy.deepcopy(training.state())
    for _ in range(4):
        training.train_step()
    final = copy.deepcopy(training.state())

    resumed = _finetuning(replace(recipe, seed=77), rows)
    resumed.load({**saved, lost: copy.deepcopy(resumed.state()[lost])})
    for _ in range(4):
        resumed.train_step()
    assert not equality.compare("final state", final, resumed.state()).holds


# --- comparisons ----------------------------------------------------------------------------------

NAN, OTHER_NAN = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)
DIFFERENT = {
    "one_bit": (np.float32([1.0]), np.nextafter(np.float32([1.0]), np.float32(2))),
    "sign_of_zero": (np.float32([0.0]), np.float32([-0.0])),
    "payload_of_nan": (np.array([NAN]), np.array([OTHER_NAN])),
    "dtype": (np.zeros(4, np.int32), np.zeros(4, np.uint32)),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "scalar": (1.0, 1),
    "sign_of_scalar": (0.0, -0.0),
    "path": ({"a": 1}, {"b": 1}),
    "missing": ({"a": 1, "b": 2}, {"a": 1}),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_comparison_sees(case: str) -> None:
    left, right = DIFFERENT[case]
    assert equality.compare(case, left, copy.deepcopy(left)).holds
    assert not equality.compare(case, left, right).holds
    assert not equality.compare(case, right, left).holds


def test_comparison_takes_torch_numpy_and_jax_for_the_same(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensor = torch.arange(6).reshape(2, 3).bfloat16()
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert equality.compare("numpy", {"w": tensor.t()}, {"w": array.T}).holds
    pytest.importorskip("orbax")
    state = {"w": tensor, "n": torch.tensor(1 << 40)}
    with Engine(tmp_path) as engine:
        engine.save(0, state)
    assert other_readers.in_jax("jax", state, tmp_path, 0).holds
    assert not other_readers.in_jax("jax", {**state, "n": torch.tensor(1)}, tmp_path, 0).holds


def test_every_leaf_has_a_class() -> None:
    assert leaf_class("model/layers.0.attn.qkv.weight") == "bf16 weights"
    assert leaf_class("optimizer/state/0/exp_avg_sq") == "exp_avg_sq"
    assert leaf_class("optimizer/state/0/master") == "fp32 master"
    assert leaf_class("rng/torch") == "other"


# --- recipe ---------------------------------------------------------------------------------------


def test_recipe_survives_the_disk(tmp_path: Path) -> None:
    recipe = demo(seed=1, steps=10)
    recipe.write(tmp_path / "recipe.json")
    assert Recipe.read(tmp_path / "recipe.json") == recipe


def test_the_last_step_is_always_saved() -> None:
    def checkpoints(steps: int) -> tuple[int, ...]:
        return replace(create_plan(seed=1, steps=steps), every=2).checkpoints()

    assert checkpoints(5) == (2, 4, 5)
    assert checkpoints(4) == (2, 4)
