"""The fault shim from Python: build it, preload it, arm it, read its traces.

A process that runs under ``environment()`` has ``shim.c`` between itself and the C library. ``arm``
turns it on for the paths at or below one root; every mutating call there then has a number, 0, 1,
2, ..., in the order in which the calls were made (one at a time), and ``Fault`` says what becomes
of which.

*Trace.* ``trace(path)`` appends one binary record for each counted call, after it was carried out,
to a file that must lie outside the root; ``read_trace`` gives them back as ``Op``. A record is a
fixed header (``_HEADER``), the path, the other path and the data. Inode numbers tell files apart
from names: an ``open`` with ``created`` or a ``mkdir`` begins a file's life under its ``inode``,
writes and syncs name the inode they go to, a rename moves ``inode`` from ``path`` to ``other`` and
drops ``other_inode`` if that is not 0. Inode numbers are used again once a file has gone. A call
that failed is there too, with its ``error``; one that the process was killed *before* is not, one
that it was killed *inside* is, with the bytes that were written. ``mark(text)`` puts a record of
the kind ``mark`` and no number among them, with the text as its path: the scenarios mark ``ack
STEP`` where a save was acknowledged as durable.

What it cannot see: raw system calls (``syscall``, static binaries), the C library's own calls
inside stdio (``fwrite``), memory mappings once they are made, and io_uring.
``tests/faults/test_crash_points.py`` compares its count with strace's.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("shim.c")
KINDS = (
    "open",
    "write",
    "truncate",
    "sync",
    "rename",
    "link",
    "symlink",
    "unlink",
    "mkdir",
    "rmdir",
    "allocate",
    "map",
    "look",
    "mark",
)
MUTATING = frozenset(KINDS) - {
    "look",
    "mark",
}  # look: an open that creates nothing. Counted on request only
SYNC_KINDS = ("fsync", "fdatasync", "sync_file_range", "syncfs")  # ``Op.flags`` of a sync

_MAGIC = 0x50416C44
_HEADER = struct.Struct("<4I2q3Q6IQ")
_NO_NUMBER = 0xFFFFFFFF


class Mode(enum.IntEnum):
    """The effect on call number ``at``. The numbers are permanent: shim.c has them too.

    ``KILL``: SIGKILL before it. ``TORN``: SIGKILL inside it: half of a write's bytes are written;
    anything else is carried out, but never returns. ``FAIL``: it fails; ``FAIL_FROM``: so does
    every later one. ``SHORT``: a write takes half of the bytes. ``HANG``: it does not return before
    ``release``; calls of other threads go on.
    """

    OFF = 0
    COUNT = 1
    KILL = 2
    TORN = 3
    FAIL = 4
    FAIL_FROM = 5
    SHORT = 6
    HANG = 7


@dataclass(frozen=True, slots=True)
class Fault:
    """The effect on call number ``at`` among the calls of ``kinds`` below the root; ``error``: an
    ``errno``, where it fails.
    """

    mode: Mode = Mode.COUNT
    at: int = 0
    error: int = 0
    kinds: frozenset[str] = MUTATING

    def as_json(self) -> dict[str, Any]:
        """For another process: see ``of_json``."""
        return {
            "mode": int(self.mode),
            "at": self.at,
            "error": self.error,
            "kinds": sorted(self.kinds),
        }

    @classmethod
    def of_json(cls, told: dict[str, Any]) -> Fault:
        """Return the fault that ``as_json`` encoded."""
        return cls(Mode(told["mode"]), told["at"], told["error"], frozenset(told["kinds"]))

    def __str__(self) -> str:
        kinds = "" if self.kinds == MUTATING else f" of {'+'.join(sorted(self.kinds))}"
        error = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{self.mode.name}{error} at {self.at}{kinds}"


@dataclass(frozen=True, slots=True)
class Op:
    """One call below the root, as it was carried out.

    ``number``: of the call, ``None`` for a mark. ``kind``: of ``KINDS``. ``path``, ``other``:
    relative to the root, ``"."`` for the root itself, ``""`` where there is none or (of a rename or
    link) it lies elsewhere; ``other`` is what a rename or link makes, and what a symlink says.
    ``offset``, ``length``: bytes asked to be written, allocated or mapped; of a ``truncate``,
    ``offset`` is the new length. ``result``: what the call returned; bytes written. ``error``: an
    ``errno``, 0 where it succeeded. ``flags``: of ``open`` and ``renameat2``; of a ``sync`` an
    index of ``SYNC_KINDS``. ``inode``: of ``path`` (of the opened or made file); ``other_inode``:
    of what lay at ``other`` before. ``created``: the open made the file. ``thread``: the kernel's
    number. ``data``: what was written.
    """

    number: int | None
    kind: str
    path: str
    other: str
    offset: int
    length: int
    result: int
    error: int
    flags: int
    inode: int
    other_inode: int
    created: bool
    thread: int
    data: bytes

    def __str__(self) -> str:
        what = f"{self.path} -> {self.other}" if self.other else self.path
        size = f" [{self.offset}, +{self.result} of {self.length}]" if self.kind == "write" else ""
        failed = f" {errno.errorcode.get(self.error, self.error)}" if self.error else ""
        return f"{'' if self.number is None else self.number:>4} {self.kind:8} {what}{size}{failed}"


def read_trace(path: str | os.PathLike[str]) -> list[Op]:
    """Every record of a trace, in order. Raises ``ValueError`` where it is not one."""
    content, at, ops = Path(path).read_bytes(), 0, []
    while at < len(content):
        (
            magic,
            number,
            kind,
            error,
            result,
            offset,
            length,
            inode,
            other_inode,
            flags,
            thread,
            created,
            path_bytes,
            other_bytes,
            _,
            data_bytes,
        ) = _HEADER.unpack_from(content, at)
        if magic != _MAGIC:
            raise ValueError(f"{path} is not a trace: no record begins at byte {at}")
        at += _HEADER.size
        name = os.fsdecode(content[at : at + path_bytes])
        at += path_bytes
        other = os.fsdecode(content[at : at + other_bytes])
        at += other_bytes
        data = content[at : at + data_bytes]
        at += data_bytes
        ops.append(
            Op(
                None if number == _NO_NUMBER else number,
                KINDS[kind],
                name,
                other,
                offset,
                length,
                result,
                error,
                flags,
                inode,
                other_inode,
                bool(created),
                thread,
                data,
            )
        )
    return ops


# --- build and preload ----------------------------------------------------------------------------


def compiler() -> str | None:
    """The C compiler, where there is one."""
    return shutil.which("gcc") or shutil.which("cc")


@cache
def library() -> Path:
    """The built shim; built once for each version of its source. Raises ``RuntimeError`` where
    there is no compiler.
    """
    gcc = compiler()
    if gcc is None:
        raise RuntimeError("the fault shim needs gcc or cc, and there is none")
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"deltacheck-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"shim-{key}.so"
    if not built.exists():
        making = folder / f"{built.name}.{os.getpid()}"
        command = [
            gcc,
            "-std=gnu11",
            "-O2",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Werror",
            str(SOURCE),
            "-o",
            str(making),
            "-ldl",
            "-pthread",
        ]
        subprocess.run(command, check=True, timeout=240)
        making.rename(built)
    return built


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that runs under the shim; one thread a process, JAX on the
    processor.
    """
    return {
        **os.environ,
        "LD_PRELOAD": str(library()),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        **more,
    }


