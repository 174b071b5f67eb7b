"""Collection of the facts that ``doctor`` judges. No framework is imported into this process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import deltacheck
from deltacheck.cli.doctor.environment import (
    Devices,
    Encoder,
    FileSystem,
    MachineFacts,
    Steps,
    Trial,
)
from deltacheck.codec.extension import native
from deltacheck.errors import DeltacheckError, NotACheckpointRoot
from deltacheck.evaluate.machine import mount_of, versions
from deltacheck.store.files import storage
from deltacheck.store.files.durability import Durability
from deltacheck.store.files.storage import Place
from deltacheck.store.roots.opening import is_root_or_fresh, open_root

# Packages whose versions decide how deltacheck works.
_PACKAGES = ("numpy", "tensorstore", "torch", "jax", "orbax-checkpoint")
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
        packages={"deltacheck": deltacheck.__version__, **versions(_PACKAGES)},
        encoder=encoder(),
        devices=devices(),
        root=root,
        file_system=file_system(place.absolute()) if isinstance(place, Path) else None,
        steps=steps,
        state_bytes=state_bytes or steps.raw_bytes or None,
        memory_bytes=free_memory(),
    )


# --- software -------------------------------------------------------------------------------------


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
    if find_spec("torch") is None:
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
    quota, _, period = _group_value("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def free_memory() -> int:
    """Return the bytes that this process can still get, on the machine and in its container."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        # The system frees its caches for a process, and this number includes them.
        match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        available = int(match[1]) << 10 if match is not None else available
    limit, used = _group_value("memory.max"), _group_value("memory.current")
    if limit.isdigit() and used:
        cache = re.search(r"^inactive_file (\d+)", _group_value("memory.stat"), re.M)
        cached_bytes = int(cache[1]) if cache is not None else 0
        available = min(available, int(limit) - int(used) + cached_bytes)
    return max(available, 0)


def _group_value(name: str) -> str:
    """Return the content of a file of the control group in which this process sees itself."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


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
