"""Seeded changes of documents, arrays and files, for the fuzz targets in Python and for tests."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBERS = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    2**16,
    2**20,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**56,
    2**57,
    2**62,
    2**63,
    2**64,
    10**10,
    2**100,
    0.0,
    -0.0,
    0.5,
    1.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)
_ODD = (
    "",
    ".",
    "..",
    "/",
    "a/../b",
    "\0",
    "\n",
    "\u00e9",
    "e\u0301",
    "\ud800",
    "x" * 5000,
    "9" * 5000,
    "nan:7ff8000000000001",
    "0" * 32,
)
TEXTS = (
    *_ODD,
    *"a ../../etc/passwd /etc/passwd zarr.json c.0 nan inf 0x1p3 -1 1e9999 ===="
    " s0000000000-00000000 s9999999999-ffffffff c0000000001".split(),
    *"float32 bfloat16 complex128 int4 object float4_e2m1fn jax.key:threefry2x32 jax.key:x"
    " numpy.array numpy.scalar device".split(),
    *"dict odict list tuple deque fields array none bool int float complex str bytes exec".split(),
    *"stream store values gaps tiles wide raw bitmap cast same drawn lattice octaves exact"
    " ratio bounded reused warm stable derived".split(),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places(value[key])
    elif isinstance(value, list):
        for number in range(len(value)):
            yield value, number
            yield from places(value[number])


def mutate_json(document: Any, rng: random.Random) -> None:
    """Change a JSON value in one place."""
    every = list(places(document))
    if not every:
        return
    holder, key = rng.choice(every)
    other_holder, other_key = rng.choice(every)
    old = holder[key]
    match rng.randrange(10):
        case 0 | 1:
            holder[key] = rng.choice(NUMBERS)
        case 2:
            holder[key] = rng.choice(TEXTS)
        case 3:
            holder[key] = rng.choice(
                (
                    None,
                    True,
                    False,
                    [],
                    {},
                    [[]],
                    {"t": "none"},
                    [0],
                    deep(rng.choice((3, 130, 400))),
                )
            )
        case 4:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 5:
            holder[key], other_holder[other_key] = (
                copy.deepcopy(other_holder[other_key]),
                copy.deepcopy(old),
            )
        case 6:
            del holder[key]
        case 7 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        case 8 if isinstance(holder, dict):
            holder[rng.choice((*TEXTS, str(other_key)))] = copy.deepcopy(old)
        case _ if isinstance(old, int):
            holder[key] = old + rng.choice((-1, 1, -2, 2, 256, -256))
        case _ if isinstance(old, list):
            rng.shuffle(old)
        case _:
            holder[key] = rng.choice(NUMBERS)


def deep(levels: int) -> Any:
    value: Any = {"t": "none"}
    for _ in range(levels):
        value = {"t": "list", "n": [value]}
    return value


def mutate_bytes(content: bytearray, rng: random.Random) -> None:
    """Change bytes in one place."""
    if not content:
        content.extend(rng.randbytes(3))
        return
    at = rng.randrange(len(content))
    match rng.randrange(7):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            content[at] = rng.choice((0, 1, 2, 127, 128, 254, 255, 34, 44, 91, 93, 123, 125, 92))
        case 2:
            content[at:at] = rng.randbytes(rng.randrange(1, 5))
        case 3:
            del content[at : at + rng.randrange(1, 9)]
        case 4:
            start = rng.randrange(len(content))
            piece = content[start : start + rng.randrange(1, 65)]
            content[at : at + len(piece)] = piece
        case 5:
            content.extend(rng.randbytes(rng.randrange(1, 9)))
        case _:
            del content[at:]


def mutate_file(path: Path, rng: random.Random, outside: Path) -> None:
    """Put something else in a file's place. ``outside``: a pipe that no reader may open, in a
    directory that none may enter.
    """
    match rng.randrange(9):
        case 0:
            path.unlink()
        case 1:
            path.unlink()
            path.symlink_to(outside)
        case 2:
            path.unlink()
            os.mkfifo(path)
        case 3:
            path.unlink()
            path.mkdir()
        case 4:
            os.truncate(path, rng.choice((0, 1, 2**31, 2**36)))
        case 5:
            others = sorted(p for p in path.parents[1].rglob("*") if p.is_file() and p != path)
            path.write_bytes(rng.choice(others).read_bytes() if others else b"")
        case 6 if all(p.is_file() for p in path.parent.iterdir()):
            folder = path.parent
            for one in folder.iterdir():
                one.unlink()
            folder.rmdir()
            folder.symlink_to(outside.parent)
        case _:
            content = bytearray(path.read_bytes())
            for _ in range(rng.randrange(1, 4)):
                mutate_bytes(content, rng)
            path.write_bytes(content)
