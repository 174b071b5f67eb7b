"""Provide ``save`` with the signature of ``torch.save``, which writes only changes.

The path that a script saves to becomes a *pointer* (``pointer.py``), so that the script can still
test for its files, list them and rename them. The content goes into a root beside it that all files
of a *series* share. A series are the names that differ only in their last number. ``ckpt_100.pt``
and ``ckpt_200.pt`` are steps 100 and 200 of ``ckpt_#.pt.deltacheck``; each save to ``last.pt`` is
one more step of ``last.pt.deltacheck``.
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
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Keep
from deltacheck.store.files import storage
from deltacheck.store.lock.interrupts import postponed

SUFFIX = ".deltacheck"
# Most series that are open at a time. Each holds a copy of its state.
_OPEN_AT_MOST = 4
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*\Z)")
# A longer number, such as a hash or a time, exceeds what a step may be.
_MOST_DIGITS = 18  # of a step

_open: dict[Path, Engine] = {}  # by root, in the order of their last use
# Held during a whole save, so that two threads never take the same step of a series, and no engine
# is closed while it saves.
_lock = threading.RLock()


class FileSeries(NamedTuple):
    """The root and step that a file name stands for.

    ``step`` is ``None`` if the name has no number; the next step is then used.
    """

    root: Path
    step: int | None


def series_of(path: Path) -> FileSeries:
    """Return the root and the step that a file name stands for.

    The result depends on the name alone, never on the files that exist.
    """
    number = _LAST_NUMBER.search(path.stem)
    if number is None or len(number[0]) > _MOST_DIGITS:
        return FileSeries(path.with_name(path.name + SUFFIX), None)
    stem = f"{path.stem[: number.start()]}#{path.stem[number.end() :]}"
    return FileSeries(path.with_name(stem + path.suffix + SUFFIX), int(number[0]))


@typed
def save(
    obj: object,
    f: str | os.PathLike[str],
    pickle_module: object = pickle,
    pickle_protocol: int | None = None,
    _use_new_zipfile_serialization: bool = True,
    *,
    keep_last: int | None = None,
) -> None:
    """Save ``obj`` as a checkpoint, and write a small file at ``f`` that points to it.

    The checkpoint is durable when the call returns. A process's first save of a series writes whole
    leaves, later ones write only changes. For that the process keeps one copy of the state in
    memory and holds the lease of the root until it ends. ``release`` gives both back.

    Args:
        obj: Nested dicts, lists and tuples of tensors, NumPy arrays, numbers, text, bytes and
            ``None``, as state dicts are.
        f: A path. Its last number is the step; without a number, each save is the next step.
        pickle_module: Must be ``pickle``. It exists for the signature of ``torch.save``.
        pickle_protocol: Has no effect, because nothing is pickled.
        _use_new_zipfile_serialization: Has no effect.
        keep_last: Keep this many steps of the series and delete older ones. ``None``: keep all,
            even those whose file was removed or replaced.

    Raises:
        TypeError: ``f`` is a file object.
        ValueError: ``pickle_module`` is another module.
        IsADirectoryError: ``f`` is a directory.
        UnsupportedLeaf: A value cannot be kept exactly; the message names it.
        RootBusy, SaveFailed: As ``Engine`` raises them.
    """
    if not isinstance(f, str | os.PathLike):
        raise TypeError(
            f"deltacheck saves to a path, not to a {type(f).__name__}: unchanged content is in"
            " a folder beside it. Give a path, or use torch.save for this one"
        )
    # Another pickler may store objects in a way of its own, which this function cannot honour.
    if pickle_module is not pickle:
        raise ValueError(
            "pickle_module has no meaning here, since nothing is pickled; leave it out, or use"
            " torch.save"
        )
    # As ``torch.save`` does, a link is followed: its target is written. A folder that is reached in
    # two ways has one root.
    path = _target(f)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory; save to a file name in it, or use Engine({str(path)!r})"
        )
    series = series_of(path)
    with postponed(), _lock:
        engine = _engine(series.root, keep_last)
        newest = max(engine.steps(), default=-1)
        step = newest + 1 if series.step is None else series.step
        # As after ``torch.save``, the file may be read or copied as soon as this function returns.
        report = engine.save(step, obj).result()
        assert report is not None  # such an engine waits and never skips
        # After the commit: the file must never point to a step that does not exist.
        pointer.write(path, pointer.Pointer(series.root, step, report.seq))


@typed
def release(f: str | os.PathLike[str] | None = None) -> None:
    """Release the memory and the root of one series or of all; the next save writes whole leaves.

    Args:
        f: A file of the series; ``None``: all series.
    """
    with postponed(), _lock:
        for root in list(_open) if f is None else [series_of(_target(f)).root]:
            engine = _open.pop(root, None)
            if engine is not None:
                engine.close()


def _target(f: str | os.PathLike[str]) -> Path:
    return storage.local(f, "a file in torch.save's place").resolve()


def _engine(root: Path, keep_last: int | None) -> Engine:
    # Taken out and put back at the end, so that the first entry is the one unused for longest.
    engine = _open.pop(root, None)
    if engine is None:
        while len(_open) >= _OPEN_AT_MOST:
            _open.pop(next(iter(_open))).close()
        engine = Engine(root, keep=Keep(last=keep_last))
        # A program that is started again replaces files, as with ``torch.save``.
        engine._writer.course.follow("")
    # Each call may pass another ``keep_last``.
    engine._writer.keep = Keep(last=keep_last)
    _open[root] = engine
    return engine
