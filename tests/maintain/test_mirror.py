"""Mirrors of ordinary roots, in a directory and in a bucket."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, Mirror, SaveOptions, errors
from deltacheck.backends.torch import Engine
from tests.support.s3_server import FOREVER, S3, Fault


def state(step: int) -> dict[str, Any]:
    values = torch.arange(4096.0)
    values[step] += 1
    return {"w": values, "step": step}


def save(root: Path, *steps: int, keep: int = 3) -> None:
    options = SaveOptions(grace_seconds=0)
    with Engine(root, keep=Keep(last=keep), options=options) as engine:
        if engine.steps():
            engine.restore()
        for step in steps:
            engine.save(step, state(step)).wait()


def check(root: str | Path, *steps: int) -> None:
    opened = deltacheck.open(root)
    assert opened.steps() == list(steps)
    assert opened.verify(deep=True) == []
    for step in steps:
        assert (opened.restore(step)["w"] == state(step)["w"].numpy()).all()


@pytest.fixture(params=["directory", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path, s3: S3) -> str:
    if request.param == "bucket":
        return f"s3://bucket/{secrets.token_hex(4)}/copy"
    return str(tmp_path / "copy")


def test_a_mirror_follows_a_root_and_another_machine_continues_from_it(
    tmp_path: Path, target: str
) -> None:
    save(tmp_path / "run", 0, 1)
    with Mirror(tmp_path / "run", target) as mirror:
        assert mirror.poll() == [0, 1]
        check(target, 0, 1)
        save(tmp_path / "run", 2, 3)
        assert mirror.poll() == [2, 3]
        assert mirror.poll() == []
        # The source keeps three steps.
        check(target, 1, 2, 3)
        with pytest.raises(errors.RootBusy):
            Mirror(tmp_path / "run", target)
    # One that was ended goes on.
    save(tmp_path / "run", 4)
    with Mirror(tmp_path / "run", target) as mirror:
        assert mirror.poll() == [4]
    with Engine(target) as engine:
        assert engine.restore()["step"] == 4
        engine.save(5, state(5)).wait()
    check(target, 2, 3, 4, 5)


def test_a_mirror_does_not_replace_what_went_on_from_it(tmp_path: Path, target: str) -> None:
    save(tmp_path / "run", 0, 1)
    with Mirror(tmp_path / "run", target) as mirror:
        mirror.poll()
    with Engine(target) as engine:
        engine.restore()
        engine.save(2, state(2)).wait()
    with pytest.raises(errors.ForeignMemory, match=r"has checkpoint 2, and the newest .* is 1"):
        Mirror(tmp_path / "run", target)
    check(target, 0, 1, 2)


def test_a_mirror_does_not_replace_another_run(tmp_path: Path, target: str) -> None:
    save(tmp_path / "run", 0)
    save(tmp_path / "other", 0)
    with Mirror(tmp_path / "other", target) as mirror:
        mirror.poll()
    with pytest.raises(errors.ForeignMemory, match="belongs to another run"):
        Mirror(tmp_path / "run", target)
    check(target, 0)


def test_a_root_without_a_name_is_refused_and_gets_none(tmp_path: Path) -> None:
    save(tmp_path / "run", 0)
    save(tmp_path / "other", 0)
    with pytest.raises(errors.ForeignMemory, match="belongs to another run"):
        Mirror(tmp_path / "run", tmp_path / "other")
    assert not (tmp_path / "other" / "control" / "tier").exists()


def test_nothing_is_deleted_in_the_copy_of_a_root_that_is_gone(tmp_path: Path) -> None:
    save(tmp_path / "run", 0, 1)
    with Mirror(tmp_path / "run", tmp_path / "copy") as mirror:
        mirror.poll()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        assert mirror.poll() == []
    check(tmp_path / "copy", 0, 1)


def test_a_copy_that_the_store_interrupts_is_whole_after_the_next_look(
    tmp_path: Path, s3: S3
) -> None:
    target = f"s3://bucket/{secrets.token_hex(4)}/copy"
    save(tmp_path / "run", 0, 1)
    with Mirror(tmp_path / "run", target) as mirror:
        assert mirror.poll() == [0, 1]
        save(tmp_path / "run", 2)
        refusal = Fault("501", "/segments/", times=FOREVER)
        with s3.failing(refusal), pytest.raises(errors.StorageFailed):
            mirror.poll()
        check(target, 0, 1)
        assert mirror.poll() == [2]
    check(target, 0, 1, 2)


def test_a_root_of_orbax_is_refused(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    import numpy as np

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    with manager(tmp_path / "run", ocp.CheckpointManagerOptions()) as mngr:
        mngr.save(0, args=DeltaSaveArgs({"w": np.ones(3)}))
    with pytest.raises(errors.NotACheckpointRoot, match="root of Orbax's CheckpointManager"):
        Mirror(tmp_path / "run", tmp_path / "copy")
