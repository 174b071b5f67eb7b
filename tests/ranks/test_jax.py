"""The Orbax handler in two processes of two devices each."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import deltacheck
from deltacheck.backends import torch as torch_backend
from deltacheck.backends.orbax import load
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from tests.ranks import jax_run
from tests.ranks.launch import launch
from tests.support.promises import broken
from tests.support.xla import UNOPTIMIZED


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each process that a test starts. This one's devices start before, with its own flags:
    other files' tests count on them.
    """
    jax.devices()
    flags = f"--xla_force_host_platform_device_count=2 {UNOPTIMIZED}"
    monkeypatch.setenv("XLA_FLAGS", flags)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(600)
def test_steps_of_two_and_four_processes_keep_the_promises_of_each_policy(tmp_path: Path) -> None:
    kinds = {
        "derive": set(),
        "auto": {"Bounded", "Reused"},
        "bounded": {"Bounded", "Reused"},
    }
    live: dict[int, Any] = {}
    for size, saves in ((2, 8), (4, 6)):
        live |= launch(jax_run.under_policies, size, str(tmp_path), saves, seconds=250)[0]
        for name, promised in kinds.items():
            run = deltacheck.open(tmp_path / name)
            assert run.steps() == sorted(live)
            for step, state in live.items():
                manifest = run.manifest(step)
                assert broken(state, run.restore(step), manifest, live.__getitem__, 1e-5) == []
            assert {type(p.terms).__name__ for p in manifest.contracts.values()} == promised
            # Weights that follow from their masters are not stored.
            is_derived = manifest.tiles["model/w0"].forms != ()
            assert is_derived == (name != "auto")
    # A tile on each device. Those whose weights are all fine enough have no codes.
    master = deltacheck.open(tmp_path / "auto").manifest().tiles["optimizer/state/0/master"]
    assert len(master.lanes) == 8
    assert {rule.how for rule in master.forms} <= {"lattice", "drawn"}
    assert len({rule.seed for rule in master.forms}) == 1
    for name in kinds:
        assert deltacheck.open(tmp_path / name).verify(deep=True) == []


def test_processes_merge_deltas_in_place_of_keyframes_and_no_collection_touches_a_merge(
    tmp_path: Path,
) -> None:
    root, first = tmp_path / "root", 0
    for _ in range(2):
        for kinds, merged_bytes in launch(jax_run.merge, 2, str(root), 12):
            assert kinds[0] == {"delta" if first else "keyframe"}
            assert kinds[1:] == [{"delta"}] * 11
            assert merged_bytes > 0
        first += 12
        run = deltacheck.open(root)
        assert run.steps() == [first - 1, first]
        for step in run.steps():
            assert np.array_equal(run.restore(step)["w"], jax_run.merged_content(step))
        assert run.verify(deep=True) == []
    # Two processes and 24 saves: chains without merges or keyframes need 48 segments.
    assert len(run.manifest().segments) < 16


def test_two_processes_save_deltas_and_restore_them_under_another_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    told = launch(jax_run.save_and_restore, 2, str(root))
    for rank, one in enumerate(told):
        first, *later = one["kinds"]
        assert set(first.values()) == {"keyframe"}
        assert all(kinds[path] == "delta" for kinds in later for path in kinds if "rows" in path)
        # Replicas: half of it each, and the small ones by one of them.
        assert [path for path in first if "spread" in path] == [
            f"arrays/spread%@{rank * jax_run.SPREAD // 2}"
        ]
        # Another mesh, and the chains go on wherever a tile stays as it was.
        assert all(
            kind == ("delta" if "rows" in path else "unchanged")
            for path, kind in one["after"].items()
            if "columns" not in path
        )
        assert one["after_bytes"] < 0.01 * one["stored"][0]
        # What lies here: half of the rows and columns, all of what is replicated.
        values = jax_run.numbers(0)
        needed = (values["rows"].nbytes + values["columns"].nbytes) // 2 + sum(
            values[name].nbytes for name in ("odd", "spread", "one")
        )
        assert needed < one["read"] < 1.1 * needed
        assert one["donated"]
        assert one["in_place"]
    assert not {*told[0]["kinds"][0]} & {*told[1]["kinds"][0]}  # nothing is written twice

    def same(arrays: dict[str, object]) -> bool:
        return all(
            np.asarray(arrays[name]).tobytes() == values.tobytes()
            for name, values in jax_run.numbers(4).items()
        )

    assert deltacheck.open(root).verify(deep=True) == []
    mesh = jax.make_mesh((1, len(jax.devices())), ("x", "y"))
    placed = load(
        root, 4, shardings={"arrays": {"rows": NamedSharding(mesh, PartitionSpec(None, "y"))}}
    )
    assert same(placed["arrays"])
    assert same(deltacheck.open(root).restore(4)["arrays"])
    tensors = torch_backend.load(root, 4)["arrays"]
    assert same(
        {name: t.view(torch.uint8).numpy() if t.dim() else t.numpy() for name, t in tensors.items()}
    )
    for words in (
        ["ls"],
        ["show", "4"],
        ["log", "--by-class", "1"],
        ["diff", "3", "4"],
        ["verify", "--deep"],
        ["repair"],
    ):
        assert main([*words, "--json", str(root)]) == 0
        told = capsys.readouterr().out
        assert "rows" in told or words[0] in ("ls", "log", "verify", "repair")
        assert "%@" not in told
    assert main(["branch", str(root), "4", "--to", str(tmp_path / "branch")]) == 0
    assert same(deltacheck.open(tmp_path / "branch").restore(4)["arrays"])
    assert main(["export", str(root), "4", "--out", str(tmp_path / "x.npz")]) == 0
    with np.load(tmp_path / "x.npz") as found:
        assert same({name: found[f"arrays/{name}"] for name in jax_run.numbers(4)})


