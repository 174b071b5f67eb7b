"""`ls`, `show` and `log`: what a root has, what a step is made of, what each save wrote."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.options import Item, Json, JustRoot, Leaves, RootStep
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.report.history import Change, LeafState, Step
    from deltacheck.store.manifest import Manifest, Replay, Tag
    from deltacheck.store.root import Root

_STEP = (
    Column("STEP", "step"),
    Column("SEQ", "seq"),
    Column("ITEM", "item", left=True),
    Column("TIME", "time", output.local_time, left=True),
    Column("TAGS", "tags", ", ".join, left=True),
)
_RAW = Column("RAW", "raw_bytes", output.size)
_CHANGE = (
    Column("KEYFRAMES", "keyframes"),
    Column("DELTAS", "deltas"),
    Column("UNCHANGED", "unchanged"),
    Column("DENSITY", "density", output.share),
)
_REPLAYS = Column("REPLAYS", "replayed_steps")
_SURVIVES = Column(
    "SURVIVES",
    "durability",
    lambda word: f"end of {word}" if word == "process" else f"{word} cut",
    left=True,
)


def ls(words: JustRoot = None, item: Item = None, as_json: Json = False) -> None:
    """List the committed steps of a root."""
    from deltacheck.cli import arguments as where
    from deltacheck.report import history
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root, item)
    rows: list[Row] = []
    unreadable: list[str] = []
    known = _tags(root, unreadable)
    for step in history.steps(root, history.committed(root, unreadable)):
        depth = (
            None
            if step.states is None
            else max((state.depth for state in step.states.values()), default=0)
        )
        sizes = {"raw_bytes": step.manifest.raw_bytes, "stored_bytes": step.stored_bytes}
        replayed = {
            "replayed_steps": _replayed_steps(step.manifest),
            "durability": step.manifest.durability,
        }
        rows.append(
            _row(root, step, known)
            | sizes
            | {"chain_depth": depth}
            | replayed
            | {"metrics": dict(step.manifest.metrics)}
        )
    more = (
        Column("STORED", "stored_bytes", output.size),
        Column("DEPTH", "chain_depth"),
        *([_REPLAYS] if any(row["replayed_steps"] for row in rows) else []),
        *([_SURVIVES] if any(row["durability"] != "power" for row in rows) else []),
        Column("METRICS", "metrics", output.pairs, left=True),
    )
    _print_steps(root, rows, (*_STEP, _RAW, *more), as_json, unreadable)


def log(
    words: JustRoot = None,
    by_class: Annotated[
        bool,
        typer.Option(
            "--by-class", help="One line for each leaf class: the start of the path, and the type."
        ),
    ] = False,
    levels: Annotated[
        int, typer.Option(min=1, metavar="N", help="Path components that make a class.")
    ] = 1,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Show what each save wrote: bytes, changed fraction, time."""
    from deltacheck.cli import arguments as where
    from deltacheck.errors import DeltacheckError
    from deltacheck.report import history
    from deltacheck.store.root import open_root

    root = open_root(where.parse(words).root, item)
    rows: list[Row] = []
    unreadable: list[str] = []
    known = _tags(root, unreadable)
    before: float | None = None
    for step in history.steps(root, history.committed(root, unreadable)):
        since = None if before is None else step.manifest.time - before
        before = step.manifest.time
        row = _row(root, step, known) | {
            "seconds_since_previous": since,
            "raw_bytes": step.manifest.raw_bytes,
            "stored_bytes": step.stored_bytes,
            "written_bytes": step.stored_bytes + step.manifest_bytes,
        }
        try:
            row |= (
                _change(history.summed(step.states.values()))
                if step.states is not None
                else _change(None)
            )
            if by_class:
                row["classes"] = _classes(history.by_class(step.states or {}, levels))
        except DeltacheckError as error:
            row |= _change(None) | {"problem": str(error)}
        rows.append(row)
    since_column = Column("SINCE", "seconds_since_previous", output.seconds)
    if by_class:
        columns = (*_STEP, since_column, Column("CLASS", "class", left=True), _RAW, *_CHANGE)
    else:
        columns = (
            *_STEP,
            since_column,
            _RAW,
            Column("WRITTEN", "written_bytes", output.size),
            *_CHANGE,
        )
    _print_steps(root, rows, columns, as_json, unreadable)


