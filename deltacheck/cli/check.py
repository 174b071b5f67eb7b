"""`verify` and `gc`: is what is on disk whole, and what of it is not needed any more."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, JustRoot, RootMaybeStep
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.chain import Chain
    from deltacheck.export import Progress
    from deltacheck.store.root import Root, StepRef
    from deltacheck.store.schema import Manifest
    from deltacheck.verify import Finding


def verify(
    words: RootMaybeStep = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read, decode and compare every byte too.")] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Check that steps are whole. Exit code 1 where one is not."""
    from deltacheck.cli import where
    from deltacheck.store.root import open_root

    wanted = where.parse(words, most=1)
    root = open_root(wanted.root, item)
    checkpoints, findings = _shallow(root, wanted.steps)
    if deep:
        findings += _deep(root, checkpoints)
    manifests = _readable(checkpoints)
    contracts = _contracts(manifests)
    if as_json:
        about = {"root": str(root.path), "deep": deep, "steps": [ref.step for ref in checkpoints], "ok": not findings}
        output.print_json({**about, "findings": [asdict(finding) for finding in findings], "contracts": contracts})
    else:
        for finding in findings:
            leaf = "" if finding.leaf is None else f", leaf {finding.leaf}"
            output.print_line(f"step {'unknown' if finding.step is None else finding.step}{leaf}: {finding.problem}")
        if contracts and len(checkpoints) == 1:
            output.print_table(_CONTRACT_COLUMNS, contracts)
        elif contracts:
            output.print_line(_summed(contracts))
        number = f"{len(checkpoints)} step{'' if len(checkpoints) == 1 else 's'}"
        depth = "every byte read" if deep else "tables and metadata read; --deep reads every byte"
        replayed = sum(manifest.replay is not None for manifest in manifests)
        if replayed:
            output.print_line(
                f"{replayed} of them are kept as gradients: what is stored was checked; a restore's replay proves the rest"
            )
        output.print_line(f"{number} checked ({depth}): {f'{len(findings)} findings' if findings else 'no damage found'}")
    if findings:
        raise typer.Exit(output.FOUND_DAMAGE)


_CONTRACT_COLUMNS = (
    Column("LEAF", "leaf", left=True),
    Column("CONTRACT", "contract", left=True),
    Column("MEASURED", "measured", output.number),
    Column("ALLOWED", "limit", left=True),
    Column("AS OF", "from_step"),
    Column("USED", "used", output.share),
)


def _readable(checkpoints: list[StepRef]) -> list[Manifest]:
    from deltacheck.errors import DeltacheckError
    from deltacheck.store.root import read_manifest

    manifests = []
    for ref in checkpoints:
        with contextlib.suppress(FileNotFoundError, DeltacheckError):  # deleted since, or damaged: a finding says so
            manifests.append(read_manifest(ref.manifest_path))
    return manifests


def _contracts(manifests: list[Manifest]) -> list[Row]:
    """The leaves that are not exact, step by step."""
    from deltacheck.contracts import name_of

    rows: list[Row] = []
    for manifest in manifests:
        for path, promise in manifest.contracts.items():
            row: Row = {"step": manifest.step, "leaf": path, "contract": name_of(promise.terms), "measured": promise.measured}
            rows.append(row | {"limit": promise.allowed, "from_step": promise.from_step, "used": promise.used(manifest.step)})
    return rows


def _summed(contracts: list[Row]) -> str:
    steps = {row["step"] for row in contracts}
    kinds = [f"{sum(row['contract'] == kind for row in contracts)} {kind}" for kind in ("bounded", "reused")]
    return f"{len(steps)} steps have leaves that are not exact: {', '.join(kinds)}. verify ROOT STEP lists those of one step"


def _shallow(root: Root, steps: tuple[int | str | None, ...]) -> tuple[list[StepRef], list[Finding]]:
    """The checkpoints to verify, and what their tables and metadata show."""
    from deltacheck import verify
    from deltacheck.cli import where
    from deltacheck.errors import Damaged

    if not steps:
        return root.checkpoints(), verify.verify(root)
    (step,) = steps
    try:
        seq = root.manifest(step).seq
    except Damaged:  # the step may be one of these
        return [], [verify.Finding(None, None, problem) for problem in where.unreadable(root)]
    return [ref for ref in root.checkpoints() if ref.seq == seq], verify.verify(root, step)


