"""S1: a process killed before or inside any mutating call loses nothing that was acknowledged, and
leaves nothing that stands in the way.

The quick part; ``make crash-test`` tries more points. Any failure prints its seed and what to
replay it with.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.store.files import durability
from tests.faults import crash, scenarios, shim
from tests.faults.campaign import Campaign, Tally
from tests.faults.scenarios import CONTROLS, ORBAX, TIER, TORCH
from tests.faults.shim import Fault, Mode
from tests.support.paths import REPOSITORY


@pytest.fixture
def seed() -> int:
    chosen = random.SystemRandom().randrange(1 << 32)
    print(f"seed {chosen}")
    return chosen


@pytest.mark.parametrize(
    ("backend", "points"), [(TORCH, 10), (TIER, 3), (ORBAX, 3)], ids=["torch", "memory", "orbax"]
)
def test_a_process_killed_at_any_call_loses_no_acknowledged_step_and_the_next_one_goes_on(
    campaign: Campaign, seed: int, backend: dict[str, scenarios.Scenario], points: int
) -> None:
    calls = {name: campaign.counts(name)[0] for name in backend}
    chosen = crash.stratified(points, calls, random.Random(seed))
    problems = crash.attempt_all(campaign, chosen, tally := Tally("S1, process crash", seed))
    print(tally)
    assert problems == []


def test_a_recovery_that_is_killed_too_is_recovered_from(campaign: Campaign, seed: int) -> None:
    rng = random.Random(seed)
    for name in ("compaction", "keep-last"):
        acted, recovered, _ = campaign.counts(name)
        point = crash.Point(name, Mode.TORN, rng.randrange(acted), again=rng.randrange(recovered))
        assert crash.attempt(campaign, point) == [], str(point)


def test_a_run_that_is_killed_again_and_again_at_any_time_goes_on_where_it_was(
    campaign: Campaign, seed: int
) -> None:
    """One root, many lives: what one leaves behind, the next one lives with."""
    rng = random.Random(seed)
    with campaign.trial("lives") as trial:
        for life in range(6):
            ran = campaign.run("act", trial, kill_after=rng.uniform(0.05, 0.4))
            assert ran.killed, ran
            looked = campaign.run("look", trial)
            assert (looked.value, looked.error) == ([], ""), f"life {life}"
        assert campaign.run("check", trial).value == []


def test_the_harness_sees_that_overwriting_the_only_checkpoint_loses_it(campaign: Campaign) -> None:
    """The positive control: a harness that does not see this sees nothing."""
    name = "torch.save-overwriting"
    points = list(crash.exhaustive({name: campaign.counts(name)[0]}))[::2]
    failed = [point for point in points if crash.attempt(campaign, point, keep=False)]
    assert {point.mode for point in failed} == {Mode.KILL, Mode.TORN}
    assert len(failed) > len(points) / 3


def test_the_harness_finds_no_fault_with_the_smallest_protocol_that_has_none(
    campaign: Campaign, seed: int
) -> None:
    name = "reference-protocol"
    points = crash.stratified(6, {name: campaign.counts(name)[0]}, random.Random(seed))
    assert crash.attempt_all(campaign, points, Tally("S1, control", seed)) == []
    assert set(CONTROLS) == {"torch.save-overwriting", name}


def test_a_torn_write_leaves_half_of_its_bytes(campaign: Campaign) -> None:
    with campaign.trial("delta") as trial:
        campaign.run("act", trial, fault=Fault())
        at = max((op for op in trial.ops() if op.kind == "write"), key=lambda op: op.length).number
    assert at is not None
    with campaign.trial("delta") as trial:
        assert (
            campaign.run(
                "act", trial, fault=Fault(Mode.TORN, at, kinds=frozenset({"write"}))
            ).killed
            is False
        )
        assert campaign.run(
            "act", trial, fault=Fault(Mode.TORN, 3, kinds=frozenset({"write"}))
        ).killed
        *_, last = trial.ops()
        assert (last.kind, last.number, last.result) == ("write", 3, last.length // 2)
        assert len(last.data) == last.result


# --- the shim sees everything ---------------------------------------------------------------------

SYSTEM_CALLS = {
    "open": ("open", "openat", "openat2", "creat"),
    "write": (
        "write",
        "pwrite64",
        "writev",
        "pwritev",
        "pwritev2",
        "copy_file_range",
        "sendfile",
        "splice",
    ),
    "truncate": ("truncate", "ftruncate"),
    "sync": ("fsync", "fdatasync", "sync_file_range", "syncfs"),
    "rename": ("rename", "renameat", "renameat2"),
    "link": ("link", "linkat"),
    "symlink": ("symlink", "symlinkat"),
    "unlink": ("unlink",),
    "rmdir": ("rmdir",),
    "mkdir": ("mkdir", "mkdirat"),
    "allocate": ("fallocate",),
    "map": ("mmap",),
}


@pytest.mark.parametrize("name", ["keep-last", "orbax-keep"])
def test_the_shim_counts_the_calls_that_the_kernel_sees(tmp_path: Path, name: str) -> None:
    """So raw system calls, which pass the shim by, would be found."""
    strace = shutil.which("strace")
    if strace is None or shim.compiler() is None:
        pytest.skip("needs strace and a C compiler")
    if subprocess.run(
        [strace, "-f", "--seccomp-bpf", "-e", "trace=fsync", "true"],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("strace may not trace here")
    (tmp_path / "area").mkdir()
    calls = ",".join(
        ["unlinkat", "io_uring_setup", *(call for calls in SYSTEM_CALLS.values() for call in calls)]
    )
    watched = [
        strace,
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "0",
        "-o",
        str(tmp_path / "strace"),
        "-e",
        f"trace={calls}",
    ]
    subprocess.run(
        [*watched, sys.executable, "-c", TRACED, name, str(tmp_path)],
        env=shim.environment(PYTHONPATH=str(REPOSITORY)),
        check=True,
        timeout=240,
    )
    seen = Counter(op.kind for op in shim.read_trace(tmp_path / "trace") if op.number is not None)
    lines = (tmp_path / "strace").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if "begin-of-act" in line)
    assert not any("io_uring_setup" in line for line in lines)
    kernel = Counter(
        kind
        for line in lines[begin + 1 :]
        if (kind := _kind_of(line, str(tmp_path / "area"))) is not None
    )
    assert seen == kernel
    assert seen.total() > 100


TRACED = """
import os, sys
from pathlib import Path
from tests.faults import scenarios, shim
name, place = sys.argv[1], Path(sys.argv[2])
scenario, root = scenarios.SCENARIOS[name], place / "area" / "root"
scenario.prepare(root)
os.open(place / "begin-of-act", os.O_CREAT | os.O_WRONLY)
shim.trace(place / "trace")
shim.arm(place / "area", shim.Fault())
scenario.act(root, lambda step: None)
os._exit(0)
"""


def _kind_of(line: str, area: str) -> str | None:
    """The shim's kind of a call in strace's output, where it is one that counts."""
    found = re.match(r"\d+ +(\w+)\((.*)", line)  # not "<... fsync resumed>": the same call again
    if found is None or area not in found[2]:
        return None
    call, arguments = found[1], found[2]
    if call == "unlinkat":
        return "rmdir" if "AT_REMOVEDIR" in arguments else "unlink"
    kind = next(kind for kind, calls in SYSTEM_CALLS.items() if call in calls)
    if kind == "open" and not re.search("O_CREAT|O_TRUNC|O_TMPFILE", arguments):
        return None
    if kind == "map" and not re.search("PROT_WRITE.*MAP_SHARED", arguments):
        return None
    return kind


# --- what was found this way ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "made", [["segments"], ["segments", "checkpoints", "control"], ["zarr.json.__lock", "control"]]
)
def test_a_root_whose_making_was_cut_short_can_be_made_by_the_next_process(
    tmp_path: Path, made: list[str]
) -> None:
    for name in made:
        if name.endswith("lock"):
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "zarr.json.__lock").touch()
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.ones(3)}).wait()
        assert engine.steps() == [0]
    assert not list(tmp_path.rglob("*.__lock"))


def test_a_full_root_that_has_lost_its_own_metadata_is_not_made_anew(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        engine.save(0, {"x": torch.ones(3)})
    (tmp_path / "zarr.json").unlink()
    with pytest.raises(
        errors.Damaged, match=r"zarr.json is missing or damaged, but 1 segments lie beside it"
    ):
        Engine(tmp_path)


def test_what_a_root_lies_in_is_synced_by_every_writer_since_its_maker_may_have_been_killed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "today" / "root"
    synced: list[Path] = []
    original = durability.sync_directory
    monkeypatch.setattr(
        durability,
        "sync_directory",
        lambda directory: (synced.append(directory), original(directory)),
    )
    for _ in range(2):
        synced.clear()
        Engine(path).close()
        assert {path, path.parent, path.parent.parent, tmp_path} <= set(synced)
