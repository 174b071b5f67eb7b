"""Commands that check and repair a root: ``verify`` and ``repair``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import (
    Item,
    Json,
    MaxBytes,
    RootMaybeStep,
    RootOnly,
    as_misuse,
    parse,
)
from deltacheck.cli.inspection.inspect import contract_row
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.maintain.repair import Repaired
    from deltacheck.maintain.verify import Finding, Verified
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.roots.root import Root


def verify(
    words: RootMaybeStep = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read, decode and compare every byte.")
    ] = False,
    subset: Annotated[
        str | None,
        typer.Option(
            "--subset",
            metavar="N%",
            help=(
                "Read only this percentage of the bytes, drawn at random. Smaller: a faster check"
                " that finds damage later."
            ),
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Record in FILE what was read, and continue from there in the next run.",
        ),
    ] = None,
    item: Item = None,
    max_bytes: MaxBytes = None,
    as_json: Json = False,
) -> None:
    """Check that steps are whole. The exit code is 1 if damage was found."""
    from functools import partial

    from deltacheck.errors import StepNotFound
    from deltacheck.maintain import verify as verification
    from deltacheck.store.roots.opening import open_root

    selection = parse(words, max_steps=1)
    root = open_root(selection.root, item)
    # Each of these options reads data, so ``--subset`` and ``--resume`` imply a deep check.
    reads_data = deep or subset is not None or resume is not None
    with as_misuse():  # the file of ``--resume`` may be another one
        result = verification.check(
            root,
            _step_to_check(root, selection.steps),
            deep=deep,
            subset=None if subset is None else _parse_share(subset),
            resume=resume,
            display=partial(output.progress, "reading"),
        )
    # A script must not take the check of nothing for the check of a run.
    if not result.manifests and not result.findings:
        raise StepNotFound(
            f"{root.path} has no committed step: nothing was checked. Name the root of the run"
        )
    if as_json:
        output.print_json(verified_document(root, result, reads_data))
    else:
        _print_verified(root, result, reads_data)
    # The results are complete on stdout before the exit code says that something was found.
    if result.findings:
        raise typer.Exit(output.FOUND_DAMAGE)


def verified_document(root: Root, result: Verified, reads_data: bool) -> Row:
    """Return the document of ``verify --json``."""
    return {
        "root": str(root.path),
        "deep": reads_data,
        "steps": [manifest.step for manifest in result.manifests],
        "ok": not result.findings,
        "findings": [_problem_row(finding) for finding in result.findings],
        "redundant": [_problem_row(finding) for finding in result.redundant],
        "contracts": _contract_rows(result.manifests),
        "checked_bytes": result.checked_bytes,
        "all_bytes": result.all_bytes,
        "remaining_bytes": result.remaining_bytes,
        "seed": result.seed,
    }


def _problem_row(finding: Finding) -> Row:
    return {"step": finding.step, "leaf": finding.leaf, "problem": finding.problem}


def _lines_of(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each problem, with the steps and leaves that share it."""
    from deltacheck.store.roots.wording import listed

    by_problem: dict[tuple[bool, str], list[Finding]] = {}
    for finding in findings:
        by_problem.setdefault((finding.redundant, finding.problem), []).append(finding)
    lines = []
    for (redundant, problem), group in by_problem.items():
        # A manifest that cannot be read does not say which step it is.
        steps = sorted({finding.step for finding in group if finding.step is not None})
        leaves = list(dict.fromkeys(finding.leaf for finding in group if finding.leaf is not None))
        place = f"{'steps' if len(steps) > 1 else 'step'} {listed(steps) or 'unknown'}"
        if len(leaves) == 1:
            place += f", leaf {leaves[0]}"
        elif leaves:
            place += f", {len(leaves)} leaves ({leaves[0]}, ...)"
        lines.append(f"{'redundant: ' if redundant else ''}{place}: {problem}")
    return lines


def _print_verified(root: Root, result: Verified, reads_data: bool) -> None:
    manifests, findings = result.manifests, result.findings
    # The contracts were compared by the check. They are listed in any case, because a leaf within
    # its bound is no finding, but the user must be able to see how near the bound is.
    contracts = _contract_rows(manifests)
    for line in _lines_of((*findings, *result.redundant)):
        output.print_line(line)
    if contracts and len(manifests) == 1:
        output.print_table(_CONTRACT_COLUMNS, contracts)
    elif contracts:
        output.print_line(_summarize_contracts(contracts))
    depth = (
        _describe_depth(result)
        if reads_data
        else "tables and metadata read; --deep reads every byte"
    )
    conclusion = output.count(len(findings), "finding") if findings else "no damage found"
    if result.redundant:
        conclusion += (
            f"; {len(result.redundant)} redundant: these files are damaged, but no restore needs"
            " them; repair writes them again"
        )
    output.print_line(f"{output.count(len(manifests), 'step')} checked ({depth}): {conclusion}")
    if findings:
        _print_remedy(root, result)