def _deep(root: Root, checkpoints: list[StepRef]) -> list[Finding]:
    """What reading every byte shows. Steps share most of their chains: each is read once, and harms every step that stands on it."""
    from deltacheck import restore
    from deltacheck.errors import Damaged, DeltacheckError
    from deltacheck.store.root import read_manifest
    from deltacheck.verify import Finding

    manifests = []
    for ref in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # deleted by a running training since it was listed
            manifests.append(read_manifest(ref.manifest_path))
    findings = []
    problems: dict[tuple[str, ...], str | None] = {}  # of each chain that was read: leaf, keyframe segment, delta segments
    with output.progress("reading", sum(manifest.raw_bytes for manifest in manifests)) as advance:
        for manifest in manifests:
            try:
                leaves = restore.resolve(root, manifest, stored=True)
            except DeltacheckError:
                continue  # the shallow check has said so
            chains = restore.stored_chains(leaves.values())
            links = {path: (path, chain.key[0].id, *chain.delta_segments) for path, chain in chains.items()}
            fresh = {path: chain for path, chain in chains.items() if links[path] not in problems}
            advance(sum(chain.spec.raw_bytes for path, chain in chains.items() if path not in fresh))
            found = _unreadable(fresh, advance)
            problems |= {links[path]: found.get(path) for path in fresh}
            for path in chains:
                problem = problems[links[path]]
                if problem is not None:
                    findings.append(Finding(manifest.step, path, problem))
            for path, derived in manifest.derived.items():
                if derived.digest:
                    try:
                        restore.load({path: leaves[path]})
                    except Damaged as error:
                        findings.append(Finding(manifest.step, path, str(error)))
    return findings


def _unreadable(chains: dict[str, Chain], advance: Progress) -> dict[str, str]:
    """Read leaves whole, many at a time; leaf path -> what is wrong with it, where something is."""
    from deltacheck import chain, export
    from deltacheck.errors import Damaged

    def load(chunks: dict[str, list[int]]) -> int:
        return sum(data.size for data in chain.load({path: chains[path] for path in chunks}, chunks).values())

    found: dict[str, str] = {}
    for batch in export.batches(chains):
        try:
            advance(load(batch))
        except Damaged:  # one of them at least: which?
            for path, chunks in batch.items():
                try:
                    advance(load({path: chunks}))
                except Damaged as error:
                    found.setdefault(path, str(error))
    return found


def compact(words: JustRoot = None, as_json: Json = False) -> None:
    """Rewrite the newest step so that a restore applies no deltas. Refused while a training writes to the root."""
    from deltacheck import compact as work
    from deltacheck.cli import where
    from deltacheck.store.lease import Lease
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root)
    lease = Lease(root.store.path)
    try:
        done = work.compact(root)
    finally:
        root.store.close()
        lease.release()
    if as_json:
        output.print_json({"root": str(root.path), "compacted": None if done is None else asdict(done)})
    elif done is None:
        output.print_line("nothing to do: the newest step has no deltas")
    else:
        output.print_line(
            f"step {done.step}: {done.leaves} leaves written whole ({output.size(done.stored_bytes)}); "
            f"a restore applies 0 deltas instead of {done.deltas}. Run gc to remove what no step needs any more"
        )


def gc(
    words: JustRoot = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would go.")] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long a segment must have been known as unneeded, for restores that began before.",
        ),
    ] = 60.0,
    compact: Annotated[
        bool, typer.Option("--compact", help="First rewrite segments that stay for the sake of few leaves.")
    ] = False,
    below: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Rewrite where what is needed takes no more of the segment.")
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Remove segments that no step needs. Refused while a training writes to the root."""
    from deltacheck import reclaim
    from deltacheck.cli import where
    from deltacheck.store.collect import collect
    from deltacheck.store.lease import Lease
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root)  # all items: what any of them needs stays
    lease = Lease(root.store.path)
    rewritten: tuple[reclaim.Rewritten, ...] = ()
    try:
        if compact:
            rewritten = reclaim.reclaim(root, below=below, dry_run=dry_run)
        # A manager root's writer may be another library's: segments that are newer than every step may belong to its save under way.
        done = collect(root, grace_seconds=grace, dry_run=dry_run, writer_is_dead=not root.is_manager_root)
    finally:
        root.store.close()
        lease.release()
    if as_json:
        about = {"root": str(root.path), "dry_run": dry_run, "grace_seconds": grace}
        output.print_json({**about, **asdict(done), "rewritten": [asdict(one) for one in rewritten]})
        return
    for one in rewritten:
        output.print_line(
            f"{one.old} ({output.size(one.old_bytes)}) {'would be' if dry_run else 'was'} rewritten: "
            f"{one.leaves} leaves of it are needed ({output.size(one.new_bytes)})"
        )
    removed = "would be removed" if dry_run else "removed"
    for name in done.removed:
        output.print_line(f"{name} {removed}")
    for name in done.waiting:
        output.print_line(f"{name} waits: it is known as unneeded for less than {grace:g} s")
    for name in done.in_use:
        output.print_line(f"{name} waits: a reader has it open")
    output.print_line(
        f"{len(done.removed)} segments {removed}, {output.size(done.freed_bytes)} freed; {len(done.waiting) + len(done.in_use)} unneeded ones wait"
        + (f", run gc again in {grace:g} s" if done.waiting else "")
    )
