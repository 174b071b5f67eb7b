"""A listing reads each manifest once, compares its checksum, and leaves its rules to ``read``."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck import Keep, SaveOptions
from deltacheck._native import canonical_json
from deltacheck.backends.torch import Engine
from deltacheck.cli import main
from deltacheck.errors import Damaged, UnsupportedFormat
from deltacheck.store import documents, validation
from deltacheck.store.files import local_storage
from deltacheck.store.manifest import Brief, Manifest, ManifestHead
from deltacheck.store.roots.opening import open_root
from tests.support.forge import GOLDEN, forge_manifest, unpack

STEPS = 5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Engine(tmp_path / "run", options=SaveOptions(durability="process")) as engine:
        for step in range(STEPS):
            engine.save(step, {"weight": torch.full((3,), step), "rate": 0.5, "name": "\u00e9\n"})
    return tmp_path / "run"


def manifest_of(root: Path, step: int) -> Path:
    return root / "checkpoints" / f"c{step:010d}" / "zarr.json"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count opened manifests and checks of whole and of listed manifests."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name != "opened" or "checkpoints" in args[0].parts:
                counts[name] += 1
            return function(*args)

        return call

    opened_file = counted("opened", local_storage.opened_file)
    monkeypatch.setattr(local_storage, "opened_file", opened_file)
    whole, head = validation.check_manifest, validation.check_head
    monkeypatch.setitem(documents._CHECKS, Manifest, counted("whole", whole))
    monkeypatch.setitem(documents._CHECKS, ManifestHead, counted("head", head))
    return counts


def test_a_listing_opens_each_manifest_once_and_checks_the_rules_of_none(
    run: Path, counts: Counter[str]
) -> None:
    assert deltacheck.open(run).steps() == list(range(STEPS))
    assert counts == {"opened": STEPS, "head": STEPS}


def test_ls_opens_each_manifest_once_and_no_table(run: Path, counts: Counter[str]) -> None:
    for table in (run / "segments").glob("*/zarr.json"):
        table.write_bytes(b"")
    assert main(["ls", str(run)]) == 0
    assert counts == {"opened": STEPS, "head": STEPS}


@pytest.mark.parametrize(
    "name", sorted(path.name.partition(".")[0] for path in GOLDEN.glob("*.xz"))
)
def test_a_listing_has_what_the_whole_manifest_says(name: str, tmp_path: Path) -> None:
    root = open_root(unpack(name, tmp_path))
    checkpoints = root.checkpoints()
    assert checkpoints
    for checkpoint in checkpoints:
        manifest = root.read(checkpoint.manifest_path)
        assert checkpoint.brief == Brief.of(manifest)
        assert checkpoint.brief.raw_bytes == sum(spec.raw_bytes for spec in manifest.specs.values())


def test_the_newest_step_and_a_check_of_it_open_one_manifest(
    run: Path, counts: Counter[str]
) -> None:
    assert deltacheck.open(run).latest_step() == STEPS - 1
    assert deltacheck.open(run).verify(STEPS - 1) == []
    assert counts["whole"] == 2
    assert not counts["head"]


def test_the_first_save_of_a_process_opens_the_newest_manifest_only(
    run: Path, counts: Counter[str]
) -> None:
    with Engine(run, options=SaveOptions(durability="process")) as engine:
        engine.save(STEPS, {"weight": torch.zeros(3)}).wait()
    assert counts == {"opened": 1, "head": 1, "whole": 1}


def test_retention_checks_the_rules_of_the_new_manifest_only(
    run: Path, counts: Counter[str]
) -> None:
    options = SaveOptions(durability="process")
    with Engine(run, keep=Keep(last=2), options=options) as engine:
        engine.save(STEPS, {"weight": torch.zeros(3)}).wait()
    assert deltacheck.open(run).steps() == [STEPS - 1, STEPS]
    assert counts["whole"] == 1


def test_a_listing_finds_every_changed_byte(run: Path) -> None:
    path = manifest_of(run, 2)
    content = path.read_bytes()
    # Text outside our document means nothing to us.
    for position in range(len(documents._BEGIN), len(content) - len(documents._END)):
        for change in (1, 2, 32):
            wrong = bytearray(content)
            wrong[position] ^= change
            try:
                documents.decode_brief(bytes(wrong), path)
            except (Damaged, UnsupportedFormat):
                continue
            # Other digits of the same number, or letters of the same escape.
            assert json.loads(wrong) == json.loads(content)


def test_a_damaged_manifest_is_no_step_and_a_finding(run: Path) -> None:
    path = manifest_of(run, 2)
    path.write_bytes(path.read_bytes().replace(b'"rate"', b'"Rate"'))
    assert deltacheck.open(run).steps() == [0, 1, 3, 4]
    _, damaged = open_root(run).read_all()
    assert list(damaged) == [path]
    assert "checksum" in str(damaged[path])
    assert [str(path) in finding.problem for finding in deltacheck.open(run).verify()] == [True]
    assert main(["ls", str(run)]) == 4


def test_a_step_that_breaks_a_rule_under_a_right_checksum_is_listed_and_refused(run: Path) -> None:
    path = manifest_of(run, 2)
    forge_manifest(path, lambda body: body["tree"].update(t="nonsense"))
    opened = deltacheck.open(run)
    assert opened.steps() == list(range(STEPS))
    with pytest.raises(Damaged, match="nonsense"):
        opened.restore(2)
    assert [str(path) in finding.problem for finding in opened.verify()] == [True]
    assert "nonsense" in opened.verify(2)[0].problem
    # It is no substitute for another step either.
    manifest_of(run, 3).write_bytes(b"")
    with pytest.raises(Damaged):
        opened.restore(3)
    assert opened.restore(3, fallback=True)["weight"].tolist() == [1, 1, 1]


def test_a_manifest_in_the_place_of_another_is_not_listed(run: Path) -> None:
    manifest_of(run, 2).write_bytes(manifest_of(run, 3).read_bytes())
    assert deltacheck.open(run).steps() == [0, 1, 3, 4]


def test_a_second_checksum_is_left_to_the_complete_check(run: Path) -> None:
    path = manifest_of(run, 2)
    content = path.read_bytes()
    assert documents._is_bound(content)
    first = content.index(b'"seq"')
    checksum = content[-49:-3]
    assert not documents._is_bound(content[:first] + checksum[1:] + b"," + content[first:])


# --- the canonical form --------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def random_value(numbers: random.Random, level: int = 0) -> Any:
    kind = numbers.randrange(4 if level > 4 else 7)
    if kind == 0:
        return numbers.choice([True, False, None, 0, -7, 10**19, -(2**63)])
    if kind == 1:
        return numbers.choice([0.0, -0.0, 1e-05, 1.5e300, 0.1, 1e16, 123456789.25, 5e-324])
    if kind < 4:
        return "".join(map(chr, numbers.choices([*range(1, 140), 0xE9, 0x2028, 0x1F600], k=5)))
    if kind == 4:
        return [random_value(numbers, level + 1) for _ in range(numbers.randrange(4))]
    keys = ("".join(numbers.choices("abZ09._/%~ ", k=3)) for _ in range(numbers.randrange(6)))
    return {key: random_value(numbers, level + 1) for key in keys}


def test_the_form_of_random_values_is_that_of_python() -> None:
    numbers = random.Random(45)
    for _ in range(2000):
        value = random_value(numbers)
        text = json.dumps(value, separators=(",", ":")).encode()
        assert canonical_json(text) == canonical(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" 1",
        b"1 ",
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1,"b":2}',
        b'{"a": 1}',
        b'{"a":1,}',
        b"[1,]",
        b'{"\\u0061":1}',
        b'{"a":1',
        b'"a',
        b'"\\',
        b'"\\u00',
        b"-0",
        b"01",
        b"+1",
        b"-",
        b"1e5",
        b"1.",
        b".5",
        b"1.50",
        b"1E+16",
        b"1e999",
        b"9" * 21,
        b"NaN",
        b"tru",
        b'"\\u0061"',
        b'"\\u00E9"',
        b'"\\u000a"',
        b'"\\/"',
        b'"\x7f"',
        '"\u00e9"'.encode(),
        b'"\n"',
        b"[" * 2000 + b"]" * 2000,
        b"1\x00",
    ],
)
def test_a_text_that_python_writes_otherwise_is_refused(text: bytes) -> None:
    assert canonical_json(text) is None
