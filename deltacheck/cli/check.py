"""`verify` and `gc`: is what is on disk whole, and what of it is not needed any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, JustRoot, RootMaybeStep
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from pathlib import Path

    from deltacheck.maintain.repair import Repaired
    from deltacheck.maintain.verify import Verified
    from deltacheck.store.manifest import Manifest
    from deltacheck.store.root import Root


def verify(
    words: RootMaybeStep = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read, decode and compare every byte too.")
    ] = False,
    subset: Annotated[
        str | None,
        typer.Option(
            "--subset",
            metavar="N%",
            help="Read only so much of the bytes, drawn at random: less work, damage found later.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Of --subset; by default another one each time."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Keep in FILE what was read, and go on from there the next time.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Check that steps are whole. Exit code 1 where one is not."""
    from functools import partial

    from deltacheck.cli import arguments as where
    from deltacheck.maintain import verify as work
    from deltacheck.store.root import open_root

    wanted = where.parse(words, most=1)
    root = open_root(wanted.root, item)
    reads = deep or subset is not None or resume is not None
    done = work.check(
        root,
        _step(root, wanted.steps),
        deep=deep,
        subset=None if subset is None else _share(subset),
        seed=seed,
        resume=resume,
        display=partial(output.progress, "reading"),
    )
    manifests, findings = done.manifests, done.findings
    contracts = _contracts(manifests)
    if as_json:
        steps = [manifest.step for manifest in manifests]
        about = {"root": str(root.path), "deep": reads, "steps": steps, "ok": not findings}
        read = {
            "checked_bytes": done.checked_bytes,
            "all_bytes": done.all_bytes,
            "remaining_bytes": done.remaining_bytes,
        }
        rows = [asdict(finding) for finding in findings]
        output.print_json(
            {**about, "findings": rows, "contracts": contracts, **read, "seed": done.seed}
        )
    else:
        for finding in findings:
            leaf = "" if finding.leaf is None else f", leaf {finding.leaf}"
            output.print_line(
                f"step {'unknown' if finding.step is None else finding.step}{leaf}:"
                f" {finding.problem}"
            )
        if contracts and len(manifests) == 1:
            output.print_table(_CONTRACT_COLUMNS, contracts)
        elif contracts:
            output.print_line(_summed(contracts))
        replayed = sum(manifest.replay is not None for manifest in manifests)
        if replayed:
            output.print_line(
                f"{replayed} of them are kept as gradients: what is stored was checked; a restore's"
                " replay proves the rest"
            )
        number = f"{len(manifests)} step{'' if len(manifests) == 1 else 's'}"
        depth = _depth(done) if reads else "tables and metadata read; --deep reads every byte"
        output.print_line(
            f"{number} checked ({depth}):"
            f" {f'{len(findings)} findings' if findings else 'no damage found'}"
        )
    if findings:
        raise typer.Exit(output.FOUND_DAMAGE)


def _step(root: Root, steps: tuple[int | str | None, ...]) -> int | str | None:
    """The step to check; ``None``: all, also where the newest is meant and cannot be told."""
    from deltacheck.errors import Damaged, UnsupportedFormat

    try:
        return root.manifest().step if steps == (None,) else next(iter(steps), None)
    except (Damaged, UnsupportedFormat):
        return None


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(
            f"--subset takes a percentage above 0 and up to 100, such as 5%, not {text!r}"
        )
    return share


def _depth(done: Verified) -> str:
    if done.remaining_bytes == 0 and done.checked_bytes == done.all_bytes:
        return "every byte read"
    share = f"{output.size(done.checked_bytes)} of {output.size(done.all_bytes)} read"
    drawn = "" if done.seed is None else f", drawn with seed {done.seed}"
    return f"{share}{drawn}; {output.size(done.remaining_bytes)} are left"


_CONTRACT_COLUMNS = (
    Column("LEAF", "leaf", left=True),
    Column("CONTRACT", "contract", left=True),
    Column("MEASURED", "measured", output.number),
    Column("ALLOWED", "limit", left=True),
    Column("AS OF", "from_step"),
    Column("USED", "used", output.share),
)


def _contracts(manifests: Sequence[Manifest]) -> list[Row]:
    """The leaves that are not exact, step by step."""
    from deltacheck.leaf.contracts import name_of

    rows: list[Row] = []
    for manifest in manifests:
        for path, promise in manifest.contracts.items():
            row: Row = {
                "step": manifest.step,
                "leaf": path,
                "contract": name_of(promise.terms),
                "measured": promise.measured,
            }
            rows.append(
                row
                | {
                    "limit": promise.allowed,
                    "from_step": promise.from_step,
                    "used": promise.used(manifest.step),
                }
            )
    return rows


def _summed(contracts: list[Row]) -> str:
    steps = {row["step"] for row in contracts}
    kinds = [
        f"{sum(row['contract'] == kind for row in contracts)} {kind}"
        for kind in ("bounded", "reused")
    ]
    return (
        f"{len(steps)} steps have leaves that are not exact: {', '.join(kinds)}. verify ROOT STEP"
        " lists those of one step"
    )


def compact(words: JustRoot = None, as_json: Json = False) -> None:
    """Rewrite the newest step so that a restore applies no deltas. Refused while a training writes
    to the root.
    """
    from deltacheck.cli import arguments as where
    from deltacheck.maintain import compact as work
    from deltacheck.store.lock.lease import Lease
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root)
    lease = Lease(root.store.path)
    try:
        done = work.compact(root)
    finally:
        root.store.close()
        lease.release()
    if as_json:
        output.print_json(
            {"root": str(root.path), "compacted": None if done is None else asdict(done)}
        )
    elif done is None:
        output.print_line("nothing to do: the newest step has no deltas")
    else:
        output.print_line(
            f"step {done.step}: {done.leaves} leaves written whole"
            f" ({output.size(done.stored_bytes)}); a restore applies 0 deltas instead of"
            f" {done.deltas}. Run gc to remove what no step needs any more"
        )


