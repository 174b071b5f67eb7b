"""The report: its numbers are those of the root, its page needs nothing else, its images show
something.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.s3_server import FOREVER, S3, Fault
from tests.support.states import nudge, training_state

pytest.importorskip("matplotlib")
from matplotlib.image import imread

import deltacheck
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.cli.inspection.inspect import logged_steps
from deltacheck.errors import Damaged, StorageFailed
from deltacheck.leaf.contracts import Bounded, Promise, Reused
from deltacheck.policy.causes import CAUSES, MERGED, REST
from deltacheck.profile.record import FORMAT, VERSION, Curve, Event, LeafProfile, Profile
from deltacheck.report import drawing, figures, page
from deltacheck.report.conclusion import conclusion
from deltacheck.report.data import PROFILE, HeldLeaves, Record, StepRecord, _held, collect
from deltacheck.report.groups import classes, groups
from deltacheck.report.segment_cost import cost_of
from deltacheck.store import documents
from deltacheck.store.files import object_client, storage
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.files.object_storage import AHEAD
from deltacheck.store.roots.opening import open_root

NAMES = ("bytes", "changes", "drift", "contracts", "restore")
# Of a root whose steps are exact; the drift is that of a profile.
EXACT_NAMES = ("bytes", "changes", "drift", "restore")
STEPS = (0, 10, 20, 35, 50)


def save_steps(root: Path, steps: tuple[int, ...] = STEPS) -> None:
    """Keyframes, sparse and dense deltas, a leaf that never moves, and one whose name is an attack
    on whoever draws it.
    """
    state = training_state()
    state["frozen"] = torch.randn(300, 300)
    state["</script><b>$x_1$"] = torch.zeros(3)
    state["noise"] = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
    with Engine(root, policy=Policy.exact(max_chain_depth=3)) as engine:
        for step in steps:
            nudge(state, share=0.002 * (step + 1), seed=step)
            state["optimizer"]["state"][0]["exp_avg"] += 1e-3
            state["noise"] = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
            engine.save(step, state, metrics={"loss": 1.0}).wait()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "root"
    save_steps(path)
    return path


def profile(steps: tuple[int, ...] = (10, 20, 30, 40)) -> Profile:
    def leaf(path: str, role: str, unit: str, scale: float) -> LeafProfile:
        drift = Curve(steps, tuple(scale / (1 + step) for step in steps))
        density = Curve(steps, (0.1,) * len(steps))
        return LeafProfile(
            path, (100, 100), "float32", role, "stable-changing", density, drift, unit
        )

    leaves = [
        leaf("w", "weight", "lr", 2.0),
        leaf("w2", "weight", "lr", 4.0),
        leaf("v", "second_moment", "octaves", 1.0),
    ]
    return Profile(
        FORMAT,
        VERSION,
        "a test",
        10,
        {leaf.path: leaf for leaf in leaves},
        stable_start=30,
        events=(Event(20, "loss", 5.0),),
    )


class Page(HTMLParser):
    """The content of a page: its tags with their attributes, the cells of its tables, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table: list[list[str]] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if tag == "table":
            self._table = self.tables.setdefault(str(dict(attrs)["id"]), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"<{tag}> is closed where another is open"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th") and self._table is not None:
            self._table[-1][-1] += data


def write(root: Path, tmp_path: Path, *options: object) -> tuple[int, str]:
    out = tmp_path / "report.html"
    code = main(["report", str(root), "-o", str(out), *map(str, options)])
    return code, out.read_text() if out.exists() else ""


def numbers(rows: list[list[str]]) -> list[dict[str, str]]:
    head, *body = rows
    return [dict(zip(head, row, strict=True)) for row in body]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def bytes_on_disk(root: Path, seq: int) -> int:
    """Of all files that a save added: told by the names alone."""
    folders = [*root.glob(f"segments/s{seq:010d}-*"), root / "checkpoints" / f"c{seq:010d}"]
    return sum(
        file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()
    )


# --- what is read ---------------------------------------------------------------------------------


def test_the_bytes_of_a_step_are_those_of_all_files_that_its_save_added(root: Path) -> None:
    record = collect(root)
    assert [step.step for step in record.steps] == list(STEPS)
    for step in record.steps:
        assert step.written_bytes == step.recorded_bytes == bytes_on_disk(root, step.seq)
        assert all(size >= 0 for size in step.causes.values())
        assert 0 < step.tables_bytes < 0.1 * step.written_bytes
    assert record.total_bytes == sum(step.written_bytes for step in record.steps)


def test_leaves_of_one_stream_have_the_bytes_that_its_chunks_are_stored_in(tmp_path: Path) -> None:
    """Before compression two leaves have as many bytes, but not on the disk."""
    size, random = 1 << 21, torch.Generator().manual_seed(0)
    noise = torch.randint(1 << 29, 1 << 30, (size,), dtype=torch.int32, generator=random)
    change = torch.randint(1, 1 << 20, (size,), dtype=torch.int32, generator=random)
    plain = torch.arange(size, dtype=torch.int32)
    with Engine(tmp_path, policy=Policy.exact(merge_deltas=False)) as engine:
        engine.save(0, {"noise": noise, "plain": plain}).wait()
        engine.save(1, {"noise": noise + change, "plain": plain + 1}).wait()
    opened = open_root(tmp_path)
    newest = opened.manifest().segments[-1]
    segment = opened.store.segment(newest)
    (part,) = segment.table.parts
    assert {stream.length for stream in part.streams.values()} == {2 * size}
    sizes = cost_of(segment)
    # 20 bits of each word of noise change; the difference of the other leaf is a constant.
    assert sizes.by_leaf["noise"] == pytest.approx(20 / 8 * size, rel=0.05)
    assert sizes.by_leaf["plain"] < 0.01 * size
    assert sizes.tables_bytes + sum(sizes.by_leaf.values()) == pytest.approx(newest.stored_bytes)


def test_changed_fractions_are_those_of_the_log(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = collect(root)
    (name,) = [name for name in record.groups if name.endswith("embed.weight")]
    run = deltacheck.open(root)
    before, after = (run.restore(step, leaves=[name])[name] for step in (0, 10))
    assert record.steps[0].changed[name] is None
    assert record.steps[1].changed[name] == pytest.approx(
        (before.view(np.uint16) != after.view(np.uint16)).mean()
    )
    assert record.steps[1].changed["frozen"] == 0


def test_a_restore_of_a_first_step_reads_what_its_save_wrote_and_of_a_later_one_the_whole_chain(
    root: Path,
) -> None:
    record = collect(root)
    assert record.steps[0].read_bytes == record.steps[0].written_bytes
    assert record.steps[0].depth == 0
    assert record.steps[1].depth == 1
    manifest = (root / "checkpoints" / "c0000000000" / "zarr.json").stat().st_size
    assert record.steps[1].read_bytes == pytest.approx(
        sum(s.written_bytes for s in record.steps[:2]) - manifest, abs=2
    )
    for step in record.steps:
        closure = sum(ref.stored_bytes for ref in open_root(root).manifest(step.step).segments)
        assert step.read_bytes <= closure + step.recorded_bytes


def test_no_array_of_values_is_read(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    expected = collect(root)
    for folder in [*copy.glob("segments/*/leaves"), *copy.glob("segments/*/packed")]:
        for file in (f for f in folder.rglob("*") if f.is_file() and f.name != "zarr.json"):
            file.write_bytes(b"\0" * file.stat().st_size)
    found = collect(copy)
    assert found.steps == expected.steps


@pytest.mark.usefixtures("azure_in_memory")
@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_copy_in_an_object_store_has_the_record_of_the_folder(
    root: Path, tmp_path: Path, s3: S3, scheme: str
) -> None:
    address = f"{scheme}://bucket/{secrets.token_hex(4)}/run"
    with deltacheck.Mirror(root, address) as mirror:
        mirror.poll()
    profile().write(tmp_path / PROFILE)
    (storage.of(address) / PROFILE).write_bytes((tmp_path / PROFILE).read_bytes())
    expected = dataclasses.asdict(collect(root, profile=tmp_path / PROFILE))
    assert dataclasses.asdict(collect(address)) == {**expected, "root": address}


@pytest.mark.parametrize(
    ("where", "skip"),
    [
        (r"/c\.[.0-9]*$", 0),
        (r"/segments/s\d+-\w+/zarr\.json$", 0),
        # The listing asks for the manifests that may follow, and reads those that are there.
        (r"/checkpoints/.*json$", AHEAD + len(STEPS)),
    ],
    ids=["data", "table", "manifest"],
)
def test_a_store_that_fails_has_no_damaged_step(root: Path, s3: S3, where: str, skip: int) -> None:
    address = f"s3://bucket/{secrets.token_hex(4)}/run"
    with deltacheck.Mirror(root, address) as mirror:
        mirror.poll()
    for attempt in (lambda: collect(address), lambda: logged_steps(open_root(address))):
        with (
            s3.failing(Fault("501", where, "GET", times=FOREVER, skip=skip)),
            pytest.raises(StorageFailed),
        ):
            attempt()


def test_of_a_shard_in_an_object_store_its_index_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"memory://bucket/{secrets.token_hex(4)}"
    with Engine(address) as engine:
        engine.save(0, {"w": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)}).wait()
    segment = open_root(address).store.segment(open_root(address).manifest().segments[0])
    sizes, finish_read = list[int](), ObjectPath.finish_read

    def counted(path: ObjectPath, *words: Any) -> tuple[bytes | None, bytes]:
        content, generation = finish_read(path, *words)
        sizes.append(len(content or b""))
        return content, generation

    monkeypatch.setattr(ObjectPath, "finish_read", counted)
    assert cost_of(segment).by_leaf["w"] > 3 << 20
    assert sizes == [3 * 16 + 4]  # 16 bytes for each chunk, and a checksum


def test_no_cause_has_less_than_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer of the process has counted what this one wrote to the object store."""
    monkeypatch.setattr(type(object_client.written), "take", lambda self: 0)
    address = f"memory://bucket/{secrets.token_hex(4)}"
    with Engine(address) as engine:
        engine.save(0, {"w": torch.randn(100_000)}).wait()
    (step,) = collect(address).steps
    assert step.recorded_bytes < 100_000 < step.causes["keyframe"]
    assert min(step.causes.values()) == 0


def test_a_damaged_step_is_named_and_the_others_are_shown(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    (segment,) = copy.glob("segments/s0000000004-*")
    shutil.rmtree(segment)
    record = collect(copy)
    assert [step.problem is None for step in record.steps] == [True] * 4 + [False]
    code, text = write(copy, tmp_path)
    assert code == 4
    assert "warning: step 50" in capsys.readouterr().err
    assert 'class="problems"' in text
    assert "step 50" in text


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[::-1]),
    ],
    ids=["empty", "missing", "turned round"],
)
def test_whatever_file_is_damaged_is_named_or_not_needed(
    harm: Callable[[Path], object], root: Path, tmp_path: Path
) -> None:
    files = sorted(
        file.relative_to(root)
        for file in root.rglob("*")
        if file.is_file() and "control" not in file.parts
    )
    kinds = {
        (file.parts[:1], file.parts[2:4], file.name): file for file in files
    }  # one file of each kind
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    for file in kinds.values():
        content = (copy / file).read_bytes()
        harm(copy / file)
        needed = file.name == "zarr.json" and len(file.parts) == 3  # a manifest or a table
        try:
            record = collect(copy)
        except Damaged:
            assert file == Path("zarr.json")
        else:
            assert record.problems or not needed or not (copy / file).exists()
        (copy / file).write_bytes(content)


def promise(root: Path, step: int, **promises: Promise) -> None:
    """Let the manifest of a step say that some of its leaves are not exact."""
    manifest = open_root(root).manifest(step)
    paths = {path.split("/")[-1]: path for path in manifest.leaves}
    changed = msgspec.structs.replace(
        manifest,
        contracts={paths[name]: made for name, made in promises.items()},
        contract=(
            "reused"
            if any(isinstance(made.terms, Reused) for made in promises.values())
            else "bounded"
        ),
        must_understand=("derived",),
        stage="stable",
    )
    file = root / "checkpoints" / f"c{manifest.seq:010d}" / "zarr.json"
    file.write_bytes(documents.encode_manifest(changed))


def test_contracts_errors_and_the_stage_are_those_of_the_manifests(
    root: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    bounded, reused = (
        Promise(Bounded(0.5, "octaves"), 0.25),
        Promise(Reused(100, 0.1), 0.03, from_step=20),
    )
    promise(copy, 35, master=bounded)
    promise(copy, 50, master=bounded, exp_avg=reused)
    record = collect(copy)
    assert [step.stage for step in record.steps] == ["", "", "", "stable", "stable"]
    assert [len(step.held) for step in record.steps] == [0, 0, 0, 1, 2]
    by_contract = {held.contract: held for held in record.steps[-1].held}
    assert (
        by_contract["bounded"].limit,
        by_contract["bounded"].measured,
        by_contract["bounded"].used,
    ) == (0.5, 0.25, 0.5)
    assert by_contract["reused"].age_steps == 30
    assert record.steps[-1].bounded_bytes == record.steps[-1].reused_bytes == 700 * 1000 * 4
    assert record.steps[-1].exact_bytes == record.steps[-1].raw_bytes - 2 * 700 * 1000 * 4
    code, text = write(copy, tmp_path)
    assert code == 0
    found = numbers(Page(text).tables["contracts-table"])
    assert [
        row["measured"] for row in found if row["step"] == "50" and row["contract"] == "reused"
    ] == ["0.03"]
    assert "stable" in [row["unit or stage"] for row in numbers(Page(text).tables["drift-table"])]
    assert list(Page(text).tables) == [f"{name}-table" for name in NAMES]
    restore, command = conclusion(record)[-2:]
    assert restore.startswith("A restore of step 50 gives back every bit of ")
    assert "at most 30 updates old. A resume from such a step cost 2 to 3.5 steps" in restore
    assert f"deltacheck verify {copy} 50 prints the contract" in command
    assert page._text(restore) in text


def test_the_conclusion_names_bytes_promise_and_the_next_command(root: Path) -> None:
    record = collect(root)
    written, restore, command = conclusion(record)
    share = sum(step.written_bytes for step in record.steps) / sum(
        step.raw_bytes for step in record.steps
    )
    assert written.startswith("5 saves wrote ")
    assert f"{100 * share:.1f} % of what whole checkpoints take" in written
    assert restore == "A restore of step 50 gives back every bit."
    assert "deltacheck plan" in command or "deltacheck verify" in command
    bounded = dataclasses.replace(
        record.steps[-1], held=(HeldLeaves("w", "bounded", "lr", 1, 32.0, 1.0),)
    )
    restore = conclusion(dataclasses.replace(record, steps=(*record.steps[:-1], bounded)))[1]
    assert "cost 0 to 0.7 steps of progress" in restore
    damaged = dataclasses.replace(record, problems=("step 50: lost",))
    assert "deltacheck repair" in conclusion(damaged)[-1]


def test_of_a_class_the_leaf_nearest_to_its_limit_is_shown(root: Path) -> None:
    manifest = open_root(root).manifest(50)
    a, b = [path for path in manifest.leaves if path.endswith(("master", "exp_avg"))]
    for used in ((0.1, 0.4), (0.4, 0.1)):
        promises = {
            path: Promise(Bounded(0.5, "octaves"), error)
            for path, error in zip((a, b), used, strict=True)
        }
        (held,), _ = _held(msgspec.structs.replace(manifest, contracts=promises), {"both": (a, b)})
        assert (held.leaves, held.measured) == (2, 0.4)


# --- groups ---------------------------------------------------------------------------------------


def transformer(layers: int) -> dict[str, int]:
    blocks = {
        f"model/layers.{k}.{name}.weight": 100
        for k in range(layers)
        for name in ("q", "k", "up", "down")
    }
    moments = {
        f"optimizer/state/{k}/{name}": 200
        for k in range(4 * layers)
        for name in ("exp_avg", "exp_avg_sq")
    }
    return {"model/embed.weight": 5000, **blocks, **moments, "rng": 5}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40, 1000])
def test_every_leaf_is_in_one_group_and_groups_are_few(most: int) -> None:
    sizes = transformer(80)
    found = groups(sizes, most)
    assert sorted(path for paths in found.values() for path in paths) == sorted(sizes)
    assert len(found) <= most


def test_a_thousand_leaves_become_layers_in_their_order() -> None:
    names = list(groups(transformer(80), 40))
    layers = [
        int(found.group(1)) for name in names if (found := re.match(r"model/layers\.(\d+)", name))
    ]
    assert len(layers) >= 5
    assert layers == sorted(layers)
    assert "model/embed.weight" in names


def test_moments_of_one_kind_share_a_group() -> None:
    names = list(groups(transformer(80), 8))
    assert not any("*" in name for name in names if name.startswith("optimizer"))
    assert any(name.endswith("/exp_avg") for name in names)
    assert any(name.endswith("/exp_avg_sq") for name in names)


def test_layers_of_one_size_are_split_alike() -> None:
    names = list(groups(transformer(6), 30))
    assert sum(name.startswith("model/layers") for name in names) in (6, 24)


def test_classes_are_leaves_that_differ_in_numbers_alone() -> None:
    found = classes(transformer(80), 12)
    assert "optimizer/state/*/exp_avg" in found
    assert len(found["model/layers.*.q.weight"]) == 80
    assert found.keys() > {"rng", "model/embed.weight"}
    assert len(classes(transformer(80), 3)) <= 3


def test_a_few_leaves_are_a_group_each() -> None:
    sizes = {"a": 1, "a/b": 2, "": 3, "x.9": 1, "x.10": 1}
    assert list(groups(sizes, 10)) == ["", "a", "a/b", "x.9", "x.10"]
    assert groups({}, 3) == {}


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    profile().write(folder / "profile.json")
    code, text = write(root, folder, "--profile", folder / "profile.json")
    assert code == 0
    return text


def test_the_page_is_whole_and_has_every_figure_and_its_table(text: str) -> None:
    parsed = Page(text)
    assert parsed.open == []
    assert [attributes["id"] for tag, attributes in parsed.tags if tag == "section"] == list(
        EXACT_NAMES
    )
    drawn = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(drawn) == len(EXACT_NAMES)
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawn)
    assert list(parsed.tables) == [f"{name}-table" for name in EXACT_NAMES]


def test_the_page_needs_nothing_else_and_runs_nothing(text: str) -> None:
    assert "http" not in text
    assert "//" not in re.sub(r"base64,[^\"]*", "", text)
    assert "@import" not in text
    used = set()
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "link", "iframe", "object", "embed")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:image/png;base64,"))
            used |= {target[1:]} if target and target.startswith("#") else set()
    known = [attributes["id"] for _, attributes in Page(text).tags if "id" in attributes]
    assert used <= set(known)
    assert len(known) == len(set(known)), (
        "an identifier stands twice: figures would show parts of each other"
    )


def test_the_numbers_of_the_page_are_those_of_the_root(text: str, root: Path) -> None:
    parsed, run = Page(text), open_root(root)
    rows = numbers(parsed.tables["bytes-table"])
    assert [int(row["step"]) for row in rows] == run.steps() == list(STEPS)
    for row in rows:
        assert (
            sum(number(row[cause]) for cause in (*CAUSES, MERGED, REST))
            == number(row["sum"])
            == bytes_on_disk(root, int(row["seq"]))
        )
        assert number(row["state"]) == run.manifest(int(row["step"])).raw_bytes
    cost = numbers(parsed.tables["restore-table"])
    assert [int(row["deepest"]) for row in cost] == [step.depth for step in collect(root).steps]
    changed = parsed.tables["changes-table"]
    assert changed[0] == ["leaves", "number", *map(str, STEPS)]
    assert sum(int(row[1]) for row in changed[1:]) == len(run.manifest().leaves)
    drift = numbers(parsed.tables["drift-table"])
    assert [row["median"] for row in drift if row["role"] == "second moment"] == [
        f"{1 / (1 + s):.4g}" for s in (10, 20, 30, 40)
    ]
    assert "stable start, 30" in parsed.text


def test_names_from_disk_are_text_and_nothing_more(text: str) -> None:
    assert "<b>" not in text
    assert re.search(r"<text[^>]*>[^<]*script&gt;&lt;b&gt;\$x_1\$", text), (
        "neither markup nor mathematics"
    )


def test_the_same_root_gives_the_same_figures(root: Path) -> None:
    first, second = (figures.draw(collect(root)) for _ in range(2))
    assert [page._svg(drawing) for drawing in first] == [page._svg(drawing) for drawing in second]


def test_tips_lie_on_the_figures(root: Path) -> None:
    (drawing,) = [drawing for drawing in figures.draw(collect(root)) if drawing.name == "bytes"]
    svg = page._svg(drawing)
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    boxes = [
        [float(v) for v in box]
        for box in re.findall(
            r'</title><rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+"/>', svg
        )
    ]
    assert len(boxes) == len(STEPS)
    assert all(b[0] >= a[0] + a[1] - 0.2 for a, b in itertools.pairwise(boxes)), (
        "one beside the other"
    )
    assert boxes[-1][0] + boxes[-1][1] < width


def test_a_root_without_a_step_has_a_page_that_says_so(tmp_path: Path) -> None:
    with Engine(tmp_path / "root"):
        pass
    code, text = write(tmp_path / "root", tmp_path)
    assert code == 0
    assert "no committed step" in text


def test_a_profile_in_the_root_is_found(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert collect(copy).profile is None
    profile().write(copy / "profile.json")
    found = collect(copy).profile
    assert found is not None
    assert found.source == "a test"
    assert "<dt>profile</dt><dd>a test: stable start: step 30</dd>" in write(copy, tmp_path)[1]
    (tmp_path / "report.html").unlink()
    # Of a run that a program has profiled itself.
    msgspec.structs.replace(profile(), source="", stable_start=None).write(copy / "profile.json")
    assert "<dt>profile</dt><dd>no stable start</dd>" in write(copy, tmp_path)[1]


def colours(image: np.ndarray) -> int:
    return len(
        np.unique(
            (255 * image[::2, ::2, :3]).astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)
        )
    )


def test_images_show_something(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = write(root, tmp_path, "--png", tmp_path / "images", "--json")
    assert code == 0
    assert '"images"' in capsys.readouterr().out
    files = sorted((tmp_path / "images").iterdir())
    # Without a profile and without a stage there is no drift to show.
    assert [file.stem for file in files] == sorted({*EXACT_NAMES} - {"drift"})
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG\r\n")
        image = imread(file)
        assert image.shape[0] >= 100
        assert image.shape[1] >= 1000
        assert colours(image) > 10


def test_a_missing_library_is_told_with_the_way_out(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from deltacheck.cli import main; "
        f"sys.exit(main(['report', {str(root)!r}, '-o', {str(tmp_path / 'r.html')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 5
    assert "pip install matplotlib" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "r.html").exists()


# --- records that a small root does not give ------------------------------------------------------


def long_run(steps: int) -> Record:
    def step(k: int) -> StepRecord:
        held = (
            (HeldLeaves("v", "bounded", "octaves", 3, 0.5, 0.1 + 0.3 * k / steps),)
            if k >= steps // 2
            else ()
        )
        return StepRecord(
            step=k * 5, seq=k, time=float(k), stage="warm" if k < steps // 2 else "stable",
            reason="",
            raw_bytes=100_000, leaves=3,
            recorded_bytes=1010 + k, tables_bytes=10, causes={"changed": 1000 + k, "rest": 10},
            changed={"a": 0.01, "b": None},
            held=held, exact_bytes=100_000,
            bounded_bytes=0, reused_bytes=0, depth=k % 8, mean_depth=float(k % 8),
            read_bytes=50_000, problem=None,
        )  # fmt: skip

    made = {"a": ("a",), "b": ("b", "b2")}
    return Record(
        "somewhere",
        1,
        ("me",),
        tuple(map(step, range(steps))),
        made,
        {},
        profile(tuple(range(0, 5 * steps, 50))),
    )


def test_a_long_run_is_drawn_in_few_columns_and_listed_in_full() -> None:
    drawings = {drawing.name: drawing for drawing in figures.draw(long_run(1000))}
    assert len(drawings["bytes"].tips) <= figures.MOST_COLUMNS
    assert len(drawings["bytes"].rows) == 1000
    assert "13 checkpoints" in drawings["bytes"].caption
    assert len(drawings["changes"].rows[0]) == 2 + 1000


def test_every_kind_of_stage_contract_and_size_can_be_drawn(tmp_path: Path) -> None:
    record = long_run(6)
    odd = dataclasses.replace(
        record.steps[-1],
        stage="degraded",
        held=(
            HeldLeaves("m", "reused", "octaves", 1, 0.1, math.inf, 7),
            HeldLeaves("w", "bounded", "lr", 1, 0.0, 0.0),
            HeldLeaves("名前", "bounded", "max", 1, 1e-3, 2e-3),
        ),
        raw_bytes=1 << 50,
    )
    drawings = figures.draw(dataclasses.replace(record, steps=(*record.steps, odd)))
    assert len(page.write_images(drawings, tmp_path)) == len(NAMES)
    assert "名前" in page.page("t", {}, (), drawings)


@pytest.mark.parametrize("spread", [1e4, 3.0, 1.2])
def test_every_axis_has_labels_within_its_limits(spread: float) -> None:
    """Also a logarithmic axis of less than a decade, and the upper panels of a shared axis."""
    record = long_run(40)
    leaves = {
        path: msgspec.structs.replace(
            leaf,
            drift=Curve((0, 50, 100), (0.013, 0.013 * spread / 2, 0.013 * spread)),
        )
        for path, leaf in record.profile.leaves.items()
    }
    ran = msgspec.structs.replace(record.profile, leaves=leaves)
    for made in figures.draw(dataclasses.replace(record, profile=ran)):
        made.figure.draw_without_rendering()
        for axes in made.figure.axes:
            for axis, (low, high) in (
                (axes.xaxis, axes.get_xlim()),
                (axes.yaxis, sorted(axes.get_ylim())),
            ):
                shown = [
                    label.get_text()
                    for label in axis.get_ticklabels()
                    if label.get_visible()
                    and low <= label.get_position()[axis is axes.yaxis] <= high
                ]
                is_bar = axis is axes.xaxis and axes.get_label() == "<colorbar>"
                assert any(shown) or is_bar, (made.name, axes.get_ylabel(), axis.axis_name)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (5 << 30, "5 GiB"),
        (2**52, "4 PiB"),
    ],
)
def test_sizes_are_short(count: int, shown: str) -> None:
    assert drawing.format_size(count) == shown


# --- a real browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Callable[..., Any]:
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        pytest.skip("needs a Chromium in PATH")

    def call(*arguments: str) -> Any:
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--v=0",
        )
        return subprocess.run(
            [found, *flags, *arguments], capture_output=True, text=True, timeout=240
        )

    return call


def test_a_browser_shows_every_figure_and_finds_nothing_to_complain_of(
    text: str, browser: Callable[..., Any], tmp_path: Path
) -> None:
    file, shot = tmp_path / "report.html", tmp_path / "shot.png"
    file.write_text(text)
    done = browser("--dump-dom", file.as_uri())
    assert done.stdout.count("<svg") == len(EXACT_NAMES)
    assert "CONSOLE" not in done.stderr
    browser("--window-size=1100,4000", f"--screenshot={shot}", file.as_uri())
    image = imread(shot)
    for fifth in np.array_split(image[:3000], 5):
        assert colours(fifth) > 10
