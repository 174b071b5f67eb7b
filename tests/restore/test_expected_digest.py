"""`expected_digest`: a caller that recorded the digest of a step gets this step or an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import deltacheck
from deltacheck import errors
from deltacheck.backends.torch import Engine, load
from deltacheck.cli import main
from tests.support import forge


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[str]]:
    """Save two steps, and return the digests of their reports."""
    digests = []
    with Engine(tmp_path) as engine:
        for step in range(2):
            report = engine.save(step, {"x": torch.full((3,), float(step))}).result(240)
            assert report is not None
            digests.append(report.digest)
    return tmp_path, digests


def test_a_step_is_given_to_whoever_names_its_digest(saved: tuple[Path, list[str]]) -> None:
    root, digests = saved
    assert len(set(digests)) == 2
    for step, digest in enumerate(digests):
        assert digest.startswith("sha256:")
        assert len(digest) == 71
        assert deltacheck.open(root).digest(step) == digest
        assert deltacheck.open(root).restore(step, expected_digest=digest)["x"][0] == step
        assert load(root, step, expected_digest=digest)["x"][0] == step
    with Engine(root) as engine:
        assert engine.restore(expected_digest=digests[1])["x"][0] == 1


def test_another_step_is_refused_with_both_digests(saved: tuple[Path, list[str]]) -> None:
    root, digests = saved
    with pytest.raises(
        errors.Damaged, match=rf"step 1 .*has digest {digests[1]}, expected is {digests[0]}"
    ):
        deltacheck.open(root).restore(expected_digest=digests[0])
    with pytest.raises(errors.Damaged, match="not the one that is expected"):
        load(root, 1, expected_digest=digests[0])
    with (
        Engine(root) as engine,
        pytest.raises(errors.Damaged, match="not the one that is expected"),
    ):
        engine.restore(0, expected_digest="")


def test_a_forger_who_makes_every_checksum_right_again_is_found(
    saved: tuple[Path, list[str]],
) -> None:
    root, digests = saved
    forge.forge_manifest(
        root / "checkpoints" / "c0000000001" / "zarr.json",
        lambda manifest: manifest.update(metrics={"loss": 0.0}),
    )
    assert deltacheck.open(root).restore(1)["x"][0] == 1
    with pytest.raises(errors.Damaged, match="not the one that is expected"):
        deltacheck.open(root).restore(1, expected_digest=digests[1])


def test_show_says_the_digest(
    saved: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, digests = saved
    assert main(["show", str(root), "1"]) == 0
    assert f"digest {digests[1]}" in capsys.readouterr().out
    assert main(["show", str(root), "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == digests[0]


def test_a_manager_gives_a_step_by_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    from deltacheck.backends import orbax

    root = forge.unpack("manager", tmp_path / "root")
    digests = [deltacheck.open(root).digest(step) for step in range(3)]
    assert orbax.load(root, 1, expected_digest=digests[1])["count"] == 1
    with orbax.manager(root) as manager:
        found = manager.restore(2, args=orbax.DeltaRestoreArgs(expected_digest=digests[2]))
        assert np.asarray(found["params"]["w"]).shape == (300, 64)
        with pytest.raises(errors.Damaged, match="not the one that is expected"):
            manager.restore(2, args=orbax.DeltaRestoreArgs(expected_digest=digests[1]))
