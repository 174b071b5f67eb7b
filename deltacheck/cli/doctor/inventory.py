"""Collection of the facts that ``doctor`` judges. No framework is imported into this process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import deltacheck
from deltacheck.cli.doctor.environment import (
    Devices,
    Encoder,
    FileSystem,
    MachineFacts,
    Package,
    Steps,
    Trial,
)
from deltacheck.codec.extension import native
from deltacheck.errors import DeltacheckError, NotACheckpointRoot
from deltacheck.evaluate.machine import mount_of
from deltacheck.report import history
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place
from deltacheck.store.roots.opening import is_root_or_fresh, open_root

# Beside the requirements of the base install: the frameworks and their extras.
_FRAMEWORKS = {"torch": "torch", "jax": "jax", "orbax-checkpoint": "jax"}
# The test of a device runs in a process of its own, which may import torch.
_DEVICE_TEST = (
    "import json; from deltacheck.backends.torch.capture import tensor_codec;"
    " print(json.dumps(tensor_codec.self_tests()))"
)
_DEVICE_TEST_SECONDS = 300
_SYNCS = 9


def collect(
    root: str,
    item: str | None = None,
    state_bytes: int | None = None,
    *,
    may_hold_others: bool = False,
) -> MachineFacts:
    """Collect the facts about this machine and a root.

    Args:
        root: Path or URL of the root, which need not exist.
        item: The item of a CheckpointManager's steps.
        state_bytes: Size of the state to plan for. Default: that of the newest step.
        may_hold_others: If true, a folder with other files is no problem: it is only the place
            below which a root will be created.

    Raises:
        ValueError: The address has an unknown scheme.
    """
    place = storage.of(root)
    steps = steps_of(place, item)
    if steps.kind == "none" and may_hold_others:
        steps = Steps(kind="none")
    return MachineFacts(
        python=platform.python_version(),
        packages=packages(),
        encoder=encoder(),
        devices=devices(),
        root=root,
        file_system=file_system(place.absolute()) if isinstance(place, Path) else None,
        steps=steps,
        state_bytes=state_bytes or steps.raw_bytes or None,
        memory_bytes=free_memory(),
        temporary_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
    )


# --- software -------------------------------------------------------------------------------------


def packages() -> tuple[Package, ...]:
    """Return the packages that deltacheck uses, with the versions that are installed."""
    packages = {"deltacheck": Package("deltacheck", deltacheck.__version__)}
    for name, minimum, extra in _requirements():
        if extra is None or _FRAMEWORKS.get(name) == extra:
            with contextlib.suppress(metadata.PackageNotFoundError):
                packages[name] = Package(name, metadata.version(name), minimum, extra)
                continue
            packages[name] = Package(name, None, minimum, extra)
    return tuple(packages.values())


def _requirements() -> list[tuple[str, str | None, str | None]]:
    """Return name, oldest version and extra of each requirement in the metadata of deltacheck."""
    try:
        lines = metadata.requires("deltacheck") or []
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return [(name, None, extra) for name, extra in _FRAMEWORKS.items()]
    parsed = []
    for line in lines:
        requirement = re.match(r"([\w.-]+)(?:\[.*?\])?(?:>=([\w.]+))?", line)
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if requirement is not None:
            parsed.append((requirement[1], requirement[2], extra and extra[1]))
    return parsed


def encoder() -> Encoder:
    """Describe the native module and the processor."""
    return Encoder(
        instruction_set=native.instruction_set(),
        best_instruction_set=native.instruction_sets()[0],
        threads=native.threads(),
        cores=len(os.sched_getaffinity(0)),
        core_quota=_core_quota(),
        jax_handlers=bool(native.registrations()),
    )


def devices() -> Devices:
    """Describe the GPUs, and run the test of the CUDA encoder on each if torch is installed."""
    folder = Path("/proc/driver/nvidia/gpus")
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    if find_spec("deltacheck._native_cuda") is None:
        return Devices(count, False, "", None)
    try:
        from deltacheck import _native_cuda
    except ImportError as error:
        return Devices(count, True, str(error), None)
    problem = _native_cuda.problem() or ""
    return Devices(count, True, problem, None if problem else _device_tests())


def _device_tests() -> dict[str, str] | None:
    """Return the result of the CUDA encoder's test on each device; ``None`` if it cannot run."""
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    try:
        result = subprocess.run(
            [sys.executable, "-c", _DEVICE_TEST],
            capture_output=True,
            text=True,
            check=True,
            timeout=_DEVICE_TEST_SECONDS,
        )
        results: dict[str, str] = json.loads(result.stdout)
    # Whatever ends the process, a save would meet it too, so it counts as a failed test.
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return {"cuda": f"the test ended with status {error.returncode}: {last_line}"}
    except (subprocess.TimeoutExpired, ValueError) as error:
        return {"cuda": f"the test gave no result: {error}"}
    return results


