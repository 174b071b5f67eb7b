"""Check committed steps and say what is wrong, in words that name step, file and leaf. Reads only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from deltacheck import restore
from deltacheck.errors import Damaged, DeltacheckError
from deltacheck.store.root import Root, StepRef, read_manifest
from deltacheck.store.schema import Manifest


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
        for path in root.manifest_paths():
            try:
                read_manifest(path)
            except FileNotFoundError:
                continue  # deleted by a running training since it was listed
            except DeltacheckError as error:
                findings.append(Finding(None, None, str(error)))
        checkpoints = root.checkpoints()
    else:
        manifest = root.manifest(step)
        checkpoints = [ref for ref in root.checkpoints() if ref.seq == manifest.seq]
    metadata_seen: dict[Path, str | None] = {}
    for ref in checkpoints:
        findings += _verify_step(root, ref, deep, metadata_seen)
    return findings


def _verify_step(root: Root, ref: StepRef, deep: bool, metadata_seen: dict[Path, str | None]) -> list[Finding]:
    try:
        manifest = read_manifest(ref.manifest_path)
    except FileNotFoundError:
        return []  # deleted by a running training since it was listed
    try:
        leaves = restore.resolve(root, manifest, stored=True)
    except DeltacheckError as error:
        return [Finding(ref.step, None, str(error))]
    findings = [Finding(ref.step, None, problem) for problem in _metadata_problems(root, manifest, metadata_seen)]
    for path, promise in manifest.contracts.items():
        if not promise.used(manifest.step) <= 1:
            findings.append(
                Finding(ref.step, path, f"its contract allows {promise.allowed}, measured was {promise.measured:.4g}")
            )
    for path, leaf in leaves.items() if deep else ():
        try:
            restore.load({path: leaf})
        except Damaged as error:
            findings.append(Finding(ref.step, path, str(error)))
    return findings


def _metadata_problems(root: Root, manifest: Manifest, seen: dict[Path, str | None]) -> list[str]:
    """Array metadata that differs from what the tables imply. Our reader ignores it; plain zarr does not."""
    problems = []
    for path in root.store.group_paths(manifest):
        if path not in seen:
            seen[path] = _group_problem(path / "zarr.json")
        problems += [problem for problem in [seen[path]] if problem is not None]
    for ref in manifest.segments:
        for path, spec in root.store.segment(ref).array_specs().items():
            if path not in seen:
                seen[path] = _metadata_problem(path / "zarr.json", spec.metadata())
            problem = seen[path]
            if problem is not None:
                problems.append(problem)
    return problems


def _group_problem(path: Path) -> str | None:
    try:
        found = json.loads(path.read_bytes())
        is_group = (found["zarr_format"], found["node_type"]) == (3, "group")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read: {type(error).__name__}: {error}"
    return None if is_group else f"{path} is not the metadata of a zarr group: plain zarr cannot open what is below it"


def _metadata_problem(path: Path, expected: dict[str, object]) -> str | None:
    try:
        found = json.loads(path.read_bytes())
        same = _normal(found) == _normal(expected)
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
