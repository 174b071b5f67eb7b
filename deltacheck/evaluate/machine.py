"""A description of the machine that measures, without host names and paths."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import deltacheck
from deltacheck.codec import default_codec

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
            **_versions(),
        },
    }


def codec() -> str:
    """Name the encoder in use and, if it is the native one, its kernels.

    ``reference`` is NumPy; its times have no meaning.
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
    """Return the type of a folder's file system, for example ``ext4``.

    On ``tmpfs``, fsync costs nothing and no time to durable has a meaning.
    """
    lines = Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []
    mounts = [(Path(line.split()[1]), line.split()[2]) for line in lines]
    # The deepest mount point above the folder is the one that holds it.
    depths = [(len(p.parts), kind) for p, kind in mounts if folder.resolve().is_relative_to(p)]
    return max(depths)[1] if depths else "unknown"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
