"""Prompts and answers, from a user's file or from Python's standard library, and rows of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.workloads import text
from benchmarks.workloads.text import Rows


class Pair(NamedTuple):
    """A prompt and its answer.

    A plain text has an empty prompt: all of it is learned.
    """

    prompt: str
    answer: str


class Coding(NamedTuple):
    """An encoding of text as tokens.

    ``encode`` adds no special tokens. ``begin`` and ``end`` surround a pair.
    """

    encode: Callable[[str], list[int]]
    begin: int
    end: int


BYTES = Coding(lambda characters: list(characters.encode()), text.BEGIN, text.END)


def read(path: Path) -> list[Pair]:
    """Read the pairs of a file.

    Args:
        path: A ``.jsonl`` file, each line an object with ``prompt`` and ``completion`` or with
            ``text``; or a plain text, whose paragraphs are read.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not such an object; the message names it.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Pair("", paragraph) for paragraph in content.split("\n\n") if paragraph.strip()]
    # Not splitlines(): JSON may contain other line separators unescaped.
    lines = enumerate(content.split("\n"), start=1)
    return [_pair(f"{path}, line {number}", line) for number, line in lines if line.strip()]


def standard_library(files: int | None = None) -> list[Pair]:
    """Return the functions of Python's standard library: signature and docstring, and the body.

    Args:
        files: Number of source files to read; ``None`` for all.
    """
    sources = text.standard_library(files)
    return [Pair(*function) for source in sources for function in text.functions(source)]


def rows(pairs: Iterable[Pair], coding: Coding, context: int) -> Rows:
    """Return rows of ``context`` + 1 tokens: begin, prompt, answer, end, padded with ends.

    The answer and its end are graded. A pair that is longer continues in the next row. A row
    without a graded token is left out.
    """
    tokens, graded = [], []
    for prompt, answer in pairs:
        question = [coding.begin, *coding.encode(prompt)]
        reply = [*coding.encode(answer), coding.end]
        line, counts = question + reply, [False] * len(question) + [True] * len(reply)
        # Rows overlap by one token: the last token of a row is only predicted, and is then the
        # first input of the next row.
        for start in range(0, len(line) - 1, context):
            spare = context + 1 - len(line[start : start + context + 1])
            row = counts[start : start + context + 1] + [False] * spare
            if any(row[1:]):
                tokens.append(line[start : start + context + 1] + [coding.end] * spare)
                graded.append(row)
    shape = (-1, context + 1)
    return Rows(
        np.array(tokens, dtype=np.int64).reshape(shape),
        np.array(graded, dtype=np.bool_).reshape(shape),
    )


def _pair(position: str, line: str) -> Pair:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{position}: not JSON: {error}") from None
    fields = content if isinstance(content, dict) else {}
    pair = (
        ("", fields["text"])
        if "text" in fields
        else (fields.get("prompt"), fields.get("completion"))
    )
    if not all(isinstance(part, str) for part in pair):
        raise ValueError(
            f"{position}: expected an object with 'prompt' and 'completion', or with 'text', each"
            " a string"
        )
    return Pair(*pair)
