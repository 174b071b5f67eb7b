"""Training data that is on every machine: the sources of Python's standard library, as bytes.

Pre-training reads whole files. Fine-tuning reads functions: the prompt is the signature and the
docstring, the answer is the body.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Tokens 0 to 255 are bytes.
BEGIN, ANSWER, END, PAD = 256, 257, 258, 259
VOCABULARY = 260

_NOT_LIBRARY = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "ensurepip",
        "turtledemo",
        "__pycache__",
    }
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Training rows of equal length.

    ``graded`` marks the tokens that count in the loss when they are predicted.
    """

    tokens: NDArray[np.int64]  # (rows, context + 1)
    graded: NDArray[np.bool_]  # the same shape

    def first(self, count: int) -> Rows:
        """Return the first rows, or all if there are fewer."""
        return Rows(self.tokens[:count], self.graded[:count])

    def write(self, path: Path) -> None:
        """Write the rows to a NumPy archive."""
        np.savez(path, tokens=self.tokens.astype(np.int32), graded=self.graded)

    @classmethod
    def read(cls, path: Path) -> Rows:
        """Read what ``write`` has written."""
        with np.load(path) as arrays:
            return cls(arrays["tokens"].astype(np.int64), arrays["graded"])


def standard_library(files: int | None = None) -> list[str]:
    """Return the sources of the running interpreter's standard library, ordered by path.

    Args:
        files: Number of files to read, from the first; ``None`` for all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, subfolders, names in os.walk(root):
        # Excluded before they are walked: site-packages may be huge.
        subfolders[:] = set(subfolders) - _NOT_LIBRARY
        paths += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    paths.sort()  # os.walk lists a folder in the order of the file system
    return [(root / path).read_text(encoding="utf-8", errors="replace") for path in paths[:files]]


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield prompt and answer of every function that has a docstring and something after it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from the compiler, about code that is not ours
            module = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(module):
        if (
            not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or ast.get_docstring(node) is None
            or len(node.body) < 2
        ):
            continue
        first_of_body = node.body[0].end_lineno or node.lineno
        yield (
            "".join(lines[node.lineno - 1 : first_of_body]),
            "".join(lines[first_of_body : node.end_lineno]),
        )


def pretraining_rows(sources: Iterable[str], context: int, limit: int = 4096) -> Rows:
    """Cut the concatenated sources into rows whose tokens are all graded.

    At most ``limit`` rows are returned, spread over the whole text.
    """
    characters = np.frombuffer("\n".join(sources).encode(), dtype=np.uint8)
    starts = np.arange(0, len(characters) - context, context)
    # Every n-th row, so that a small limit still sees files of the whole library.
    starts = starts[:: max(1, len(starts) // limit)][:limit]
    tokens = np.stack([characters[start : start + context + 1] for start in starts])
    return Rows(tokens.astype(np.int64), np.ones_like(tokens, dtype=np.bool_))


def finetuning_rows(sources: Iterable[str], context: int) -> Rows:
    """Return a row for each function that fits: BEGIN prompt ANSWER answer END PAD...

    The answer and END are graded.
    """
    tokens, graded = [], []
    for source in sources:
        for prompt, answer in functions(source):
            question, reply = list(prompt.encode()), list(answer.encode())
            spare = context + 1 - len(question) - len(reply) - 3
            if spare >= 0 and reply:
                tokens.append([BEGIN, *question, ANSWER, *reply, END, *[PAD] * spare])
                graded.append(
                    [False] * (len(question) + 2) + [True] * (len(reply) + 1) + [False] * spare
                )
    return Rows(
        np.array(tokens, dtype=np.int64).reshape(-1, context + 1),
        np.array(graded, dtype=np.bool_).reshape(-1, context + 1),
    )


class Batches:
    """An endless stream of batches, shuffled anew in each epoch.

    Its position is a few integers, and the same position gives the same batch.

    Args:
        rows: The rows of one epoch.
        batch: Rows per batch.
        seed: Decides the order of each epoch.

    Raises:
        ValueError: The rows do not fill one batch.
    """

    def __init__(self, rows: Rows, batch: int, seed: int) -> None:
        if len(rows.tokens) < batch:
            raise ValueError(
                f"{len(rows.tokens)} rows do not fill a batch of {batch}: provide more data (are"
                " the standard library's sources installed?)"
            )
        self._rows, self._batch, self._seed = rows, batch, seed
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()

    def __next__(self) -> Rows:
        if self._position + self._batch > len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        indices = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return Rows(self._rows.tokens[indices], self._rows.graded[indices])

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> NDArray[np.int64]:
        # A function of seed and epoch alone, so that a position of three integers is enough.
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows.tokens))
