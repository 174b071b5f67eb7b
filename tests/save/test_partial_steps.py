"""Old steps keep weights only: they take little space, restore bit for bit, say what they lack."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Policy, errors
from deltacheck.backends.torch import Engine, load
from deltacheck.cli import main
from deltacheck.cli.output import MISUSE, NOT_FOUND, OK
from deltacheck.maintain.compaction import reclaim
from deltacheck.policy import Keep
from deltacheck.save import root_writer
from deltacheck.save.partial_steps import remove_leaves
from deltacheck.store import collect
from deltacheck.store.files import arrays
from deltacheck.store.roots.opening import open_root
from tests.support import forge
from tests.support.adam_run import AdamRun
from tests.support.states import assert_same

STEPS = 8
NOT_KEPT = ["optimizer", "rng"]


def states() -> list[dict[str, Any]]:
    """A run whose weights change little and whose optimizer changes everywhere."""
    torch.manual_seed(0)
    weights = {f"w{n}": torch.randn(300, 300).to(torch.bfloat16) for n in range(3)}
    weights["norm"] = torch.ones(30)
    moments = [torch.zeros(300, 300) for _ in range(3)]
    found = []
    for step in range(STEPS):
        weights["w0"].view(-1)[step * 40 : step * 40 + 200] *= 1.5
        for moment in moments:
            moment += torch.randn(300, 300)
        state = {
            # ``head`` is stored under the name of ``aux``, which is before ``model``.
            "aux": weights["w2"],
            "model": weights | {"head": weights["w2"]},
            "optimizer": {"state": moments, "lr": 0.1 * step},
            "rng": torch.arange(step, step + 5),
            "step": step,
        }
        found.append(copy.deepcopy(state))
    return found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    root, run = tmp_path / "run", states()
    with Engine(root, policy=Policy.exact(max_chain_depth=3)) as engine:
        for step, state in enumerate(run):
            engine.save(step, state).wait(timeout=240)
        engine.tag(2, "best")
    return root, run


def partly(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"aux": None, "optimizer": None, "rng": None}


def blank(value: Any) -> Any:
    """The same containers, with zeros in the tensors and numbers."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def check(root: Path, run: list[dict[str, Any]], partial: list[int]) -> None:
    opened = deltacheck.open(root)
    assert opened.steps() == list(range(STEPS))
    assert opened.verify(deep=True) == []
    with Engine(root) as engine:
        for step, state in enumerate(run):
            expected = partly(state) if step in partial else state
            target = blank(expected)
            # Tied weights of the target stay tied.
            target["model"]["head"] = target["model"]["w2"]
            if step not in partial:
                target["aux"] = target["model"]["w2"]
            assert_same(expected, engine.restore(step, target))