# --- control groups and memory --------------------------------------------------------------------


def _core_quota() -> float | None:
    """Return the processors that the control group may use at a time; ``None``: no quota."""
    for text in _group_values("cpu.max"):
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    quotas = [int(text) for text in _group_values("cpu/cpu.cfs_quota_us")]
    periods = [int(text) for text in _group_values("cpu/cpu.cfs_period_us")]
    return quotas[0] / periods[0] if quotas and periods and quotas[0] > 0 else None


def free_memory() -> int:
    """Return the bytes that this process can still get, on the machine and in its container."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        # The system frees its caches for a process, and this number includes them.
        match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        available = int(match[1]) << 10 if match is not None else available
    for limit_name, used_name, statistics_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        limits, used = _group_values(limit_name), _group_values(used_name)
        if limits and used and limits[0].isdigit():
            cache = re.search(r"^inactive_file (\d+)", _group_values(statistics_name)[0], re.M)
            cached_bytes = int(cache[1]) if cache is not None else 0
            available = min(available, int(limits[0]) - int(used[0]) + cached_bytes)
    return max(available, 0)


def _group_values(name: str) -> list[str]:
    """Return the content of a file of the control group in which this process sees itself."""
    try:
        return [Path("/sys/fs/cgroup", name).read_text().strip()]
    except OSError:
        return []


# --- the root -------------------------------------------------------------------------------------


def steps_of(root: Place, item: str | None = None) -> Steps:
    """Describe the steps of a root."""
    try:
        opened = open_root(root, item)
        references = opened.checkpoints()
        if not references:
            return Steps()
        newest = opened.manifest()
    except NotACheckpointRoot:
        return Steps(_obstacle(root), "none")
    except (DeltacheckError, OSError) as error:
        return Steps(str(error))
    return Steps(
        count=len(references),
        newest=newest.step,
        raw_bytes=newest.raw_bytes,
        stored_bytes=history.stored_bytes(newest),
    )


def _obstacle(root: Place) -> str:
    """Return the reason why no root can be created at a place; empty: it can."""
    if isinstance(root, Path) and root.exists() and not root.is_dir():
        return f"{root} is a file"
    try:
        is_root_or_fresh(root)
    except (DeltacheckError, OSError) as error:
        return str(error)
    return ""


def file_system(root: Path) -> FileSystem:
    """Describe the file system of a local root, or of the folder in which it would be created."""
    folder = next(parent for parent in (root, *root.parents) if os.path.isdir(parent))
    space = os.statvfs(folder)
    return FileSystem(
        mount=mount_of(folder),
        trial=try_files(folder),
        free_bytes=space.f_bavail * space.f_frsize,
        # A file system without a table of inodes reports none at all.
        free_files=space.f_favail if space.f_files else None,
    )


def try_files(folder: Path) -> Trial:
    """Create, lock and sync small files in a new folder, and remove it.

    The files are written by the function that commits a step.
    """
    content = b"\0" * 4096
    try:
        with tempfile.TemporaryDirectory(prefix=".deltacheck-doctor-", dir=folder) as name:
            own_folder = storage.of(name)
            files = storage.storage_of(own_folder)
            created = [
                files.create_file("first", content, Durability.PROCESS, None) for _ in range(2)
            ]
            path = Path(name, "first")
            return Trial(
                flock=_try_locks(path),
                exclusive=created == [True, False],
                sync_seconds=_sync_seconds(path, content),
            )
    except (OSError, DeltacheckError) as error:
        return Trial(error=str(error))


def _try_locks(path: Path) -> str:
    # Two open files, as two processes would have.
    with path.open("rb+") as first, path.open("rb+") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "excludes"
        except OSError as error:
            return str(error)
        return "admits"


def _sync_seconds(path: Path, content: bytes) -> float | None:
    durations = []
    with path.open("rb+", buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(content)
            start = time.perf_counter()
            try:
                os.fsync(file.fileno())
            except OSError:
                return None
            durations.append(time.perf_counter() - start)
    return statistics.median(durations)
