"""Check committed steps and say what is wrong, in words that name step, file and leaf. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from deltacheck import restore
from deltacheck.errors import Damaged, DeltacheckError, StorageFailed
from deltacheck.store.place import Place
from deltacheck.store.root import Root, open_segments
from deltacheck.store.schema import Manifest, SegmentRef
from deltacheck.store.segment import Segment


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``step``: the step that it harms, ``None`` where its manifest cannot be read. ``leaf``: where one is known."""

    step: int | None
    leaf: str | None
    problem: str


def verify(root: Root, step: int | None = None, *, deep: bool = False) -> list[Finding]:
    """Check the steps of a root (by default all of them). ``deep`` reads, decodes and compares every byte.

    Of a step that is kept as gradients, what is stored is checked; the state itself is proven by its replay, at restore.

    Raises ``StepNotFound`` where the asked step is not there and no manifest is damaged.
    """
    findings: list[Finding] = []
    root = root.afresh()
    if step is None:
        checkpoints, damaged = root.read_all()
        findings += [Finding(None, None, str(error)) for _, error in sorted(damaged.items())]
    else:
        manifest = root.manifest(step)
        checkpoints = [ref for ref in root.checkpoints() if ref.seq == manifest.seq]
    known = _Known({}, [])
    for ref in checkpoints:
        try:
            manifest = root.read(ref.manifest_path)
        except FileNotFoundError:
            continue  # deleted by a running training since it was listed
        findings += _verify_step(root, manifest, deep, known)
    return findings


@dataclass(slots=True)
class _Known:
    """What the steps before have shown.

    ``problems``: of the metadata of a group or a segment. ``opened``: the segments of the last step, which the next one shares.
    """

    problems: dict[Place | SegmentRef, list[str]]
    opened: list[Segment]


def _verify_step(root: Root, manifest: Manifest, deep: bool, known: _Known) -> list[Finding]:
    try:
        known.opened = open_segments(root, manifest)
        leaves = restore.resolve(root, manifest, stored=True)
    except StorageFailed:
        raise
    except DeltacheckError as error:
        return [Finding(manifest.step, None, str(error))]
    findings = [Finding(manifest.step, None, problem) for problem in _metadata_problems(root, manifest, known.problems)]
    for path, promise in manifest.contracts.items():
        if not promise.used(manifest.step) <= 1:
            problem = f"its contract allows {promise.allowed}, measured was {promise.measured:.4g}"
            findings.append(Finding(manifest.step, path, problem))
    for path, leaf in leaves.items() if deep else ():
        try:
            restore.load({path: leaf})
        except Damaged as error:
            findings.append(Finding(manifest.step, path, str(error)))
    return findings


def _metadata_problems(root: Root, manifest: Manifest, seen: dict[Place | SegmentRef, list[str]]) -> list[str]:
    """Array metadata that differs from what the tables imply. Our reader ignores it; plain zarr does not."""
    problems = []
    for path in root.store.group_paths():
        if path not in seen:
            seen[path] = _group_problems([path])
        problems += seen[path]
    for ref in manifest.segments:
        if ref not in seen:
            segment = root.store.segment(ref)
            seen[ref] = _group_problems(segment.group_paths())
            found = [_metadata_problem(path / "zarr.json", spec.metadata()) for path, spec in segment.array_specs().items()]
            seen[ref] += [problem for problem in found if problem is not None]
        problems += seen[ref]
    return problems


def _group_problems(paths: Iterable[Place]) -> list[str]:
    return [problem for path in paths if (problem := _group_problem(path / "zarr.json")) is not None]


def _group_problem(path: Place) -> str | None:
    try:
        found = json.loads(path.read_bytes())
        is_group = (found["zarr_format"], found["node_type"]) == (3, "group")
    except StorageFailed:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    return None if is_group else f"{path} is not the metadata of a zarr group: plain zarr cannot open what is below it"


def _metadata_problem(path: Place, expected: dict[str, object]) -> str | None:
    try:
        found = json.loads(path.read_bytes())
        same = _normal(found) == _normal(expected)
    except StorageFailed:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{path} cannot be read: {error}"
    return None if same else f"{path} is not the metadata that was written: plain zarr would read the array wrongly"


def _normal(value: object) -> object:
    """Metadata without the differences that do not matter: TensorStore leaves defaults out when it writes."""
    if isinstance(value, dict):
        defaults = {"index_location": "end", "checksum": False}
        return {
            k: _normal(v) for k, v in sorted(value.items()) if not (k in defaults and v == defaults[k]) and v not in ({}, None)
        }
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return value