def _tags(root: Root, unreadable: list[str]) -> dict[str, Tag]:
    """The tags of a root. What is wrong with those that cannot be read is added to
    ``unreadable``.
    """
    from deltacheck.store import tags

    found, damaged = tags.read_all(root.store.path)
    unreadable += [str(error) for _, error in sorted(damaged.items())]
    return found


def _replayed_steps(manifest: Manifest) -> int:
    """Updates that a restore of the step replays; 0 where its state itself is stored."""
    return 0 if manifest.replay is None else len(manifest.replay.steps)


def _row(root: Root, step: Step, known: dict[str, Tag]) -> Row:
    from deltacheck.store import tags

    return {
        "step": step.ref.step,
        "seq": step.ref.seq,
        "item": step.ref.manifest_path.parent.name if root.is_manager_root else None,
        "time": output.utc(step.manifest.time),
        "tags": tags.names_of(known, step.manifest),
        "problem": step.problem,
    }


def _change(change: Change | None) -> Row:
    if change is None:
        return dict.fromkeys(
            ("keyframes", "deltas", "unchanged", "words", "changed_words", "density")
        )
    return {name: value for name, value in asdict(change).items() if name != "raw_bytes"} | {
        "density": change.density
    }


def _classes(groups: dict[tuple[str, str], list[LeafState]]) -> list[Row]:
    from deltacheck.report import history

    rows: list[Row] = []
    for (prefix, dtype), states in groups.items():
        change = history.summed(states)
        rows.append(
            {"prefix": prefix, "dtype": dtype, "raw_bytes": change.raw_bytes, **_change(change)}
        )
    return rows


def _print_steps(
    root: Root, rows: list[Row], columns: tuple[Column, ...], as_json: bool, unreadable: list[str]
) -> None:
    """Print the steps. Damage, also that of a manifest which no longer says its step, is warned of
    and decides the exit code.
    """
    damaged = [
        f"step {row['step']}: {row['problem']}" for row in rows if row["problem"] is not None
    ] + unreadable
    for problem in damaged:
        output.warn(problem)
    if as_json:
        output.print_json({"root": str(root.path), "steps": rows})
    elif rows:
        shown = {"item": root.is_manager_root, "tags": any(row["tags"] for row in rows)}
        output.print_table([c for c in columns if shown.get(c.key, True)], _one_a_class(rows))
    else:
        output.print_line(f"{root.path} has no committed step")
    if damaged:
        raise typer.Exit(output.DAMAGED)


def _one_a_class(rows: list[Row]) -> list[Row]:
    """Each row as it is, or once for each of its classes."""
    lines = []
    for row in rows:
        classes = row.get("classes")
        for one in classes if isinstance(classes, list) else [{}]:
            lines.append(row | one | ({"class": f"{one['prefix']} {one['dtype']}"} if one else {}))
    return lines


def show(
    words: RootStep = None, leaves: Leaves = None, item: Item = None, as_json: Json = False
) -> None:
    """Show what a step is made of: leaves, numbers and texts, segments."""
    from deltacheck.cli import arguments as where
    from deltacheck.leaf import tree
    from deltacheck.report import history
    from deltacheck.restore import export
    from deltacheck.store.root import open_segments

    root, (manifest,) = where.manifests(where.parse(words, least=1, most=1), item)
    chosen = export.select(manifest, leaves or ())
    states = history.leaf_states(manifest, open_segments(root, manifest))
    scalars = {} if leaves else tree.scalars(manifest.tree)
    tables: dict[str, list[Row]] = {
        "leaves": [
            _leaf_row(path, owner, states.get(owner), manifest) for path, owner in chosen.items()
        ],
        "scalars": [
            {"path": path, "type": type(value).__name__, "value": value}
            for path, value in scalars.items()
        ],
        "segments": [{"id": ref.id, "stored_bytes": ref.stored_bytes} for ref in manifest.segments],
    }
    if not as_json:
        _print_step(manifest, root.digest_of(manifest), tables)
        return
    about = {
        "root": str(root.path),
        "step": manifest.step,
        "seq": manifest.seq,
        "time": output.utc(manifest.time),
        "writer": manifest.writer,
        "digest": root.digest_of(manifest),
        "contract": manifest.contract,
        "durability": manifest.durability,
        "stage": manifest.stage,
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": history.stored_bytes(manifest),
        "metrics": dict(manifest.metrics),
        "replay": None if manifest.replay is None else _replay(manifest.replay),
    }
    output.print_json(about | tables)


