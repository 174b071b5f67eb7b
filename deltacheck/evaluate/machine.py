"""Where and when something was measured, as far as it matters for the figures; nothing that names a
host or a path.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import deltacheck
from deltacheck.codec import default_codec

_PACKAGES = (
    *("torch", "numpy", "tensorstore", "zarr", "numcodecs", "safetensors", "torch_checkpointing"),
    *("jax", "orbax-checkpoint"),
)


def describe(folder: Path) -> dict[str, Any]:
    """The machine, what runs on it, and the file system that ``folder`` lies on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(folder),
        "load_average": os.getloadavg()[0],  # at the start: how much others use the machine
        "kernel": platform.release(),
        "codec": codec(),
        "versions": {
            "python": platform.python_version(),
            "deltacheck": deltacheck.__version__,
            **_versions(),
        },
    }


def codec() -> str:
    """The encoder in use and, if it is the native one, its kernels. ``reference`` is NumPy: its
    times say nothing.
    """
    name = default_codec().name
    if name != "native":
        return name
    from deltacheck.codec.native import instruction_set, threads

    return f"native, {instruction_set()}, {threads()} threads"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Its type, for example ``ext4``; ``tmpfs`` means that fsync costs nothing and that no time to
    durable has a meaning.
    """
    mounts = Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []
    found = [(Path(line.split()[1]), line.split()[2]) for line in mounts]
    holding = [(len(at.parts), kind) for at, kind in found if folder.resolve().is_relative_to(at)]
    return max(holding)[1] if holding else "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
