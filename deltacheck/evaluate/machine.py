"""A description of the machine that measures, without host names and paths."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import deltacheck
from deltacheck.codec.extension import native

# The packages whose versions may change a measurement.
_PACKAGES = (
    *("torch", "numpy", "tensorstore", "zarr", "numcodecs", "safetensors", "torch_checkpointing"),
    *("jax", "orbax-checkpoint"),
)


def describe(folder: Path) -> dict[str, Any]:
    """Describe the machine, its software, and the file system of ``folder``."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        # The cores that this process may use. In a container they may be fewer than the machine's.
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(folder),
        "load_average": os.getloadavg()[0],  # at the start: how busy others keep the machine
        "kernel": platform.release(),
        "codec": codec(),
        "versions": {
            "python": platform.python_version(),
            "deltacheck": deltacheck.__version__,
            **{name: number for name, number in versions(_PACKAGES).items() if number},
        },
    }


def codec() -> str:
    """Name the encoder and its kernels."""
    return f"native, {native.instruction_set()}, {native.threads()} threads"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system, for example ``ext4``.

    On ``tmpfs``, fsync costs nothing and no time to durable has a meaning.
    """
    mount = mount_of(folder)
    return "unknown" if mount is None else mount.kind


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: The folder that it is mounted at.
        kind: Type, for example ``ext4`` or ``nfs4``.
        options: Options of the mount and of the file system, for example ``rw`` or ``nolock``.
    """

    point: str
    kind: str
    options: frozenset[str]


def mount_of(folder: Path) -> Mount | None:
    """Return the mount that holds a folder; ``None`` if the system does not list its mounts."""
    table = Path("/proc/self/mountinfo")
    return innermost_mount(table.read_text(), folder.resolve()) if table.exists() else None


def innermost_mount(table: str, folder: Path) -> Mount | None:
    """Return the mount of a folder from the text of ``/proc/self/mountinfo``.

    Args:
        table: The text, in the format of proc(5).
        folder: An absolute path without links.
    """
    mounts = []
    for line in table.splitlines():
        place, _, file_system = line.partition(" - ")
        # The kernel writes spaces and backslashes in paths as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place.split()[4])
        kind, _, *more = file_system.split()
        options = {*place.split()[5].split(","), *",".join(more).split(",")}
        if folder.is_relative_to(point):
            mounts.append(Mount(point, kind, frozenset(options - {""})))
    # The deepest mount point above the folder holds it. Of several mounts at one point the last one
    # hides the others, and ``max`` returns the first of equals.
    return max(reversed(mounts), key=lambda mount: len(Path(mount.point).parts), default=None)


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of packages by name, ``None`` for those that are not installed."""
    numbers: dict[str, str | None] = {}
    for name in packages:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = None
    return numbers
