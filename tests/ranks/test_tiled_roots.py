"""A root that ranks wrote says what the root of one process says of the same states: every command
and
every way to read, one after the other.

What a tool does to such a root, and how it tells of damage, is in
``tests/maintain/test_tiled_tools.py``.
"""

from __future__ import annotations

import copy
import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import deltacheck
from deltacheck import Mirror, Policy, Profile, SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.maintain.compaction import needs
from deltacheck.maintain.tier_bond import Bond, write_bond
from deltacheck.report.data import collect
from deltacheck.store import layout
from deltacheck.store.files import storage
from deltacheck.store.roots.opening import open_root
from tests.support.adam_run import AdamRun
from tests.support.ranked_run import RankedRun, cells, rows
from tests.support.states import assert_same, bits, differences

# Which ranks saved how many steps, one group after the other: two axes, one axis, one process that
# keeps the cuts, and cuts that fit none of them.
GROUPS = ((4, cells, 3), (2, rows, 2), (1, rows, 1), (3, rows, 2))
RECUT = 6  # the first step of the last group, which writes all large leaves whole
NEWEST = 7
BIG, MASK = "model/big", "model/mask"
ROOT = "ROOT"  # in a command of the tables
SPEEDS = [f"--speed={name}=1e9" for name in ("write", "read", "encode", "apply", "copy")]


@dataclass(frozen=True)
class Roots:
    """Two roots of the same steps. ``states``: of each."""

    one: Path
    many: Path
    states: list[Any]

    def __iter__(self) -> Iterator[Path]:
        yield from (self.one, self.many)

    def copy(self, folder: Path) -> Roots:
        for name, root in (("one", self.one), ("many", self.many)):
            shutil.copytree(root, folder / name)
        return Roots(folder / "one", folder / "many", self.states)


LONG = Policy.exact(
    max_restore_ratio=None
)  # else a leaf that is not in tiles, and so larger, is written whole earlier