# --- from inside a process that runs under it -----------------------------------------------------


@cache
def _loaded() -> ctypes.CDLL:
    shim = ctypes.CDLL(None)
    shim.shim_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_uint,
    ]
    shim.shim_count.restype = shim.shim_hits.restype = ctypes.c_long
    shim.shim_trace.argtypes = shim.shim_mark.argtypes = [ctypes.c_char_p]
    return shim


def is_loaded() -> bool:
    """Return whether this process runs under the shim."""
    return hasattr(ctypes.CDLL(None), "shim_arm")


def arm(root: str | os.PathLike[str], fault: Fault) -> None:
    """Count from 0 the calls on paths at or below ``root``, and let the fault happen."""
    kinds = sum(1 << KINDS.index(kind) for kind in fault.kinds)
    _loaded().shim_arm(
        os.fsencode(os.path.realpath(root)), fault.mode, fault.at, fault.error, kinds
    )


def disarm() -> None:
    """Let every call through again; nothing is counted."""
    _loaded().shim_arm(b"/", Mode.OFF, 0, 0, 0)


def release() -> None:
    """The fault is over: what hangs goes on, and nothing fails any more."""
    _loaded().shim_release()


def count() -> int:
    """Calls counted since ``arm``."""
    return int(_loaded().shim_count())


def hits() -> int:
    """Calls that the fault has hit since ``arm``."""
    return int(_loaded().shim_hits())


def trace(path: str | os.PathLike[str] | None) -> None:
    """Record every counted call from now on in a new file, which must lie outside the root;
    ``None``: stop.
    """
    error = _loaded().shim_trace(None if path is None else os.fsencode(path))
    if error:
        raise OSError(error, os.strerror(error), str(path))


def mark(text: str) -> None:
    """Put a mark into the trace; nothing happens where none is taken, or not under the shim."""
    if is_loaded():
        _loaded().shim_mark(text.encode())
