"""S3, in one process: each call that a public call makes of the system, of TensorStore, of threads,
of memory and of native code fails in turn.

``tests.faults.io_errors`` fails the system calls of a whole life under a preloaded library. This
table has the public calls one by one, and the failures that no system call shows. After each
failure: the error belongs to our exception tree, and the root restores its last acknowledged step.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import inspect
import io
import itertools
import os
import random
import secrets
import shutil
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
import torch

from deltacheck import Keep, SaveOptions, _native
from deltacheck.errors import Damaged, ReceiptFailed
from tests.faults import scenarios
from tests.faults.campaign import Tally, scratch

PREPARED = 3  # steps of the root before each call
# They say nothing about the content of a file.
TRANSIENT = (errno.EMFILE, errno.ESTALE)


def _failures(*numbers: int) -> tuple[Exception, ...]:
    return tuple(OSError(number, os.strerror(number)) for number in numbers)


_STATUS = (
    ValueError("UNAVAILABLE: the disk does not answer [source locations='x.cc:1']"),
    ValueError("RESOURCE_EXHAUSTED: Error writing file: No space left on device [OS error 28]"),
    RuntimeError("INTERNAL: a bug of the storage"),
)


class Kind(NamedTuple):
    """External calls of one kind, as attributes of modules and classes, and how they fail."""

    targets: tuple[tuple[Any, str], ...]
    errors: tuple[Exception, ...]
    on_paths: bool = True  # only those on files of the trial; else those that our modules make


KINDS = {
    "open": Kind(
        ((os, "open"), (io, "open"), (builtins, "open")),
        _failures(errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE),
    ),
    "look": Kind(
        tuple((os, name) for name in ("stat", "lstat", "scandir", "listdir", "fstat", "access")),
        _failures(errno.EIO, errno.ESTALE, errno.EACCES),
    ),
    "change": Kind(
        tuple(
            (os, name)
            for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "link", "utime")
        ),
        _failures(errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO),
    ),
    "data": Kind(
        tuple((os, name) for name in ("pread", "pwrite", "read", "write", "ftruncate")),
        _failures(errno.EIO, errno.ENOSPC),
    ),
    "sync": Kind(((os, "fsync"),), _failures(errno.EIO, errno.ENOSPC)),
    "lock": Kind(((fcntl, "flock"),), _failures(errno.EIO, errno.ENOLCK, errno.ESTALE)),
    "tensorstore": Kind(
        (
            *((ts.KvStore, name) for name in ("read", "write", "list", "open")),
            (ts.TensorStore, "read"),
            (ts.TensorStore, "write"),
            (ts, "open"),
        ),
        _STATUS,
        on_paths=False,
    ),
    "memory": Kind(
        tuple((np, name) for name in ("empty", "zeros", "concatenate", "empty_like", "array")),
        (MemoryError("Unable to allocate 8.00 EiB"),),
        on_paths=False,
    ),
    # The classes of torch and CUDA for memory that cannot be had.
    "torch memory": Kind(
        (
            *((torch, name) for name in ("empty", "empty_like", "zeros", "tensor", "from_numpy")),
            *((torch.Tensor, name) for name in ("clone", "contiguous", "to", "copy_")),
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 EB"),
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 EiB"),
        ),
        on_paths=False,
    ),
    "native": Kind(
        tuple((_native, name) for name, value in vars(_native).items() if callable(value)),
        (MemoryError("std::bad_alloc"), RuntimeError("Resource temporarily unavailable")),
        on_paths=False,
    ),
    "thread": Kind(
        ((threading.Thread, "start"),), (RuntimeError("can't start new thread"),), on_paths=False
    ),
}


class _FailedFuture:
    """A future of TensorStore whose request fails once it is waited for."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.copy = self.commit = self

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class Calls:
    """The external calls below a folder by kind, of which number ``at`` of ``kind`` fails."""

    def __init__(
        self, area: Path, kind: str = "", at: int = -1, error: Exception | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._area, self._kind, self._at, self._error = str(area), kind, at, error
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def failing(self, area: Path | None = None) -> Iterator[None]:
        """Count the calls of this block, and fail the one that is to fail.

        ``area``: count the calls on files below it only.
        """
        self._area = self._area if area is None else str(area)
        raw = []
        for kind, (targets, _, on_paths) in KINDS.items():
            for owner, name in targets:
                # As it stands in the class or module, and not as an attribute of it gives it.
                original = inspect.getattr_static(owner, name)
                raw.append((owner, name, original))
                call: Any = self._wrapped(kind, on_paths, getattr(owner, name))
                setattr(
                    owner, name, staticmethod(call) if isinstance(original, staticmethod) else call
                )
        try:
            yield
        finally:
            for owner, name, original in raw:
                setattr(owner, name, original)

    def _wrapped(self, kind: str, on_paths: bool, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            relevant = (
                any(path.startswith(self._area) for path in _paths(args[:2], kwargs))
                if on_paths
                else "/deltacheck/" in sys._getframe(1).f_code.co_filename
            )
            if relevant and self._is_due(kind):
                assert self._error is not None
                # Every second failure of TensorStore shows when the future is waited for.
                if kind == "tensorstore" and self._at % 2:
                    return _FailedFuture(self._error)
                raise self._error
            return original(*args, **kwargs)

        return call

    def _is_due(self, kind: str) -> bool:
        with self._lock:
            number = self.counts[kind]
            self.counts[kind] += 1
        return kind == self._kind and number == self._at


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, int):
            # Not through ``os``: this function is called by its wrappers.
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/self/fd/{arg}")
        elif isinstance(arg, (str, os.PathLike)):
            path = os.fspath(arg)
            folder = kwargs.get("dir_fd")
            if isinstance(folder, int) and not path.startswith("/"):
                with contextlib.suppress(OSError):
                    path = f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"
            yield path


# --- the public calls -----------------------------------------------------------------------------


@dataclass
class Places:
    """The places of one trial.

    Attributes:
        area: The folder whose files count.
        acknowledged: The steps of ``root`` that must restore.
        armed: The context in which external calls fail.
        problems: The errors that were not ours.
    """

    area: Path
    armed: Callable[..., contextlib.AbstractContextManager[None]]
    acknowledged: set[int] = field(default_factory=lambda: set(range(PREPARED)))
    later: list[Callable[[], object]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.area / "root"

    def engine(self, root: Any = None, **options: Any) -> Any:
        """An engine that is open while calls fail, and closed after it."""
        opened = scenarios.engine(self.root if root is None else root, **options)
        self.later.append(opened.close)
        return opened


PublicCall = Callable[[Places], None]
TORCH: dict[str, PublicCall] = {}
ORBAX: dict[str, PublicCall] = {}


def _in(table: dict[str, PublicCall]) -> Callable[[PublicCall], PublicCall]:
    def add(call: PublicCall) -> PublicCall:
        table[call.__name__] = call
        return call

    return add


@_in(TORCH)
def engine_open(places: Places) -> None:
    with places.armed():
        places.engine()


@_in(TORCH)
def engine_open_new(places: Places) -> None:
    with places.armed():
        places.engine(places.area / "new" / "root")


@_in(TORCH)
def engine_save(places: Places) -> None:
    _save(places, places.engine())


@_in(TORCH)
def engine_save_delta(places: Places) -> None:
    engine = places.engine(keep=Keep(last=2), options=SaveOptions(verify="commit"))
    engine.restore()
    places.acknowledged = {PREPARED - 1}
    _save(places, engine)


@_in(TORCH)
def engine_save_receipt(places: Places) -> None:
    engine = places.engine(options=SaveOptions(verify="commit"))
    with places.armed():
        handle = engine.save(PREPARED, scenarios.torch_state(PREPARED))
        handle.wait(timeout=240)
        places.acknowledged.add(PREPARED)


def _save(places: Places, engine: Any) -> None:
    with places.armed():
        handle = engine.save(PREPARED, scenarios.torch_state(PREPARED))
        handle.wait(timeout=240)
        places.acknowledged.add(PREPARED)
        engine.wait(timeout=240)


@_in(TORCH)
def engine_close(places: Places) -> None:
    engine = places.engine()
    with places.armed():
        engine.save(PREPARED, scenarios.torch_state(PREPARED))
        engine.close(timeout=240)
        places.acknowledged.add(PREPARED)


@_in(TORCH)
def engine_restore(places: Places) -> None:
    engine = places.engine()
    with places.armed():
        engine.restore()


@_in(TORCH)
def engine_restore_into(places: Places) -> None:
    engine = places.engine()
    target = scenarios.torch_state(0)
    with places.armed():
        engine.restore(1, target)


@_in(TORCH)
def engine_tags(places: Places) -> None:
    engine = places.engine()
    with places.armed():
        engine.tag(1, "good")
        engine.tags()
        engine.untag("good")


@_in(TORCH)
def engine_delete(places: Places) -> None:
    engine = places.engine()
    places.acknowledged.discard(0)
    with places.armed():
        engine.delete(0)
        engine.steps()


@_in(TORCH)
def engine_persist(places: Places) -> None:
    disk, memory = places.area / "disk", places.area / "memory"
    with places.armed():
        engine = places.engine(disk, memory=memory)
        engine.save(0, scenarios.torch_state(0))
        engine.persist(timeout=240)
        engine.restore()


@_in(TORCH)
def reader(places: Places) -> None:
    import deltacheck

    with places.armed():
        opened = deltacheck.open(places.root)
        opened.steps()
        opened.restore()
        opened.restore(1, ["weights"], {"bias": (slice(0, 3),)})
        opened.digest()
        opened.tags()


@_in(TORCH)
def reader_verify(places: Places) -> None:
    import deltacheck

    with places.armed():
        deltacheck.open(places.root).verify(deep=True)


@_in(TORCH)
def reader_branch(places: Places) -> None:
    import deltacheck

    with places.armed():
        deltacheck.open(places.root).branch(1, places.area / "branch", copy=True)
        deltacheck.open(places.root).branch(1, places.area / "linked")


@_in(TORCH)
def follow(places: Places) -> None:
    import deltacheck

    with places.armed():
        assert next(iter(deltacheck.follow(places.root, timeout=0))).step == PREPARED - 1


@_in(TORCH)
def mirror(places: Places) -> None:
    import deltacheck

    disk, memory = places.area / "disk", places.area / "memory"
    with scenarios.engine(disk, memory=memory) as engine:
        engine.save(0, scenarios.torch_state(0)).wait(timeout=240)
        with places.armed(), deltacheck.Mirror(memory, places.area / "copy") as made:
            made.poll()


@_in(TORCH)
def files(places: Places) -> None:
    from deltacheck.backends import torch as backend

    with places.armed():
        backend.load(places.root)
        path = places.area / "model-0.pt"
        try:
            backend.save(scenarios.torch_state(0), path)
            backend.load(path)
        finally:
            backend.release(path)


@_in(TORCH)
def dcp(places: Places) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from deltacheck.backends.torch import DeltaStorageReader, DeltaStorageWriter

    state = {"x": torch.arange(70_000.0), "n": 3}
    path = places.area / "dcp"
    with places.armed(), _failure_of_rank(CheckpointException), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        writer = DeltaStorageWriter(path, step=0)
        places.later.append(writer.close)
        dcp.save(state, storage_writer=writer, no_dist=True)
        dcp.load(state, storage_reader=DeltaStorageReader(path, 0), no_dist=True)
        writer.close()


@contextlib.contextmanager
def _failure_of_rank(kind: Any) -> Iterator[None]:
    """DCP gathers the errors of all ranks in one of its own."""
    try:
        yield
    except kind as error:
        for failure, _ in error.failures.values():
            # DCP goes on without metadata that it could not read, and then quotes our error.
            if "global metadata read failed: " not in str(failure):
                raise failure from error


@_in(TORCH)
def object_store(places: Places) -> None:
    import deltacheck

    root = f"memory://faults/{secrets.token_hex(8)}"
    engine = places.engine(root)
    engine.save(0, scenarios.torch_state(0)).wait(timeout=240)
    with places.armed():
        deltacheck.open(root).restore(0)
        deltacheck.open(root).verify(deep=True)
        engine.save(1, scenarios.torch_state(1)).wait(timeout=240)
        engine.restore(0)
        engine.tag(0, "first")
        engine.close()
        places.engine(root)


@_in(TORCH)
def commands(places: Places) -> None:
    """Their exit codes stand for the errors."""
    from deltacheck.cli import main, output

    root = str(places.root)
    places.acknowledged = {1, 2}
    for words in (
        ["ls", root],
        ["log", root],
        ["tag", root, "2", "good"],
        ["verify", root, "--deep"],
        ["prune", root, "--whole"],
        ["export", root, "2", "--to", "npz", "--out", str(places.area / "step.npz")],
        ["prune", root, "0"],
        ["prune", root, "--grace", "0"],
        ["repair", root],
        ["tag", root, "--delete", "good"],
    ):
        said = io.StringIO()
        with (
            places.armed(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
        ):
            code = main(words)
            if code not in range(6) or (code == output.MISUSE):
                raise AssertionError(f"deltacheck {words[0]} ended with {code}: {said.getvalue()}")


@_in(ORBAX)
def manager(places: Places) -> None:
    root = places.area / "manager"
    root.mkdir()
    # Of Orbax's own calls nothing is promised.
    with contextlib.ExitStack() as stack, places.armed(root / "deltacheck"):
        made = stack.enter_context(scenarios.orbax_manager(root))
        scenarios.orbax_save(made, 0)
        scenarios.orbax_save(made, 1)
        made.restore(1)
        stack.close()


@_in(ORBAX)
def manager_load(places: Places) -> None:
    from deltacheck.backends import orbax

    with places.armed():
        orbax.load(places.root)


# --- trials ---------------------------------------------------------------------------------------


class Point(NamedTuple):
    """External call ``at`` of a kind fails with error number ``error`` of that kind."""

    call: str
    kind: str
    error: int
    at: int

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Point:
        call, kind, error, at = text.split(":")
        return cls(call, kind, int(error), int(at))


class Table:
    """The public calls on copies of one prepared root."""

    def __init__(self, calls: Iterable[str] = ()) -> None:
        self.folder = scratch()
        self._calls = {**TORCH, **ORBAX}
        self._names = list(calls) or [*TORCH]
        with scenarios.engine(self.folder / "prepared") as opened:
            for step in range(PREPARED):
                opened.save(step, scenarios.torch_state(step)).wait(timeout=240)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def cells(self) -> dict[tuple[str, str], int]:
        """Return the number of external calls of each kind that each public call makes."""
        counts = {}
        for name in self._names:
            # Twice: what is imported or cached at the first time is not met again.
            for _ in range(2):
                calls: list[Calls] = []
                problems = self._attempt(name, lambda area: Calls(area), calls)
                assert problems == [], (name, problems)
            counts |= {(name, kind): count for kind, count in calls[0].counts.items()}
        return counts

    def attempt(self, point: Point) -> list[str]:
        """Let one external call fail; return the promises that were broken."""
        error = KINDS[point.kind].errors[point.error]
        return self._attempt(
            point.call, lambda area: Calls(area, point.kind, point.at, error), [], error
        )

    def _attempt(
        self,
        name: str,
        make: Callable[[Path], Calls],
        made: list[Calls],
        error: Exception | None = None,
    ) -> list[str]:
        from tests.faults.trials import untyped

        problems: list[str] = []
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as folder:
            area = Path(folder) / "area"
            area.mkdir()
            shutil.copytree(self.folder / "prepared", area / "root")
            calls = make(area)
            made.append(calls)
            places = Places(area, calls.failing)
            try:
                self._calls[name](places)
            except Exception as failure:  # noqa: BLE001 - a finding, if it is not one of ours
                problems += untyped(failure)
                if error is None:
                    problems.append(f"it fails without a fault: {failure!r}")
                problems += _misnamed(failure, error)
            for action in places.later:
                problems += _end(action)
            problems += _check(places)
        return problems


def _end(action: Callable[[], object]) -> list[str]:
    """End what a public call left open; return a problem if it waits for nothing, or if what it
    raises is not one of our errors.
    """
    from tests.faults.trials import untyped

    try:
        action()
    except TimeoutError as failure:
        return [f"it waits for a save that nobody carries out: {failure}"]
    except Exception as failure:  # noqa: BLE001 - a finding, if it is not one of ours
        return untyped(failure)
    return []


def _misnamed(failure: Exception, error: Exception | None) -> list[str]:
    """Return a problem if an error that says nothing about the content is called damage."""
    # A receipt says that the step could not be read back, for whatever reason.
    if not isinstance(failure, Damaged) or isinstance(failure, ReceiptFailed):
        return []
    is_transient = getattr(error, "errno", None) in TRANSIENT
    return [f"called damage, and is none: {failure}"] if is_transient else []


def _check(places: Places) -> list[str]:
    """Return the acknowledged steps that do not restore, and what keeps the next writer away."""
    import deltacheck

    problems = []
    try:
        opened = deltacheck.open(places.root)
        for step in sorted(places.acknowledged)[-1:]:
            different = scenarios.difference(scenarios.state_at(step), opened.restore(step))
            problems += [f"step {step}: {different}"] if different else []
        with scenarios.engine(places.root, options=SaveOptions(durability="process")) as engine:
            engine.save(9, scenarios.torch_state(9)).wait(timeout=240)
    except Exception as error:  # noqa: BLE001 - a finding
        problems.append(f"afterwards: {type(error).__name__}: {error}")
    return problems


def points(cells: dict[tuple[str, str], int]) -> Iterator[Point]:
    """Every external call of every public call, with each error that it may have."""
    for (name, kind), count in cells.items():
        for error, at in itertools.product(range(len(KINDS[kind].errors)), range(count)):
            yield Point(name, kind, error, at)


def drawn(cells: dict[tuple[str, str], int], number: int, rng: random.Random) -> Iterator[Point]:
    """``number`` points, each cell equally often."""
    bag: list[tuple[str, str]] = []
    for _ in range(number):
        bag = bag or rng.sample(sorted(cells), len(cells))
        cell = bag.pop()
        yield Point(*cell, rng.randrange(len(KINDS[cell[1]].errors)), rng.randrange(cells[cell]))


def attempt_all(table: Table, points: Iterable[Point], tally: Tally) -> list[str]:
    """Return the problems of all points, each with its name."""
    problems = []
    for point in points:
        broken = table.attempt(point)
        tally.add(f"{point.call} {point.kind}", bool(broken))
        problems += [f"--replay '{point}': {problem}" for problem in broken]
    return problems


def campaign(
    number: int | None, seed: int, names: Iterable[str] | None = None
) -> tuple[list[str], Tally]:
    """Fail ``number`` external calls, or all; return the problems and the tally."""
    tally = Tally("S3, public calls", seed)
    with Table(names or [*TORCH, *ORBAX]) as table:
        cells = table.cells()
        chosen = points(cells) if number is None else drawn(cells, number, random.Random(seed))
        return attempt_all(table, chosen, tally), tally


def replay(text: str) -> tuple[list[str], Tally]:
    """Fail the external call that a problem names."""
    point = Point.parse(text)
    with Table([point.call]) as table:
        table.cells()
        return attempt_all(table, [point], tally := Tally(f"S3, replay of {text}", 0)), tally
