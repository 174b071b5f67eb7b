"""Make steps of a root out of files of other formats: safetensors, and what ``torch.save`` wrote.
No code of a file is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.state.sampling import SUFFIXES
from deltacheck.errors import Damaged

SAFETENSORS = ".safetensors"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\Z")  # one file of a model that was saved in several


def steps_of(
    files: Iterable[str | os.PathLike[str]], step: int | None = None
) -> list[tuple[int, Path]]:
    """Which step each file becomes, ascending: the last number in its name, or else in its
    folder's.
    ``step``: of the one file.

    Raises ``ValueError`` naming the file where there is no number or another file has it, for parts
    of a model, and for names that say no format.
    """
    found: dict[int, Path] = {}
    for path in map(Path, files):
        if path.suffix not in (SAFETENSORS, *SUFFIXES):
            raise ValueError(
                f"{path} is not called as one of {', '.join((SAFETENSORS, *SUFFIXES))}, which say"
                " the format"
            )
        if _PART.search(path.stem):
            raise ValueError(
                f"{path} is a part of a model that lies in several files; join them into one first"
            )
        numbers = re.findall(r"\d+", path.stem) or re.findall(r"\d+", path.absolute().parent.name)
        if step is None and not numbers:
            raise ValueError(f"neither {path.name} nor its folder has a number; say the step")
        number = int(numbers[-1]) if step is None else step
        if number in found:
            raise ValueError(
                f"{found[number]} and {path} are both step {number}; import one of them into a root"
                " of its own"
            )
        found[number] = path
    return sorted(found.items())


def read(path: Path) -> object:
    """The content of a file: of safetensors a dict of tensors by key, without the file's metadata;
    tensors are mapped, where the file allows it.

    Raises ``Damaged`` naming the file where it cannot be read, or not without running code,
    ``FileNotFoundError``.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix == SAFETENSORS:
            from safetensors.torch import load_file

            return dict(sorted(load_file(path).items()))
        return _torch(path)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path.name} needs safetensors: pip install safetensors"
        ) from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise Damaged(
            f"{path} cannot be read without running code from it: {type(error).__name__}: {reason}."
            " Where you trust the file, load it yourself and save what it holds with Engine"
        ) from error


def _torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(
            path, map_location="cpu", weights_only=True
        )  # the format before torch 1.6


def ingest(
    root: str | os.PathLike[str], files: list[tuple[int, Path]]
) -> Iterator[tuple[Path, int]]:
    """Save each file as its step, in order, and give it when it is committed; a later file is
    stored
    as what changed.

    Raises ``ValueError`` before anything is written where the root has one of the steps,
    ``Damaged`` for a file that cannot be read (steps before it are there), ``UnsupportedLeaf``
    naming what cannot be kept, and what ``Engine`` raises.
    """
    with Engine(root) as engine:
        taken = sorted({step for step, _ in files} & set(engine.steps()))
        if taken:
            raise ValueError(f"{engine.root} has step {taken[0]} already; import into another root")
        for step, path in files:
            engine.save(step, read(path)).wait()
            yield path, step