def states() -> list[Any]:
    """An Adam run; a large leaf of which at step 1 only a part moves and at step 4 nothing; one
    that never moves; an empty one, a scalar, a text.
    """
    run, random = AdamRun((64, 96), 2, rate=1e-3), np.random.default_rng(3)
    big = random.standard_normal((700, 500)).astype(np.float32)
    mask = big[:40, :30] > 0
    found = []
    for step in range(NEWEST + 1):
        run.advance()
        part = big[: {1: 300, 4: 0}.get(step)]
        part[random.random(part.shape) < 0.02] *= np.float32(1.01)
        state = run.state()
        state["model"] |= {
            "big": big.copy(),
            "empty": np.zeros((0, 4), np.int32),
            "mask": mask,
            "scale": np.array(0.5, np.float32),
        }
        found.append(state | {"name": "a run"})
    return found


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    folder = tmp_path_factory.mktemp("roots")
    made = Roots(folder / "one", folder / "many", states())
    groups = iter(GROUPS)
    left = 0
    with Engine(made.one, policy=LONG, options=SaveOptions(durability="process")) as engine:
        for step, state in enumerate(made.states):
            if left == 0:
                size, layout, left = next(groups)
                run = RankedRun(made.many, size, layout)
                if step:
                    run.resume(made.states[step - 1])
            metrics = {"loss": 1 / (step + 1), "grad_norm": 2.0}
            assert not [
                found
                for found in run.save(step, state, metrics)
                if isinstance(found, BaseException)
            ]
            engine.save(step, state, metrics=metrics).result(240)
            left -= 1
            if left == 0:
                run.close()
    cuts = [open_root(made.many).manifest(step).tiles[BIG].cuts for step in (2, NEWEST)]
    assert cuts == [((0, 350, 700), (0, 250, 500)), ((0, 234, 468, 700), (0, 500))]
    return made


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A command in this process on one of the roots: what it says as JSON. No text of it names a
    tile as it is stored.
    """

    def call(root: Path, *words: object) -> Any:
        line = [str(root) if word == ROOT else str(word) for word in words]
        capsys.readouterr()
        assert main([*line, "--json"]) == 0
        found = capsys.readouterr().out
        assert "%@" not in found
        return json.loads(found)

    return call


@pytest.fixture
def both(tool: Any, roots: Roots) -> Callable[..., list[Any]]:
    """Return the output of a command for the root of one process and for that of ranks."""
    return lambda *words: [tool(root, *words) for root in roots]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


# --- what commands say ----------------------------------------------------------------------------

# What two runs of the same states have of their own, whoever wrote them.
OWN = ("root", "time", "stored_bytes", "written_bytes", "durability", "seconds_since_previous")


def listed(found: Any) -> Any:
    return [without(row, *OWN) for row in found["steps"]]


def told_of_leaves(found: Any) -> Any:
    leaves = [without(row, "tiles", "ranks") for row in found["leaves"]]
    return without(found, *OWN, "digest", "segments") | {"leaves": leaves}


def logged(found: Any) -> Any:
    """The steps whose chains go on as those of one process do, without the bytes of each cause."""
    return [without(row, "causes") for row in listed(found)[:RECUT]]


def moved(found: Any) -> Any:
    """The order in which a norm is summed up is that of the tiles."""
    found["changed"] = [
        row | {"relative_l2": pytest.approx(row["relative_l2"])} for row in found["changed"]
    ]
    sides = {name: without(found[name], "root") for name in ("before", "after")}
    return without(found, "root") | sides


def checked(found: Any) -> Any:
    return without(found, "root", "all_bytes", "checked_bytes")


def planned(found: Any) -> Any:
    bytes_ = {
        name: pytest.approx(found[name], rel=0.1)
        for name in ("keyframe_bytes", "delta_bytes", "read_bytes")
    }
    kept = (
        "state_bytes",
        "verdict",
        "saves_bytes",
        "saves_time",
        "observed_interval_steps",
        "max_chain_depth",
    )
    return {name: found[name] for name in kept} | bytes_


def steps_of(pruned: dict[str, Any]) -> dict[str, Any]:
    return {key: pruned[key] for key in ("kept", "deleted", "partial")}


COMMANDS: dict[str, tuple[list[object], Callable[[Any], Any]]] = {
    "ls": (["ls", ROOT], listed),
    **{f"show {step}": (["show", ROOT, step], told_of_leaves) for step in (2, 3)},
    "show some": (
        ["show", ROOT, NEWEST, "--leaves", "model/scale", "--leaves", "model/e*"],
        told_of_leaves,
    ),
    "log": (["log", ROOT], logged),
    "log of classes": (["log", ROOT, "--by-class", 2], logged),
    **{f"diff {a} {b}": (["diff", ROOT, a, b], moved) for a, b in ((0, 2), (2, 3), (4, RECUT))},
    "diff of some": (["diff", ROOT, 5, NEWEST, "--leaves", "*exp_avg*", "--leaves", MASK], moved),
    "verify": (["verify", ROOT], checked),
    "verify one": (["verify", ROOT, NEWEST, "--deep"], checked),
    "plan": (["plan", ROOT, *SPEEDS, "--step-seconds", 1], planned),
    "repair": (["repair", ROOT, "--dry-run"], lambda found: without(found, "root")),
    "prune": (
        ["prune", ROOT, "--keep-last", 2, "--keep-best", "loss:max:1", "--dry-run"],
        steps_of,
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_the_same_of_what_ranks_wrote(both: Any, name: str) -> None:
    words, content = COMMANDS[name]
    one, many = (content(found) for found in both(*words))
    assert one == many


@pytest.mark.parametrize("name", ["show 2", "log of classes", "repair"])
def test_people_read_of_leaves_and_not_of_what_they_are_stored_as(
    roots: Roots, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    capsys.readouterr()
    assert main([str(roots.many) if word == ROOT else str(word) for word in COMMANDS[name][0]]) == 0
    assert "%@" not in "".join(capsys.readouterr())


def test_the_first_save_after_another_cut_says_what_it_wrote_whole(both: Any, roots: Roots) -> None:
    one, many = (found["steps"][RECUT] for found in both("log", ROOT))
    cut = [
        path
        for path, array in leaves_of(roots.states[RECUT]).items()
        if array.ndim == 2 and array.size
    ]
    assert (one["keyframes"], many["keyframes"]) == (0, len(cut))
    assert one["deltas"] == many["deltas"] + len(cut) - 1  # the mask, which has not moved
    assert many["words"] < one["words"]  # its density is of the others alone


def test_a_leaf_that_is_only_cut_otherwise_has_not_moved(both: Any, roots: Roots) -> None:
    assert len({open_root(roots.many).manifest(step).tiles[MASK].cuts for step in (2, NEWEST)}) == 2
    for found in both("diff", ROOT, 2, NEWEST, "--leaves", MASK):
        assert (found["changed"], found["unchanged"]) == ([], 1)


def test_a_profile_is_that_of_the_same_run_in_one_process(
    both: Any, roots: Roots, tool: Any, tmp_path: Path
) -> None:
    found = []
    for name, root in (("one", roots.one), ("many", roots.many)):
        tool(root, "profile", ROOT, "-o", tmp_path / name)
        found.append(json.loads((tmp_path / name).read_text()) | {"source": ""})
    assert found[0] == found[1]
    leaves = Profile.read(tmp_path / "many").leaves
    assert (leaves[BIG].kind, leaves[MASK].kind, leaves["model/w0"].derived_from) == (
        "sparse",
        "frozen",
        "optimizer/state/0/master",
    )


def test_a_report_tells_of_the_same_leaves_and_how_much_of_them_changed(
    roots: Roots, tool: Any, tmp_path: Path
) -> None:
    one, many = (collect(root) for root in roots)
    assert (one.groups, one.problems) == (many.groups, many.problems)
    for before, after in zip(one.steps[:RECUT], many.steps, strict=False):
        assert (before.raw_bytes, before.leaves, before.changed) == (
            after.raw_bytes,
            after.leaves,
            after.changed,
        )
    assert many.steps[NEWEST].changed[BIG] == one.steps[NEWEST].changed[BIG]
    tool(roots.many, "profile", ROOT, "-o", tmp_path / "profile.json")
    told = tool(
        roots.many,
        "report",
        ROOT,
        "-o",
        tmp_path / "report.html",
        "--profile",
        tmp_path / "profile.json",
    )
    # Exact steps have no contracts to show.
    assert told["figures"] == ["bytes", "changes", "drift", "restore"]
    page = (tmp_path / "report.html").read_text()
    assert "%@" not in page
    assert BIG in page


# --- what goes out --------------------------------------------------------------------------------


def leaves_of(state: Any, at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= leaves_of(value, f"{at}{key}/")
        elif isinstance(value, np.ndarray):
            found[f"{at}{key}"] = value
    return found


@pytest.mark.parametrize(
    ("step", "chosen"),
    [(NEWEST, []), (2, ["--leaves", "model/*", "--strip", "model/"])],
    ids=["all", "some"],
)
@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_an_export_is_that_of_the_same_step_in_one_process(
    roots: Roots, tool: Any, tmp_path: Path, kind: str, step: int, chosen: list[str]
) -> None:
    files = [tmp_path / f"{name}.{kind}" for name in ("one", "many")]
    for root, file in zip(roots, files, strict=True):
        tool(root, "export", ROOT, step, "--out", file, *chosen)
    if kind == "safetensors":  # which names its source
        found = load_file(files[1])
        wanted = leaves_of(roots.states[step])
        if chosen:
            wanted = {
                path.removeprefix("model/"): array
                for path, array in wanted.items()
                if path.startswith("model/")
            }
        assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))
    else:
        assert files[0].read_bytes() == files[1].read_bytes()


def test_an_orbax_folder_has_whole_leaves(roots: Roots, tool: Any, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tool(
        roots.many,
        "export",
        ROOT,
        NEWEST,
        "--out",
        tmp_path / "x.orbax",
        "--leaves",
        "model/[bmsw]*",
        "--leaves",
        "*exp_avg*",
    )
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "x.orbax")
    wanted = {
        path: array for path, array in leaves_of(roots.states[NEWEST]).items() if path in found
    }
    assert len(found) == 12
    assert_same(
        {path: np.asarray(value) for path, value in sorted(found.items())},
        dict(sorted(wanted.items())),
    )


# --- reading from Python --------------------------------------------------------------------------


def some_box(shape: tuple[int, ...], draw: random.Random) -> tuple[slice | int, ...]:
    """A box as users write it: fewer axes than there are, numbers from the end, nothing."""
    box: list[slice | int] = []
    for size in shape[: draw.randint(0, len(shape))]:
        kind = draw.randrange(3)
        if kind == 0 and size:
            box.append(draw.randrange(-size, size))
        elif kind == 1:
            box.append(slice(*sorted(draw.randint(0, size) for _ in "ab")))
        else:
            box.append(slice(-draw.randint(1, 30), None))
    return tuple(box)


def test_any_box_of_any_leaf_of_any_step_is_what_was_saved(roots: Roots) -> None:
    seed = int(os.environ.get("DELTACHECK_BOXES_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed}. Replay: DELTACHECK_BOXES_SEED={seed} pytest {__file__} -k any_box")
    draw = random.Random(seed)
    opened = deltacheck.open(roots.many)
    for step, state in enumerate(roots.states):
        for path, array in leaves_of(state).items():
            box = some_box(array.shape, draw)
            kept = tuple(slice(at, at + 1 or None) if isinstance(at, int) else at for at in box)
            found = opened.restore(step, slices={path: box})[path]
            assert not list(
                differences(found, np.asarray(array[kept]), f"step {step}, {path}, {box}")
            )


def test_leaves_and_boxes_are_given_together(roots: Roots) -> None:
    wanted = {
        "leaves": [BIG, "model/scale", "model/w0"],
        "slices": {BIG: (slice(340, 360), 3), MASK: (-1,), "model/empty": ()},
    }
    one, many = (deltacheck.open(root).restore(NEWEST, **wanted) for root in roots)
    assert_same(one, many)
    assert {path: array.shape for path, array in many.items()} == {
        BIG: (20, 1), "model/scale": (), "model/w0": (64, 96), MASK: (1, 30), "model/empty": (0, 4)
    }  # fmt: skip


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slices": {BIG: (9999,)}}, ValueError, "out of range"),
    ({"slices": {BIG: (slice(0, 9, 2),)}}, ValueError, "step 1"),
    ({"slices": {BIG: (0, 0, 0)}}, ValueError, "too many"),
    ({"leaves": [f"{BIG}%@0,0"]}, errors.StepNotFound, "near it: 'model/big'"),
    ({"slices": {f"{BIG}%@0,0": ()}}, errors.StepNotFound, "near it: 'model/big'"),
    ({"leaves": [BIG], "max_bytes": 1000}, errors.BudgetExceeded, "1400000 bytes"),
    ({"slices": {BIG: (slice(0, 2),)}, "max_bytes": 10}, errors.BudgetExceeded, "4000 bytes"),
    ({"expected_digest": "sha256:" + "0" * 64}, errors.Damaged, "is not the one that is expected"),
]


@pytest.mark.parametrize(
    ("wanted", "kind", "message"), REFUSED, ids=[str(one[0]) for one in REFUSED]
)
def test_what_is_refused_of_a_leaf_is_refused_of_one_in_tiles(
    roots: Roots, wanted: dict[str, Any], kind: type[Exception], message: str
) -> None:
    for root in roots:
        with pytest.raises(kind, match=message):
            deltacheck.open(root).restore(NEWEST, **wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("step", [NEWEST])
def test_every_framework_reads_what_ranks_wrote(roots: Roots, step: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from deltacheck.backends.torch import DeltaStorageReader, load

    one, many = (load(root, step) for root in roots)
    assert_same(many, one)
    model = roots.states[step]["model"]
    target = {
        "big": torch.zeros(700, 500),
        "mask": torch.zeros(40, 30, dtype=torch.bool),
        "w1": torch.zeros(64, 96).bfloat16(),
    }
    dcp.load({"model": target}, storage_reader=DeltaStorageReader(roots.many, step), no_dist=True)
    assert all(bits(target[name]) == bits(model[name]) for name in target)


def test_jax_reads_under_any_sharding_what_ranks_wrote(roots: Roots) -> None:
    jax = pytest.importorskip("jax")
    from deltacheck.backends.orbax import load

    mesh = jax.make_mesh((2, 2), ("x", "y"))
    specs = {(700, 500): ("x", "y"), (64, 96): ("y",), (40, 30): (None, "x")}

    def placed(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        sharding = jax.NamedSharding(mesh, jax.P(*specs.get(value.shape, ())))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    state = roots.states[NEWEST]
    target = jax.tree.map(placed, state)
    found = load(roots.many, NEWEST, target)
    for wanted, array, value in zip(
        *(jax.tree.leaves(one) for one in (target, found, state)), strict=True
    ):
        if isinstance(value, np.ndarray):
            assert array.sharding == wanted.sharding
            assert bits(np.asarray(array)) == bits(value)


def one_after_the_other(root: Path, folder: Path, **options: Any) -> Iterator[deltacheck.Update]:
    """Return the updates of a follower that polls after each commit."""
    shutil.copytree(root, folder)
    first, *later = sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    for path in later:
        path.rename(folder / path.name)
    follower = deltacheck.follow(folder, **options)
    for path in (first, *later):
        if path is not first:
            (folder / path.name).rename(path)
        update = follower.poll()
        assert update is not None
        yield update


def test_a_follower_is_told_the_same_of_every_step(roots: Roots, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    from deltacheck.backends.orbax import applied
    from deltacheck.backends.torch import apply

    wanted = [BIG, MASK, "model/w0", "model/scale"]
    first = {name: roots.states[0]["model"][name] for name in ("big", "mask", "w0", "scale")}
    tensors = {"model": {name: tensors_of(value) for name, value in first.items()}}
    arrays = {"model": {name: jax.numpy.asarray(value) for name, value in first.items()}}
    told = (one_after_the_other(root, tmp_path / root.name, leaves=wanted) for root in roots)
    for step, (one, many) in enumerate(zip(*told, strict=True)):
        assert (many.step, many.since, many.names, many.metrics) == (
            one.step,
            one.since,
            one.names,
            one.metrics,
        )
        assert many.changes.keys() == one.changes.keys()
        for path, change in many.changes.items():
            assert bits(change.values) == bits(one.changes[path].values)
            assert (change.positions is None) == (one.changes[path].positions is None)
            assert change.positions is None or np.array_equal(
                change.positions, one.changes[path].positions
            )
        apply(many, tensors)
        arrays = applied(many, arrays)
        for name, value in roots.states[step]["model"].items():
            if name in first:
                assert (
                    bits(tensors["model"][name])
                    == bits(np.asarray(arrays["model"][name]))
                    == bits(value)
                )


# --- what is done to a root, and who goes on with it ----------------------------------------------


@pytest.fixture
def copied(roots: Roots, tmp_path: Path) -> Roots:
    """Copies that a test may change."""
    return roots.copy(tmp_path)


def assert_whole(root: Path, wanted: list[Any], steps: list[int]) -> None:
    opened = deltacheck.open(root)
    assert opened.steps() == steps
    for step in steps:
        assert_same(opened.restore(step), wanted[step])
    assert opened.verify(deep=True) == []


def test_what_is_done_to_a_root_is_told_in_leaves_and_leaves_every_step_as_it_was(
    copied: Roots, tool: Any, tmp_path: Path
) -> None:
    def done(root: Path) -> Iterator[Any]:
        yield without(tool(root, "tag", ROOT, 2, "good"), "root")
        yield tool(root, "show", ROOT, "@good")["step"]
        yield tool(root, "branch", ROOT, "@good", "--to", tmp_path / f"of {root.name}", "--copy")[
            "step"
        ]
        yield without(tool(root, "prune", ROOT, "--whole")["compacted"], "stored_bytes")
        yield steps_of(tool(root, "prune", ROOT, "--keep-last", 1, "--keep-every", 5))
        yield without(tool(root, "tag", ROOT, "--delete", "good"), "root")
        yield steps_of(tool(root, "prune", ROOT, 2))
        yield deltacheck.open(root).steps()

    one, many = (list(done(root)) for root in copied)
    assert many == one
    assert many[3]["leaves"] == 16  # all but those that have never changed
    for root in copied:
        assert_whole(tmp_path / f"of {root.name}", copied.states, [2])
        opened = open_root(root)
        newest = opened.manifest()
        (compacted,) = (
            need for need in needs(opened, [newest]) if layout.seq_of(need.ref.id) == newest.seq
        )
        assert compacted.leaf_count == 16
        tool(root, "prune", ROOT, "--compact", "--grace", 0)
        assert_whole(root, copied.states, [0, 5, NEWEST])


def test_repair_sets_aside_the_steps_of_a_damaged_tile(copied: Roots, tool: Any) -> None:
    root = open_root(copied.many)
    segments = [
        root.store.segment(ref)
        for ref in root.manifest(NEWEST).segments
        if layout.seq_of(ref.id) == RECUT
    ]
    segment, entry = next(
        (one, one.table.leaves[f"{BIG}%@0,0"])
        for one in segments
        if f"{BIG}%@0,0" in one.table.leaves
    )
    assert entry.key is not None
    (chunk,) = (copied.many / "segments" / segment.id / "leaves" / entry.key.array).glob("c.*")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    assert main(["repair", str(copied.many), "--lossy"]) == 0
    assert_whole(copied.many, copied.states, list(range(RECUT)))


def test_a_mirror_has_every_step_of_ranks_and_loses_what_is_deleted(
    copied: Roots, tool: Any, tmp_path: Path
) -> None:
    write_bond(
        copied.many, Bond("a run", "elsewhere", NEWEST, open_root(copied.many).manifest().nonce)
    )
    target = tmp_path / "target"
    assert tool(copied.many, "mirror", ROOT, target, "--once")["copied"] == len(copied.states)
    assert_whole(target, copied.states, list(range(NEWEST + 1)))
    for step in (0, 3):
        tool(copied.many, "prune", ROOT, step)
    with Mirror(copied.many, target) as mirror:
        assert mirror.poll() == []
    assert_whole(target, copied.states, [1, 2, 4, 5, 6, 7])


def tensors_of(state: Any) -> Any:
    import torch

    if isinstance(state, dict):
        return {key: tensors_of(value) for key, value in state.items()}
    if not isinstance(state, np.ndarray):
        return state
    plain = torch.from_numpy(
        state.view(np.int16) if state.dtype.name == "bfloat16" else state
    ).clone()
    return plain.view(torch.bfloat16) if state.dtype.name == "bfloat16" else plain


def next_steps(engine: Any, state: Any) -> list[Any]:
    """Two more saves; what they must restore to."""
    found = []
    for step in (NEWEST + 1, NEWEST + 2):
        state["model"]["big"][step] += 1
        state["step"] += 1
        engine.save(step, state).result(240)
        found.append(copy.deepcopy(state))
    return found


@pytest.mark.parametrize("how", ["derived", "post-training", "in memory"])
def test_one_process_goes_on_from_ranks_under_every_policy(
    copied: Roots, tool: Any, tmp_path: Path, how: str
) -> None:
    policy = Policy.auto(derive=False) if how == "derived" else Policy.exact()
    if how == "post-training":
        tool(copied.many, "profile", ROOT, "-o", tmp_path / "profile.json")
        policy = Policy.auto(Profile.read(tmp_path / "profile.json"))
    memory = tmp_path / "memory" if how == "in memory" else None
    target = tensors_of(copied.states[0])
    with Engine(
        copied.many, policy=policy, memory=memory, options=SaveOptions(durability="process")
    ) as engine:
        engine.restore(into=target)
        assert bits(target["model"]["big"]) == bits(copied.states[NEWEST]["model"]["big"])
        wanted = next_steps(engine, target)
        if memory is not None:
            engine.persist()
    opened = deltacheck.open(copied.many)
    for step, state in enumerate(wanted, NEWEST + 1):
        found = opened.restore(step)
        assert all(
            bits(found["model"][name]) == bits(value) for name, value in state["model"].items()
        )
    tool(copied.many, "prune", ROOT, "--whole")
    tool(copied.many, "prune", ROOT, "--compact", "--grace", 0)
    assert opened.verify(deep=True) == []
    assert (
        tool(copied.many, "diff", ROOT, NEWEST, NEWEST + 2, "--leaves", "model/*")["changed"][0][
            "changed"
        ]
        == 2 * 500
    )
    assert [step.step for step in collect(copied.many).steps] == opened.steps()


def test_a_root_of_ranks_in_an_object_store_is_read_as_one_on_disk(
    s3: Any, tool: Any, tmp_path: Path
) -> None:
    address = f"s3://bucket/{secrets.token_hex(8)}/run"
    saved = []
    state = {
        "big": np.arange(5400, dtype=np.float32).reshape(60, 90),
        "scale": np.array(1.5),
        "empty": np.zeros((0, 2)),
        "step": 0,
    }
    for size in (2, 3):
        with RankedRun(storage.of(address), size) as run:  # type: ignore[arg-type]
            for report in run.save(len(saved), state):
                assert not isinstance(report, BaseException), report
        saved.append(copy.deepcopy(state))
        state["big"][:, 3] += 1
    opened = deltacheck.open(address)
    for step, wanted in enumerate(saved):
        found = opened.restore(step)
        assert_same({key: found[key] for key in wanted}, wanted)
    assert_same(
        opened.restore(1, slices={"big": (slice(15, 45), 3)})["big"], saved[1]["big"][15:45, 3:4]
    )
    assert opened.verify(deep=True) == []
    (row,) = tool(address, "diff", ROOT, 0, 1)["changed"]
    assert (row["path"], row["changed"]) == ("big", 60)
    tool(address, "export", ROOT, 1, "--out", tmp_path / "x.safetensors")
    assert_same(load_file(tmp_path / "x.safetensors")["big"], saved[1]["big"])
    update = deltacheck.follow(address).poll()
    assert update is not None
    assert bits(update.changes["big"].values) == bits(saved[1]["big"])
