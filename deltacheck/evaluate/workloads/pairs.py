"""Prompts and their answers, from a file of the user's or from Python's standard library; and rows
of tokens made of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltacheck.evaluate.workloads import text
from deltacheck.evaluate.workloads.text import Rows


class Pair(NamedTuple):
    """A text without a prompt has an empty one: all of it is learned."""

    prompt: str
    answer: str


class Coding(NamedTuple):
    """How text becomes tokens: ``encode`` adds none of its own, ``begin`` and ``end`` stand around
    a pair.
    """

    encode: Callable[[str], list[int]]
    begin: int
    end: int


BYTES = Coding(lambda characters: list(characters.encode()), text.BEGIN, text.END)


def read(path: Path) -> list[Pair]:
    """The pairs of a file: ``.jsonl``, each line an object with ``prompt`` and ``completion`` or
    with
    ``text``; else its paragraphs.

    Raises ``OSError``, ``ValueError`` naming the line.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Pair("", paragraph) for paragraph in content.split("\n\n") if paragraph.strip()]
    lines = enumerate(
        content.split("\n"), start=1
    )  # not splitlines(): JSON may hold other line separators as they are
    return [_pair(f"{path}, line {number}", line) for number, line in lines if line.strip()]


def standard_library(files: int | None = None) -> list[Pair]:
    """Functions of Python's standard library: signature and docstring, and the body. ``files``: of
    how many (default: all).
    """
    return [
        Pair(*found) for source in text.standard_library(files) for found in text.functions(source)
    ]


def rows(pairs: Iterable[Pair], coding: Coding, context: int) -> Rows:
    """Rows of ``context`` + 1 tokens: begin, prompt, answer, end, padded with ends; of these the
    answer and its end are graded.

    A pair that is longer goes on in the next row; a row without a graded token is left out.
    """
    tokens, graded = [], []
    for prompt, answer in pairs:
        question, reply = (
            [coding.begin, *coding.encode(prompt)],
            [*coding.encode(answer), coding.end],
        )
        line, counts = question + reply, [False] * len(question) + [True] * len(reply)
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


def _pair(where: str, line: str) -> Pair:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    fields = found if isinstance(found, dict) else {}
    pair = (
        ("", fields["text"])
        if "text" in fields
        else (fields.get("prompt"), fields.get("completion"))
    )
    if not all(isinstance(part, str) for part in pair):
        raise ValueError(
            f"{where}: wanted an object with 'prompt' and 'completion', or with 'text', each a"
            " string"
        )
    return Pair(*pair)
