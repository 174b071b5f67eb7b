"""Tests of ``doctor``: each check on planted facts, and the facts of this machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.doctor import inventory
from deltacheck.cli.doctor.diagnosis import Line, diagnose
from deltacheck.cli.doctor.environment import (
    Devices,
    Encoder,
    FileSystem,
    MachineFacts,
    Steps,
    Trial,
)
from deltacheck.evaluate.machine import Mount, innermost_mount

GIB = 1 << 30
HEALTHY = MachineFacts(
    python="3.12.1",
    packages={"deltacheck": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0+cpu", "jax": None},
    encoder=Encoder("x86-64-v4", "x86-64-v4", 8, 16, None, True),
    devices=Devices(1, True, "", {"cuda:0": ""}),
    root="my root",
    file_system=FileSystem(
        Mount("/", "ext4", frozenset({"rw"})), Trial(sync_seconds=1e-4), 100 * GIB
    ),
    steps=Steps("", "root", 3, 20, 4 * GIB),
    state_bytes=4 * GIB,
    memory_bytes=64 * GIB,
)


def changed(record: Any, path: str, value: Any) -> Any:
    """Return a record with another value of a field, which may be a field of a field."""
    name, _, rest = path.partition(".")
    return replace(record, **{name: changed(getattr(record, name), rest, value) if rest else value})


def test_a_healthy_machine_has_no_degraded_line() -> None:
    lines = diagnose(HEALTHY)
    assert {line.status for line in lines} == {"ok"}
    names = [line.name for line in lines]
    assert {"torch", "jax"} < set(names)
    assert len(names) == len(set(names))
    stored_elsewhere = [line.name for line in diagnose(replace(HEALTHY, file_system=None))]
    assert stored_elsewhere[-2:] == ["root", "storage"]


OPTIONS = "file_system.mount.options"
KIND = "file_system.mount.kind"
TRIAL = "file_system.trial"
FREE = "file_system.free_bytes"


@pytest.mark.parametrize(
    ("path", "value", "name", "status", "words"),
    [
        ("encoder.instruction_set", "plain", "instruction set", "degraded", "DELTACHECK_ISA"),
        ("encoder.core_quota", 2.0, "threads", "degraded", "2 at a time"),
        ("encoder.cores", 1, "threads", "degraded", "1 core"),
        ("devices.built", False, "CUDA", "degraded", "DELTACHECK_CUDA=ON"),
        ("devices.problem", "old driver", "CUDA", "degraded", "1 GPU, but old driver"),
        ("devices.tests", {"cuda:0": "rows differ"}, "CUDA", "degraded", "rows differ"),
        ("devices.tests", {}, "CUDA", "degraded", "torch sees no device"),
        ("devices.tests", None, "CUDA", "ok", "not verified"),
        ("devices", Devices(0, False, "", None), "CUDA", "ok", "no GPU"),
        ("devices", Devices(0, True, "no driver", None), "CUDA", "ok", "no GPU; built"),
        ("memory_bytes", 4 * GIB, "memory", "degraded", "host_cache_bytes"),
        ("memory_bytes", 3 * GIB, "memory", "broken", "mapped"),
        ("steps", Steps("it is torn"), "root", "broken", "verify 'my root'"),
        ("steps", Steps("it is a file", "none"), "root", "broken", "new or empty folder"),
        (f"{TRIAL}.error", "read-only", "write access", "broken", "read-only"),
        (f"{TRIAL}.exclusive", False, "write access", "broken", "created twice"),
        (KIND, "tmpfs", "file system", "degraded", "machine stops"),
        (KIND, "overlay", "file system", "degraded", "container"),
        (KIND, "fuse.sshfs", "file system", "degraded", "fuse.sshfs"),
        (KIND, "nfs4", "file system", "degraded", "server syncs"),
        (f"{TRIAL}.sync_seconds", 1e-6, "fsync", "degraded", "too fast"),
        (f"{TRIAL}.sync_seconds", None, "fsync", "broken", "fails"),
        (f"{TRIAL}.flock", "admits", "flock", "degraded", "second writer"),
        (f"{TRIAL}.flock", "not implemented", "flock", "broken", "not implemented"),
        (OPTIONS, {"local_lock=all"}, "flock", "degraded", "this machine only"),
        (FREE, 2 * GIB, "space", "degraded", "whole leaves"),
    ],
)
def test_a_planted_fact_changes_the_line_of_its_check(
    path: str, value: object, name: str, status: str, words: str
) -> None:
    value = frozenset(value) if isinstance(value, set) else value
    line = next(line for line in diagnose(changed(HEALTHY, path, value)) if line.name == name)
    assert line.status == status, line
    assert words in " | ".join((line.text, line.cost, line.remedy))
    # The promise of the three states.
    assert bool(line.cost) == (status == "degraded")
    assert line.remedy or status != "broken"


def test_lines_that_depend_on_two_facts() -> None:
    def line(facts: MachineFacts, name: str) -> Line:
        return next(line for line in diagnose(facts) if line.name == name)

    # A slow fsync is no surprise in memory, and the line of the file system has its cost.
    in_memory = changed(changed(HEALTHY, KIND, "tmpfs"), f"{TRIAL}.sync_seconds", 1e-7)
    assert line(in_memory, "fsync").status == "ok"
    no_handlers = changed(HEALTHY, "encoder.jax_handlers", False)
    assert line(no_handlers, "JAX handlers").status == "ok"
    with_jax = changed(no_handlers, "packages", {"jax": "0.11.0"})
    assert line(with_jax, "JAX handlers").status == "broken"


TABLE = """\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 25 0:27 / /data rw - tmpfs tmpfs rw,size=1k
31 27 0:28 / /data rw,relatime master:2 - nfs4 server:/export rw,local_lock=flock,soft
33 27 0:30 / /my\\040data ro - xfs /dev/vdb rw,prjquota
"""


@pytest.mark.parametrize(
    ("folder", "kind", "option"),
    [
        ("/data/run", "nfs4", "local_lock=flock"),  # the later of two mounts at one point
        ("/database", "ext4", "discard"),
        ("/my data", "xfs", "prjquota"),
    ],
)
def test_the_innermost_mount_is_that_of_a_folder(folder: str, kind: str, option: str) -> None:
    mount = innermost_mount(TABLE, Path(folder))
    assert mount is not None
    assert mount.kind == kind
    assert option in mount.options


def test_the_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "cpu.max": "150000 100000",
        "memory.max": "5000",
        "memory.current": "4000",
        "memory.stat": "anon 1\ninactive_file 300",
    }
    monkeypatch.setattr(inventory, "_group_value", lambda name: files.get(name, ""))
    assert inventory.free_memory() == 1300
    assert inventory.encoder().core_quota == 1.5
    files |= {"cpu.max": "max 100000", "memory.max": "max"}
    assert inventory.free_memory() > 5000
    assert inventory.encoder().core_quota is None


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ('print(\'{"cuda:0": ""}\')', ""),
        ("raise RuntimeError('no device')", "status 1: RuntimeError: no device"),
        ("print('warm')", "no result"),
    ],
)
def test_the_test_of_a_device_runs_in_another_process(
    program: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(problem=lambda: None)
    monkeypatch.setattr(deltacheck, "_native_cuda", module, raising=False)
    monkeypatch.setattr(inventory, "find_spec", lambda name: object())
    monkeypatch.setattr(inventory, "_DEVICE_TEST", program)
    tests = inventory.devices().tests
    assert tests is not None
    (problem,) = tests.values()
    assert result in problem
    assert bool(problem) == bool(result)


def test_the_trial_of_a_file_system_sees_missing_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inventory.try_files(tmp_path).flock == "excludes"
    flock: Callable[..., None] = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    assert inventory.try_files(tmp_path).flock == "admits"

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert os.strerror(errno.ENOSYS) in inventory.try_files(tmp_path).flock
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "fsync", lambda file: refuse(file, 0))
    assert inventory.try_files(tmp_path).sync_seconds is None
    assert list(tmp_path.iterdir()) == []
    assert "No such file" in inventory.try_files(tmp_path / "missing").error


def test_the_command_prints_the_facts_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    with Engine(root) as engine:
        engine.save(7, {"weight": np.zeros((400, 300), np.float32)}).wait()
    before = sorted(root.rglob("*"))
    # A process of its own shows that no framework is imported.
    program = (
        "import sys; from deltacheck.cli import main; code = main(sys.argv[1:]);"
        " assert not {'torch', 'jax', 'orbax'} & sys.modules.keys(); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", str(root), "--json"],
        capture_output=True,
        text=True,
    )
    document = json.loads(done.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert (done.returncode, document["ok"], done.stderr) == (0, True, "")
    assert checks["root"]["text"] == "1 step, the newest is 7, a state of 468.8 KiB"
    assert checks["write access"]["status"] == checks["flock"]["status"] == "ok"
    assert checks["numpy"]["text"] == np.__version__
    assert sorted(root.rglob("*")) == before

    # Something broken: the exit code, lines of 80 columns, and the remedy.
    (root / "zarr.json").write_text("{")
    assert main(["doctor", str(root)]) == 1
    output = capsys.readouterr().out
    assert max(len(line) for line in output.splitlines() if str(tmp_path) not in line) <= 80
    assert f"deltacheck verify {root}" in " ".join(output.split())
    assert " 1 broken" in output
    # A file, and a folder with other files, are no place for a root.
    assert main(["doctor", str(root / "zarr.json")]) == 1
    assert main(["doctor", str(tmp_path)]) == 1
    assert main(["doctor", str(tmp_path / "new")]) == 0
