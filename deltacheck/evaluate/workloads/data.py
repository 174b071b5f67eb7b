"""What the runs learn, made on the spot: functions of Python's standard library, and sums whose
answers can be checked.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from deltacheck.evaluate.workloads import text
from deltacheck.evaluate.workloads.text import ANSWER, BEGIN, END, PAD, Batches, Rows

from .recipe import Recipe

EVALUATION_ROWS = 32
HELD_OUT = 8  # one row in so many is never trained on
DIGITS = 3  # of an answer: 7+85 is 092
# Share of wrong digits in what the model learns sums from: reinforcement learning then has
# something to do
SLOPPY = 0.3

Tokens = NDArray[np.int64]


def pretraining_batches(recipe: Recipe) -> Batches:
    if recipe.task == "rl":
        return Batches(_sums(recipe, sloppy=SLOPPY), recipe.pretrain_batch, recipe.seed)
    return Batches(
        text.pretraining_rows(_sources(recipe.sources), recipe.context),
        recipe.pretrain_batch,
        recipe.seed,
    )


def training_batches(recipe: Recipe) -> Batches:
    """Endless batches with a place that can be saved. Under "rl" the answers are there, but for the
    checker only.
    """
    return Batches(_part(recipe, held_out=False), recipe.batch, recipe.seed)


def evaluation_rows(recipe: Recipe) -> Rows:
    """Fixed rows that are never trained on. The same for all seeds, so that their losses can be
    compared.
    """
    rows = _part(recipe, held_out=True)
    return Rows(rows.tokens[:EVALUATION_ROWS], rows.graded[:EVALUATION_ROWS])


def prompts_of(rows: Rows) -> tuple[Tokens, Tokens]:
    """Of rows of sums: the prompts (rows, length) and the right digits (rows, DIGITS)."""
    end = int(np.argmax(rows.tokens[0] == ANSWER)) + 1  # the same in all rows
    return rows.tokens[:, :end], rows.tokens[:, end : end + DIGITS]


def reward(completions: Tokens, right: Tokens) -> NDArray[np.float32]:
    """The checker: share of digits that are right. (rows, DIGITS) twice -> (rows,)."""
    share: NDArray[np.float32] = np.mean(completions == right, axis=1, dtype=np.float32)
    return share


def advantages(rewards: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Each reward against those of the same prompt (GRPO; Shao et al., 2024). A group of equals
    teaches nothing.
    """
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(axis=1, keepdims=True)
    scaled: NDArray[np.float32] = (
        (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)
    )
    return scaled


def _part(recipe: Recipe, *, held_out: bool) -> Rows:
    rows = _sums(recipe, sloppy=0.0) if recipe.task == "rl" else function_rows(recipe)
    chosen = (np.arange(len(rows.tokens)) % HELD_OUT == 0) == held_out
    return Rows(rows.tokens[chosen], rows.graded[chosen])


def _sums(recipe: Recipe, sloppy: float) -> Rows:
    """All sums of two numbers below 100, in an order that is the same for all seeds: BEGIN 07+85=
    ANSWER 092 END PAD...
    """
    random = np.random.default_rng(0)
    left, right = (
        numbers.reshape(-1)[:, None] for numbers in np.meshgrid(np.arange(100), np.arange(100))
    )
    digits = np.concatenate([left // 10, left % 10, right // 10, right % 10], axis=1) + ord("0")
    total = (left + right) // 10 ** np.arange(DIGITS)[::-1] % 10 + ord("0")
    wrong = random.random(total.shape) < sloppy
    total = np.where(wrong, random.integers(ord("0"), ord("9") + 1, total.shape), total)

    def column(token: int) -> Tokens:
        return np.full((len(digits), 1), token)

    marks = [
        column(BEGIN),
        digits[:, :2],
        column(ord("+")),
        digits[:, 2:],
        column(ord("=")),
        column(ANSWER),
    ]
    tokens = np.concatenate([*marks, total, column(END)], axis=1)
    graded = np.zeros((len(tokens), recipe.context + 1), dtype=np.bool_)
    graded[:, tokens.shape[1] - DIGITS - 1 : tokens.shape[1]] = True
    padded = np.pad(
        tokens, ((0, 0), (0, recipe.context + 1 - tokens.shape[1])), constant_values=PAD
    )
    order = random.permutation(len(tokens))
    return Rows(padded[order], graded[order])


_FUNCTIONS: dict[tuple[int | None, int], Rows] = {}


def function_rows(recipe: Recipe) -> Rows:
    """All functions that a run learns from or is judged by: seconds of reading, once a process."""
    key = (recipe.sources, recipe.context)
    if key not in _FUNCTIONS:
        _FUNCTIONS[key] = _functions(*key)
    return _FUNCTIONS[key]


def take_function_rows(recipe: Recipe, rows: Rows) -> None:
    """Spare this process the reading: ``rows`` are what another one got from ``function_rows``."""
    _FUNCTIONS[recipe.sources, recipe.context] = rows


def _functions(sources: int | None, context: int) -> Rows:
    rows = text.finetuning_rows(_sources(sources), context)
    order = np.random.default_rng(0).permutation(
        len(rows.tokens)
    )  # files differ from each other: hold out a bit of each
    return Rows(rows.tokens[order], rows.graded[order])


@functools.cache
def _sources(count: int | None) -> list[str]:
    return text.standard_library()[:count]
