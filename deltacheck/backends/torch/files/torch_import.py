"""Make steps of a root from files of other formats: safetensors, ``torch.save``, model folders.

No code of a file is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deltacheck.backends.hugging_face.model_folder import description_files, model_folder
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import numpy_pickle
from deltacheck.backends.torch.files.numpy_pickle import refusal
from deltacheck.backends.torch.state import leaves
from deltacheck.errors import Damaged

SAFETENSORS = ".safetensors"
# The suffixes that are in use for files of ``torch.save``.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Names of transformers: architectures that compute logits, and their embeddings.
_WITH_LOGITS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_OUTPUT_EMBEDDINGS = "lm_head.weight"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\Z")  # one file of a model in several files


def steps_of(
    files: Iterable[str | os.PathLike[str]], step: int | None = None
) -> list[tuple[int, Path]]:
    """Return the step and path of each file, ascending.

    The step is the last number in the file's name, or else in its folder's. For a model folder it
    is the last number in the folder's name.

    Args:
        files: Files, and folders of models.
        step: The step of the file, if there is only one.

    Raises:
        ValueError: A file has no number, two have the same one, a file is a part of a model, or a
            name has no known suffix. The message names the file.
    """
    by_step: dict[int, Path] = {}
    for path in map(Path, files):
        is_folder = path.is_dir()
        if not is_folder and path.suffix not in (SAFETENSORS, *SUFFIXES):
            raise ValueError(
                f"{path} is not called as one of {', '.join((SAFETENSORS, *SUFFIXES))}, which say"
                " the format"
            )
        # Imported alone, each part would be a step with a part of the model.
        if _PART.search(path.stem):
            raise ValueError(
                f"{path} is a part of a model that lies in several files; name their folder"
            )
        # Transformers, for example, writes ``checkpoint-200/model.safetensors``.
        numbers = re.findall(r"\d+", path.absolute().name if is_folder else path.stem)
        if not numbers and not is_folder:
            numbers = re.findall(r"\d+", path.absolute().parent.name)
        if step is None and not numbers:
            raise ValueError(
                f"{path} has no number in its name; say the step"
                if is_folder
                else f"neither {path.name} nor its folder has a number; say the step"
            )
        number = int(numbers[-1]) if step is None else step
        if number in by_step:
            raise ValueError(
                f"{by_step[number]} and {path} are both step {number}; leave one of them in a"
                " folder of its own"
            )
        by_step[number] = path
    return sorted(by_step.items())


def files(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the step and path of each file of a folder that ``torch.save`` may have written.

    The step is the last number in the name. The result is in ascending order.

    Raises:
        ValueError: Two files have the same number, or a file is a part of a model.
    """
    return steps_of(
        path
        for path in sorted(Path(folder).iterdir())
        if path.suffix in SUFFIXES and re.search(r"\d", path.stem)
    )


def read(path: Path, *, tie: bool = False) -> object:
    """Return the content of a file. Tensors are mapped if the file allows it.

    Of safetensors it is a dict of tensors by key, without the file's metadata. Of a model folder it
    is ``{"model": tensors by name, "files": content by name}``.

    Args:
        path: A file or a model folder.
        tie: Give the input embeddings of a model folder the name of the output embeddings, too, if
            the model ties them.

    Raises:
        FileNotFoundError: There is no such file, or a shard is missing.
        Damaged: The file cannot be read, or not without running code. The message names it.
        UnsupportedLeaf: A file beside the weights of a folder is too long.
    """
    if path.is_dir():
        content = _model(path)
        if tie:
            _tie(content["model"], content["files"])
        return content
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return _file(path)


def _file(path: Path) -> object:
    with _as_damage(path):
        if path.suffix == SAFETENSORS:
            from safetensors.torch import load_file

            # In a fixed order, so that the trees of all steps are the same.
            return dict(sorted(load_file(path).items()))
        return _torch(path)


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Return a context in which a file that cannot be read is ``Damaged``."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path.name} needs safetensors: pip install safetensors"
        ) from error
    except Exception as error:  # noqa: BLE001 - torch raises many types
        raise Damaged(
            f"{path} cannot be read without running code from it: {type(error).__name__}:"
            f" {refusal(error)}."
            " If you trust the file, name its classes with torch.serialization.add_safe_globals, or"
            " load it yourself and save what it holds with Engine"
        ) from None  # torch's text advises to run the file


def _model(path: Path) -> dict[str, Any]:
    """Return the weights and the other files of a model folder."""
    folder = model_folder(path)
    files = {
        file.relative_to(path).as_posix(): np.frombuffer(file.read_bytes(), np.uint8)
        for file in description_files(path)
    }
    weights: dict[str, object] = {}
    for shard in folder.shards:
        content = _file(shard)
        if not isinstance(content, dict):
            raise Damaged(f"{shard} holds a {type(content).__name__}, not tensors by name")
        folder.check(shard, set(content))
        weights |= content
    return {"model": dict(sorted(weights.items())), "files": files}


def _tie(weights: dict[str, Any], files: dict[str, Any]) -> None:
    """Add the name of tied output embeddings, which a state dict has and a file leaves out.

    A model that computes logits has output embeddings. If the file has none, they are tied to the
    only input embeddings. A name too many does no harm: it takes no space.
    """
    try:
        architectures = json.loads(bytes(files["config.json"]))["architectures"]
        computes_logits = str(architectures[0]).endswith(_WITH_LOGITS)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        return
    inputs = [name for name in weights if name.endswith(_INPUT_EMBEDDINGS)]
    if computes_logits and len(inputs) == 1:
        weights.setdefault(_OUTPUT_EMBEDDINGS, weights[inputs[0]])


def read_torch(path: Path, map_location: Any = None) -> Any:
    """Return the content of a file of ``torch.save``, whatever its name is.

    Args:
        path: The file.
        map_location: As for ``torch.load``; ``None``: the host.

    Raises:
        Damaged: The file cannot be read, or not without running code from it. The message names it.
    """
    # Not mapped: a training keeps tensors of it, and may replace the file.
    with _as_damage(path):
        return numpy_pickle.load(path, map_location=map_location or "cpu")


def _torch(path: Path) -> object:
    try:
        return numpy_pickle.load(path, map_location="cpu", mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # Files from before torch 1.6 cannot be mapped.
        return numpy_pickle.load(path, map_location="cpu")


def ingest(
    root: str | os.PathLike[str], files: list[tuple[int, Path]], *, tie: bool = False
) -> Iterator[tuple[Path, int]]:
    """Save each file as its step, in order, and yield it when it is committed.

    Each file after the first is stored as changes. ``tie``: as ``read`` has it.

    Raises:
        ValueError: The root has one of the steps. Nothing was written.
        Damaged: A file cannot be read. The steps before it are committed.
        UnsupportedLeaf: A value cannot be kept exactly; the message names it.
    """
    # Before the root is made, so that a refusal leaves none.
    first = [read(path, tie=tie) for _, path in files[:1]]
    for state in first:
        leaves.flatten(state)
    with Engine(root) as engine:
        # Before the first save, so that a refused import writes nothing.
        existing = sorted({step for step, _ in files} & set(engine.steps()))
        if existing:
            raise ValueError(
                f"{engine.root} has step {existing[0]} already; import into another root"
            )
        # Files of one run may be imported in several calls, and in any order.
        engine._writer.course.follow("")
        for step, path in files:
            # Each step is committed before the next file is read, so a damaged file does not affect
            # it.
            engine.save(step, first.pop() if first else read(path, tie=tie)).wait()
            yield path, step