def test_old_steps_keep_weights_in_little_space(
    saved: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = saved
    before = arrays.bytes_on_disk(root)
    partial = [0, 1, 3, 4, 5]  # 2 has a tag
    for words in (["--dry-run"], []):
        assert main(["prune", str(root), "--full-last", "2", "--json", *words]) == 0
        about = json.loads(capsys.readouterr().out)
        assert [row["step"] for row in about["partial"]] == partial
        assert about["deleted"] == []
        assert len(about["kept"]) == STEPS
        assert arrays.bytes_on_disk(root) == before or not words
    check(root, run, partial)
    assert main(["show", str(root), "3"]) == 0
    assert "removed by prune: aux, optimizer, rng" in capsys.readouterr().out
    assert main(["show", str(root), "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["absent"] == ["aux", *NOT_KEPT]
    assert reclaim(open_root(root), below=0.9)
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    check(root, run, partial)
    # Nothing is left to do.
    assert reclaim(open_root(root), below=0.9) == ()
    assert root_writer.prune(open_root(root), Keep(full_last=2)).partial == ()
    assert arrays.bytes_on_disk(root) < 0.9 * before
    # The tag goes, and step 2 follows; the leaves of another pattern go from all old steps.
    assert main(["tag", str(root), "--delete", "best"]) == 0
    options = ["--full-last", "1", "--keep-leaves", "model/w?", "--keep-leaves", "model/head"]
    capsys.readouterr()
    assert main(["prune", str(root), *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["partial"]) == STEPS - 1
    manifest = open_root(root).manifest(2)
    assert manifest.absent == ("aux", "model/norm", *NOT_KEPT)
    reclaim(open_root(root))
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    assert deltacheck.open(root).verify(deep=True) == []
    # Step 7 needs four saves of the optimizer, of eight.
    assert arrays.bytes_on_disk(root) < 0.65 * before
    assert main(["prune", str(root), "--keep-last", "1", "--keep-leaves", "a"]) == MISUSE


def test_a_removed_leaf_is_an_error_that_names_the_newest_step_with_it(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, run = saved
    root_writer.prune(open_root(root), Keep(full_last=2))
    opened = deltacheck.open(root)
    with Engine(root) as engine:
        calls: list[tuple[str, Any]] = [
            ("aux", lambda: opened.restore(3)),
            ("aux", lambda: load(root, 3)),
            ("aux", lambda: engine.restore(3)),
            ("aux", lambda: engine.restore(3, blank(run[3]))),
            ("optimizer", lambda: opened.restore(3, leaves=["optimizer"])),
            ("optimizer/state/1", lambda: opened.restore(3, leaves=["optimizer/state/1"])),
            ("rng", lambda: opened.restore(3, slices={"rng": (slice(0, 1),)})),
        ]
        for leaf, call in calls:
            with pytest.raises(errors.LeafPruned, match=f"step 3 has no leaf '{leaf}'") as caught:
                call()
            error = caught.value
            assert (error.leaf, error.step, error.newest_step) == (leaf, 3, 7)
            assert "the newest step that has it is 7" in str(error)
        # A training goes on from the newest step, and its next steps are whole.
        state = engine.restore()
        engine.save(STEPS, state).wait(timeout=240)
        assert_same(run[-1], engine.restore(STEPS))
    out = str(root.parent / "step.npz")
    assert main(["export", str(root), "3", "--out", out]) == NOT_FOUND
    assert main(["export", str(root), "3", "--out", out, "--leaves", "rng"]) == NOT_FOUND
    assert main(["export", str(root), "3", "--out", out, "--leaves", "model/*"]) == OK
    weights = opened.restore(3, leaves=["model/w0", "model/head"])
    for name in ("w0", "head"):
        expected = run[3]["model"][name]
        assert (weights[f"model/{name}"].view("u2") == expected.view(torch.uint16).numpy()).all()


def test_a_kill_at_any_moment_leaves_every_step_whole(
    saved: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, run = saved
    replace = arrays.replace_file
    done = 0

    def fourth_fails(*words: Any) -> Any:
        nonlocal done
        done += 1
        if done == 4:
            raise KeyboardInterrupt
        return replace(*words)

    monkeypatch.setattr(arrays, "replace_file", fourth_fails)
    with pytest.raises(KeyboardInterrupt):
        remove_leaves(open_root(root), set(range(6)), ["model/*"])
    monkeypatch.undo()
    check(root, run, [0, 1, 2])
    collect.collect(open_root(root), grace_seconds=0, writer_is_dead=True)
    check(root, run, [0, 1, 2])


def test_leaves_that_kept_ones_follow_from_stay(tmp_path: Path) -> None:
    root, run = tmp_path / "run", AdamRun((40, 30), 1)
    with Engine(root, policy=Policy.exact(derive=True)) as engine:
        for step in range(3):
            run.advance()
            engine.save(step, run.state()).result(240)
    before = deltacheck.open(root).restore(0)
    assert open_root(root).manifest(0).derived["model/w0"].of
    root_writer.prune(open_root(root), Keep(full_last=1))
    manifest = open_root(root).manifest(0)
    assert manifest.absent
    assert manifest.derived["model/w0"].of in manifest.leaves
    weight = deltacheck.open(root).restore(0, leaves=["model/w0"])["model/w0"]
    assert (weight == before["model"]["w0"]).all()
    assert deltacheck.open(root).verify(deep=True) == []


def test_a_manifest_that_lies_about_what_it_lacks_is_refused(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, _ = saved
    root_writer.prune(open_root(root), Keep(full_last=2))
    path = root / "checkpoints" / "c0000000003" / "zarr.json"
    original = path.read_bytes()
    for lie in (["model/w0"], ["rng", "aux"], ["step"], []):
        path.write_bytes(original)
        forge.forge_manifest(path, lambda body, lie=lie: body.update(absent=lie))  # type: ignore[misc]
        with pytest.raises(errors.Damaged):
            open_root(root).read(path)
    # A reader that does not know the feature refuses the step.
    assert json.loads(original)["attributes"]["deltacheck"]["must_understand"] == ["partial"]