def _print_remedy(root: Root, result: Verified) -> None:
    """Print the steps that no damage was found in, and the command that sets the others aside."""
    from deltacheck.store.roots.wording import listed

    damaged = {finding.step for finding in result.findings}
    intact = [manifest.step for manifest in result.manifests if manifest.step not in damaged]
    if intact:
        output.print_line(f"steps without a finding: {listed(intact)}")
    command = f"deltacheck repair {shlex.quote(str(root.path))} --lossy"
    output.print_line(f"next: {command} --dry-run names the steps that it would set aside")


def _step_to_check(root: Root, steps: tuple[int | str | None, ...]) -> int | str | None:
    """Return the step to check, ``None`` for all steps.

    If the newest step is asked for and its manifest cannot be read, all steps are checked: the
    damaged manifest no longer says which step it is, and must appear among the findings.
    """
    from deltacheck.errors import Damaged, UnsupportedFormat

    try:
        return root.manifest().step if steps == (None,) else next(iter(steps), None)
    except (Damaged, UnsupportedFormat):
        return None


def _parse_share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        # An invalid number gets the same message as one out of range: 0 is refused by the test
        # below.
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(
            f"--subset takes a percentage above 0 and up to 100, such as 5%, not {text!r}"
        )
    return share


def _describe_depth(result: Verified) -> str:
    # Both must hold. A resumed run may leave nothing to later runs without having read all by
    # itself.
    if result.remaining_bytes == 0 and result.checked_bytes == result.all_bytes:
        return "every byte read"
    share = f"{output.size(result.checked_bytes)} of {output.size(result.all_bytes)} read"
    return f"{share}; {output.size(result.remaining_bytes)} are left"


_CONTRACT_COLUMNS = (
    Column("LEAF", "leaf", left=True),
    Column("CONTRACT", "contract", left=True),
    Column("MEASURED", "measured", output.number),
    Column("ALLOWED", "limit", left=True),
    Column("AS OF", "from_step"),
    Column("AGE", "age_steps"),
    Column("USED", "used", output.share),
)


def _contract_rows(manifests: Sequence[Manifest]) -> list[Row]:
    """Return a row for each leaf of each step that is not exact."""
    return [
        {"step": manifest.step, "leaf": path, **contract_row(contract, manifest.step)}
        for manifest in manifests
        for path, contract in manifest.contracts.items()
    ]


def _summarize_contracts(contracts: list[Row]) -> str:
    steps = {row["step"] for row in contracts}
    counts = [
        f"{sum(row['contract'] == kind for row in contracts)} {kind}"
        for kind in ("bounded", "reused")
    ]
    return (
        f"{output.count(len(steps), 'step')} with leaves that are not exact: {', '.join(counts)}."
        " verify ROOT STEP lists the leaves of one step"
    )


def repair(
    words: RootOnly = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Change nothing; print what would be written and what is lost."
        ),
    ] = False,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy", help="Set aside steps that are lost, and manifests that cannot be read."
        ),
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write damaged digests and metadata again, and name the steps that are lost.

    Refused while a training writes to the root. The exit code is 1 if something is lost and still
    in the root.
    """
    from contextlib import ExitStack

    from deltacheck.maintain import repair as repairing
    from deltacheck.store.files import storage
    from deltacheck.store.files.storage import inside
    from deltacheck.store.roots.manager_steps import MANAGER_STORE
    from deltacheck.store.roots.opening import open_root

    # The path is used before any root is opened: the root's own document may be what is damaged.
    path = storage.of(parse(words).root)
    result = repairing.Repaired()
    with ExitStack() as resources:
        # A dry run takes no lease, so it also works beside a training.
        if not dry_run:
            # The root may not open before it is repaired, so its store is found by its segments.
            store = path / MANAGER_STORE if (path / MANAGER_STORE / "segments").is_dir() else path
            inside(path, store / "segments")
            if (store / "segments").is_dir():
                # The stack is unwound in reverse order, so the store is closed before its lease is
                # released.
                resources.callback(storage.take_lease(store).release)
        repairing.repair_root_document(path, result, dry_run=dry_run)
        # A dry run does not write the missing document, so the root still cannot be opened.
        if not (dry_run and result.documents):
            root = open_root(path, item)
            resources.callback(root.store.close)
            repairing.repair(root, dry_run=dry_run, lossy=lossy, result=result)
    if as_json:
        output.print_json({"root": str(path), "dry_run": dry_run, "lossy": lossy, **asdict(result)})
    else:
        _print_repaired(result, dry_run)
    # A lossy repair sets the steps aside, so what is lost is no longer in the root.
    if result.lost and not result.removed:
        raise typer.Exit(output.FOUND_DAMAGE)


def _print_repaired(result: Repaired, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    for document in result.documents:
        output.print_line(f"{document} {would}written again")
    for lost in result.lost:
        step = "a step" if lost.step is None else f"step {lost.step}"
        leaf = "" if lost.leaf is None else f", leaf {lost.leaf}"
        output.print_line(f"{step}{leaf}: lost: {lost.problem}")
    for manifest in result.removed:
        output.print_line(f"{manifest}: its step {would}set aside")
    if result.backup is not None:
        output.print_line(f"documents that were replaced or set aside are in {result.backup}")
    if not (result.documents or result.lost):
        output.print_line("nothing to do: no damage found")