def _replay(replay: Replay) -> Row:
    return {
        "base_step": replay.base_step,
        "base_seq": replay.base_seq,
        "update": replay.update,
        "steps": len(replay.steps),
        "leaves": sorted(replay.digests),
        "inputs": sorted(replay.inputs),
    }


def _leaf_row(path: str, owner: str, state: LeafState | None, manifest: Manifest) -> Row:
    """``state``: of what is stored under the leaf's path, if anything is."""
    from deltacheck.leaf.contracts import name_of

    spec, derived, promise = (
        manifest.spec(owner),
        manifest.derived.get(owner),
        manifest.contracts.get(owner),
    )
    cut = manifest.tiles.get(owner)
    replayed = manifest.replay is not None and owner in manifest.replay.digests
    changed = None if state is None or replayed else state.changed_words()
    words = None if state is None else state.words
    return {
        "path": path,
        "tied_to": None if path == owner else owner,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "raw_bytes": spec.raw_bytes,
        "contract": "exact" if promise is None else name_of(promise.terms),
        "measured": None if promise is None else promise.measured,
        "limit": None if promise is None else promise.allowed,
        "from_step": None if promise is None else promise.from_step,
        "derived": None if derived is None else derived.how,
        "kind": "replayed" if replayed else "derived" if state is None else str(state.kind),
        "chain_depth": None if state is None else state.depth,
        "words": words,
        "changed_words": changed,
        "density": None if changed is None or not words else changed / words,
        "tiles": None if cut is None else len(cut.lanes),
        "ranks": _ranks(manifest, owner),
    }


def _ranks(manifest: Manifest, path: str) -> list[int] | None:
    """The ranks that wrote a leaf; ``None`` where one process wrote the step, or another has
    written it again.
    """
    cut, record = manifest.tiles.get(path), manifest.leaves.get(path)
    lanes = set(cut.lanes if cut is not None else () if record is None else (record.lane,))
    return sorted(lanes) if lanes and -1 not in lanes else None


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, those in a row as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _print_step(manifest: Manifest, digest: str, tables: dict[str, list[Row]]) -> None:
    from deltacheck.report import history

    leaves, scalars, segments = tables["leaves"], tables["scalars"], tables["segments"]
    closure = sum(ref.stored_bytes for ref in manifest.segments)
    output.print_line(f"step {manifest.step}, seq {manifest.seq}, written by {manifest.writer}")
    output.print_line(f"digest {digest}")
    output.print_line(
        f"{len(manifest.specs)} leaves of {output.size(manifest.raw_bytes)}; this step stored"
        f" {output.size(history.stored_bytes(manifest))}, a restore reads from"
        f" {output.size(closure)}"
    )
    if manifest.replay is not None:
        output.print_line(
            f"kept as gradients: a restore replays {_replayed_steps(manifest)} updates of"
            f" {manifest.replay.update} from step {manifest.replay.base_step}, and proves each leaf"
            " by its digest"
        )
    output.print_line("")
    columns = (
        Column("LEAF", "path", left=True),
        Column("TIED TO", "tied_to", left=True),
        Column("TYPE", "dtype", left=True),
        Column("SHAPE", "shape", output.shape, left=True),
        _RAW,
        Column("CONTRACT", "contract", left=True),
        Column("DERIVED", "derived", left=True),
        Column("MEASURED", "measured", output.number),
        Column("ALLOWED", "limit", left=True),
        Column("AS OF", "from_step"),
        Column("KIND", "kind", left=True),
        Column("DEPTH", "chain_depth"),
        Column("DENSITY", "density", output.share),
        Column("TILES", "tiles"),
        Column("RANKS", "ranks", _ranges),
    )
    seldom = ("tied_to", "derived", "measured", "limit", "from_step", "tiles", "ranks")
    output.print_table(
        [
            c
            for c in columns
            if c.key not in seldom or any(row[c.key] is not None for row in leaves)
        ],
        leaves,
    )
    if scalars:
        output.print_line("")
        values = (
            Column("VALUE", "path", left=True),
            Column("TYPE", "type", left=True),
            Column("", "value", left=True),
        )
        output.print_table(values, [row | {"value": output.short(row["value"])} for row in scalars])
    output.print_line("")
    output.print_table(
        (Column("SEGMENT", "id", left=True), Column("STORED", "stored_bytes", output.size)),
        segments,
    )