def test_what_fails_in_one_process_is_told_by_all_within_seconds_with_its_cause(
    tmp_path: Path,
) -> None:
    told = launch(jax_run.fail_apart, 2, str(tmp_path / "root"))
    causes = {
        "disk": "OSError: no space left",
        "manifest": "OSError: read-only",
        "capture": "OSError: a bus error",
        "local": "leaf 'new': it is an array of process 1 alone",
        "array": "leaf 'host', a NumPy array, is another on process 1 than on process 0",
        "number": "leaf 'n' is int 0 in an earlier process and int 1 in process 1",
        "shape": "leaf 'host', a NumPy array, is another on process 1",
        "damage": "a flipped bit",
    }
    for name, cause in causes.items():
        for rank in (0, 1):
            assert cause in told[rank][name], (name, rank)
    assert "rank 1: " in told[0]["disk"]
    assert "process 1: Damaged" in told[0]["damage"]
    assert (
        told[0]["whole"] == told[1]["whole"] == "12"
    )  # both go back to the same step, though one could read a newer


@pytest.mark.parametrize("victim", [0, 1])
def test_the_step_before_restores_where_one_process_was_killed_in_a_save(
    tmp_path: Path, victim: int
) -> None:
    root = tmp_path / "root"
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=jax_run.die_in_save, args=(rank, 2, port, str(root), victim), daemon=True
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    assert processes[victim].exitcode == -signal.SIGKILL
    assert (
        processes[1 - victim].exitcode == -signal.SIGABRT
    )  # JAX ends it: at once where process 0 died, else after its own timeout
    if victim == 1:
        text = (tmp_path / "told").read_text()
        assert "rank 1 was lost, or did not answer in time" in text
    assert deltacheck.open(root).steps() == [0]
    values = jax_run.numbers(0)
    assert all(
        np.asarray(load(root)["arrays"][name]).tobytes() == array.tobytes()
        for name, array in values.items()
    )


def test_a_collection_takes_nothing_that_any_process_stands_on(tmp_path: Path) -> None:
    seen, _ = launch(jax_run.collect_at_the_worst_moment, 2, str(tmp_path / "root"))
    numbers = {when: [int(name[1:11]) for name in names] for when, names in seen.items()}
    assert numbers["under way"] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert numbers["base deleted"] == [
        0,
        0,
        1,
        1,
        3,
        3,
        4,
        4,
        5,
        5,
    ]  # step 2 alone stood on what is gone
    assert {3, 4, 5}.isdisjoint(numbers["after"])


def test_each_process_reads_of_a_torch_root_what_its_devices_need(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Engine(root) as engine:
        weight = torch.arange(16384 * 256, dtype=torch.float32).reshape(16384, 256)
        engine.save(0, {"w": weight, "b": torch.zeros(8)})
        engine.save(1, {"w": weight, "b": torch.ones(8)})
    for read, needed in launch(jax_run.read_foreign, 2, str(root)):
        assert needed == weight.nbytes // 2
        assert needed <= read <= 1.1 * needed


def test_the_program_of_the_page_runs_in_two_processes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "orbax.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program.replace("9531", str(free_port())))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "train.py"]
    running = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, env=environment) for rank in range(2)
    ]
    assert [one.wait(240) for one in running] == [0, 0]
    assert deltacheck.open(tmp_path / "orbax-ranks").steps() == [1, 2]


def test_processes_talk_over_the_store_and_leave_nothing_there(tmp_path: Path) -> None:
    for told in launch(jax_run.talk, 2):
        assert told == [
            "rank 1: ValueError: mine",
            (
                "rank 1: rank 1 was lost, or did not answer in time; it must be started again with"
                " all others (nothing came within 1 s)"
            ),
        ]