def repair(
    words: JustRoot = None,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only this step; by default all.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Change nothing; say what would be healed and what is lost."
        ),
    ] = False,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy",
            help="Set steps aside that cannot be healed, and manifests that cannot be read.",
        ),
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Heal damaged steps from other steps' data. Refused while a training writes to the root. Exit
    code 1 where something is lost.
    """
    from contextlib import ExitStack

    from deltacheck.cli import arguments as where
    from deltacheck.maintain import repair as work
    from deltacheck.store.files import storage as place
    from deltacheck.store.lock.lease import Lease
    from deltacheck.store.root import MANAGER_STORE, open_root

    path = place.local(where.parse(words).root, "a repair")
    done = work.Repaired()
    with ExitStack() as held:
        if not dry_run:
            store = path / MANAGER_STORE if (path / MANAGER_STORE / "segments").is_dir() else path
            if (store / "segments").is_dir():
                held.callback(Lease(store).release)
        if not (path / "zarr.json").is_file() or not _opens(path):
            work.mend_root(path, done, dry_run=dry_run)
        if not (dry_run and done.documents):  # without its zarr.json there is no root to look into
            root = open_root(path, item)
            held.callback(root.store.close)
            work.repair(root, step, dry_run=dry_run, lossy=lossy, done=done)
    if as_json:
        output.print_json({"root": str(path), "dry_run": dry_run, "lossy": lossy, **asdict(done)})
    else:
        _say_repaired(done, dry_run)
    if done.lost and not done.removed:
        raise typer.Exit(output.FOUND_DAMAGE)


def _opens(path: Path) -> bool:
    from deltacheck.errors import Damaged
    from deltacheck.store.root import open_root

    try:
        open_root(path)
    except Damaged:
        return False
    return True


def _say_repaired(done: Repaired, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    for document in done.documents:
        output.print_line(f"{document} {would}written again")
    for healed in done.healed:
        output.print_line(
            f"step {healed.step}, leaf {healed.leaf}: {would}healed from {healed.source}"
        )
    for lost in done.lost:
        about = "a step" if lost.step is None else f"step {lost.step}"
        leaf = "" if lost.leaf is None else f", leaf {lost.leaf}"
        chunks = (
            ", chunks"
            f" {', '.join(map(str, lost.chunks[:8]))}{', ...' if len(lost.chunks) > 8 else ''}"
            if lost.chunks
            else ""
        )
        output.print_line(f"{about}{leaf}{chunks}: lost: {lost.problem}")
    for removed in done.removed:
        output.print_line(f"{removed}: its step {would}set aside")
    if done.backup is not None:
        output.print_line(f"what was replaced or set aside is in {done.backup}")
    if not (done.documents or done.healed or done.lost):
        output.print_line("nothing to do: no damage found")
    elif done.steps:
        output.print_line(
            f"{len(done.steps)} steps {would}healed ({', '.join(map(str, done.steps))}),"
            f" {output.size(done.stored_bytes)} written. Run gc to remove what no step needs any"
            " more"
        )


def gc(
    words: JustRoot = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; say what would go.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help=(
                "How long a segment must have been known as unneeded, for restores that began"
                " before."
            ),
        ),
    ] = 60.0,
    compact: Annotated[
        bool,
        typer.Option(
            "--compact", help="First rewrite segments that stay for the sake of few leaves."
        ),
    ] = False,
    below: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Rewrite where what is needed takes no more of the segment.",
        ),
    ] = 0.5,
    as_json: Json = False,
) -> None:
    """Remove segments that no step needs. Refused while a training writes to the root."""
    from deltacheck.cli import arguments as where
    from deltacheck.maintain import reclaim
    from deltacheck.store.collect import collect
    from deltacheck.store.lock.lease import Lease
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root)  # all items: what any of them needs stays
    lease = Lease(root.store.path)
    rewritten: tuple[reclaim.Rewritten, ...] = ()
    try:
        if compact:
            rewritten = reclaim.reclaim(root, below=below, dry_run=dry_run)
        # A manager root's writer may be another library's: segments that are newer than every step
        # may belong to its save under way.
        done = collect(
            root, grace_seconds=grace, dry_run=dry_run, writer_is_dead=not root.is_manager_root
        )
    finally:
        root.store.close()
        lease.release()
    if as_json:
        about = {"root": str(root.path), "dry_run": dry_run, "grace_seconds": grace}
        output.print_json(
            {**about, **asdict(done), "rewritten": [asdict(one) for one in rewritten]}
        )
        return
    for one in rewritten:
        output.print_line(
            f"{one.old} ({output.size(one.old_bytes)}) {'would be' if dry_run else 'was'}"
            f" rewritten: {one.leaves} leaves of it are needed ({output.size(one.new_bytes)})"
        )
    removed = "would be removed" if dry_run else "removed"
    for name in done.removed:
        output.print_line(f"{name} {removed}")
    for name in done.waiting:
        output.print_line(f"{name} waits: it is known as unneeded for less than {grace:g} s")
    for name in done.in_use:
        output.print_line(f"{name} waits: a reader has it open")
    output.print_line(
        f"{len(done.removed)} segments {removed}, {output.size(done.freed_bytes)} freed;"
        f" {len(done.waiting) + len(done.in_use)} unneeded ones wait"
        + (f", run gc again in {grace:g} s" if done.waiting else "")
    )
