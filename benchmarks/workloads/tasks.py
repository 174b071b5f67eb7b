"""The tasks of the runs: functions of Python's standard library, and sums that can be checked."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import text
from benchmarks.workloads.recipe import Recipe
from benchmarks.workloads.text import ANSWER, BEGIN, END, PAD, Batches, Rows

EVALUATION_ROWS = 32
HELD_OUT = 8  # one row in so many is never trained on
DIGITS = 3  # of an answer: 7+85 is 092
# Share of wrong digits in the pre-training data, so that reinforcement learning has something to do
SLOPPY = 0.3

Tokens = NDArray[np.int64]


def pretraining_rows(recipe: Recipe) -> Rows:
    """Return the rows of plain text, or of sums with mistakes, that a new model learns from."""
    if recipe.task == "rl":
        return _sums(recipe, sloppy=SLOPPY)
    return text.pretraining_rows(_sources(recipe.sources), recipe.context)


def training_batches(recipe: Recipe) -> Batches:
    """Return endless batches whose position can be saved.

    Under "rl" the rows contain the answers, but only the checker reads them.
    """
    return Batches(_part(recipe, held_out=False), recipe.batch, recipe.seed)


def evaluation_rows(recipe: Recipe) -> Rows:
    """Return fixed rows that are never trained on.

    They are the same for all seeds, so that losses can be compared.
    """
    return _part(recipe, held_out=True).first(EVALUATION_ROWS)


def prompts_of(rows: Rows) -> tuple[Tokens, Tokens]:
    """Split rows of sums into prompts (rows, length) and right digits (rows, DIGITS)."""
    end = int(np.argmax(rows.tokens[0] == ANSWER)) + 1  # the same in all rows
    return rows.tokens[:, :end], rows.tokens[:, end : end + DIGITS]


def reward(completions: Tokens, answers: Tokens) -> NDArray[np.float32]:
    """Return the share of right digits of each row: (rows, DIGITS) twice to (rows,)."""
    share: NDArray[np.float32] = np.mean(completions == answers, axis=1, dtype=np.float32)
    return share


def advantages(rewards: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Compare each reward with those of the same prompt (GRPO; Shao et al., 2024).

    A group of equal rewards has no advantages and teaches nothing.
    """
    groups = rewards.reshape(-1, group)
    centred = groups - groups.mean(axis=1, keepdims=True)
    # The constant bounds the advantages of a group whose rewards hardly differ.
    scaled = centred / (groups.std(axis=1, keepdims=True) + 1e-4)
    flat: NDArray[np.float32] = scaled.reshape(-1).astype(np.float32)
    return flat


def _part(recipe: Recipe, *, held_out: bool) -> Rows:
    rows = _sums(recipe, sloppy=0.0) if recipe.task == "rl" else function_rows(recipe)
    mask = (np.arange(len(rows.tokens)) % HELD_OUT == 0) == held_out
    return Rows(rows.tokens[mask], rows.graded[mask])


def _sums(recipe: Recipe, sloppy: float) -> Rows:
    """Return all sums of two numbers below 100: BEGIN 07+85= ANSWER 092 END PAD...

    Their order is the same for all seeds.
    """
    # A constant seed: rows must be the same for all seeds of an evaluation.
    random = np.random.default_rng(0)
    augend, addend = (
        numbers.reshape(-1)[:, None] for numbers in np.meshgrid(np.arange(100), np.arange(100))
    )
    digits = np.concatenate([augend // 10, augend % 10, addend // 10, addend % 10], axis=1) + ord(
        "0"
    )
    total = (augend + addend) // 10 ** np.arange(DIGITS)[::-1] % 10 + ord("0")
    wrong = random.random(total.shape) < sloppy
    total = np.where(wrong, random.integers(ord("0"), ord("9") + 1, total.shape), total)

    def column(token: int) -> Tokens:
        return np.full((len(digits), 1), token)

    question = [column(BEGIN), digits[:, :2], column(ord("+")), digits[:, 2:]]
    answer = [column(ord("=")), column(ANSWER), total, column(END)]
    tokens = np.concatenate(question + answer, axis=1)
    graded = np.zeros((len(tokens), recipe.context + 1), dtype=np.bool_)
    graded[:, tokens.shape[1] - DIGITS - 1 : tokens.shape[1]] = True
    spare = recipe.context + 1 - tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, spare)), constant_values=PAD)
    order = random.permutation(len(tokens))
    return Rows(padded[order], graded[order])


_FUNCTIONS: dict[tuple[int | None, int], Rows] = {}


def function_rows(recipe: Recipe) -> Rows:
    """Return all functions that a run learns from or is judged by.

    Reading them takes seconds, so a process does it once.
    """
    key = (recipe.sources, recipe.context)
    if key not in _FUNCTIONS:
        _FUNCTIONS[key] = _functions(*key)
    return _FUNCTIONS[key]


def take_function_rows(recipe: Recipe, rows: Rows) -> None:
    """Use rows that another process got from ``function_rows`` instead of reading them again."""
    _FUNCTIONS[recipe.sources, recipe.context] = rows


def _functions(sources: int | None, context: int) -> Rows:
    rows = text.finetuning_rows(_sources(sources), context)
    # Source files differ from each other, so a part of each file is held out.
    order = np.random.default_rng(0).permutation(len(rows.tokens))
    return Rows(rows.tokens[order], rows.graded[order])


@functools.cache
def _sources(count: int | None) -> list[str]:
    return text.standard_library()[:count]
