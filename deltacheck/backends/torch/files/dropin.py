"""``save`` with the signature of ``torch.save``: a training script changes one import and writes
only
what changed.

The path that a script saves to becomes a *pointer* (``pointer.py``), so that what the script does
with its files (look whether one is there, list them, rename them) goes on working. The content goes
into a root beside it that all files of a *series* share: names that differ in their last number
only. ``ckpt_100.pt`` and ``ckpt_200.pt`` are steps 100 and 200 of ``ckpt_#.pt.deltacheck``; each
save to ``last.pt`` is one more step of ``last.pt.deltacheck``.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from pathlib import Path
from typing import NamedTuple

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import pointer
from deltacheck.policy.retention import Retention
from deltacheck.store.files import storage

SUFFIX = ".deltacheck"
_OPEN_AT_MOST = 4  # series; each holds a copy of its state to compare with
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*\Z)")
_MOST_DIGITS = 18  # a longer number is no step

_open: dict[Path, Engine] = {}  # by root, the one used last at the end
_lock = threading.Lock()


class Series(NamedTuple):
    """Where the content of a file goes. ``step``: ``None`` where the name has no number and the
    next one is taken.
    """

    root: Path
    step: int | None


def series_of(path: Path) -> Series:
    """The root and the step that a file name means; the same for the same name, whatever is on
    disk.
    """
    found = _LAST_NUMBER.search(path.stem)
    if found is None or len(found[0]) > _MOST_DIGITS:
        return Series(path.with_name(path.name + SUFFIX), None)
    stem = f"{path.stem[: found.start()]}#{path.stem[found.end() :]}"
    return Series(path.with_name(stem + path.suffix + SUFFIX), int(found[0]))


def save(
    obj: object,
    f: str | os.PathLike[str],
    pickle_module: object = pickle,
    pickle_protocol: int | None = None,
    _use_new_zipfile_serialization: bool = True,
    *,
    keep_last: int | None = None,
) -> None:
    """Save ``obj`` as a checkpoint and write a small file at ``f`` that stands for it; durable when
    the call returns.

    ``obj``: nested dicts, lists and tuples of tensors, NumPy arrays, numbers, text, bytes and
    ``None``, as state dicts are. ``f``: a path. Its last number is the step; without one each save
    is the next step. A process's first save of a series writes whole leaves, later ones only what
    changed; for that it keeps one copy of the state in memory and the root to itself until it ends
    (``release`` gives both back). ``keep_last``: delete all but so many steps of the series
    (default: keep all, also those whose file was removed or replaced). ``pickle_module``,
    ``pickle_protocol``, ``_use_new_zipfile_serialization``: taken for the sake of ``torch.save``'s
    signature; nothing is pickled.

    Raises ``UnsupportedLeaf`` naming what cannot be kept exactly, ``TypeError`` for a file object,
    and what ``Engine`` raises.
    """
    if not isinstance(f, str | os.PathLike):
        raise TypeError(
            f"deltacheck saves to a path, not to a {type(f).__name__}: what did not change lies in"
            " a folder beside it. Give a path, or use torch.save for this one"
        )
    if pickle_module is not pickle:
        raise ValueError(
            "pickle_module has no meaning here, since nothing is pickled; leave it out, or use"
            " torch.save"
        )
    path = storage.local(f, "a file in torch.save's place").absolute()
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory; save to a file name in it, or use Engine({str(path)!r})"
        )
    series = series_of(path)
    with _lock:
        engine = _engine(series.root, keep_last)
        newest = max(engine.steps(), default=-1)
        step = newest + 1 if series.step is None else series.step
        report = engine.save(step, obj).result()
        assert report is not None  # such an engine waits and never skips
        pointer.write(path, pointer.Pointer(series.root, step, report.seq))


def release(f: str | os.PathLike[str] | None = None) -> None:
    """Give back the memory and the root of the series of ``f``, or of all; its next save writes
    whole leaves again.
    """
    with _lock:
        for root in list(_open) if f is None else [series_of(Path(f).absolute()).root]:
            engine = _open.pop(root, None)
            if engine is not None:
                engine.close()


def _engine(root: Path, keep_last: int | None) -> Engine:
    engine = _open.pop(root, None)
    if engine is None:
        while len(_open) >= _OPEN_AT_MOST:
            _open.pop(next(iter(_open))).close()
        engine = Engine(root, keep_last=keep_last)
    engine._writer.retention = Retention(last=keep_last)
    _open[root] = engine
    return engine
