"""Commands that show what a root holds: ``ls``, ``show`` and ``log``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import (
    Item,
    Json,
    Leaves,
    RootNewestStep,
    RootOnly,
    open_root,
    open_step,
)
from deltacheck.cli.output import Column, Row

if TYPE_CHECKING:
    from deltacheck.leaf.contracts import Promise
    from deltacheck.report.history import ReportedLeaf, StepSums
    from deltacheck.store.files.storage import Place
    from deltacheck.store.manifest import Brief, Manifest, Tag, Tiles
    from deltacheck.store.roots.root import Root

# Columns that ``ls`` and ``log`` share, so that both begin alike.
_STEP = (
    Column("STEP", "step"),
    Column("SEQ", "seq", rank=6),
    Column("ITEM", "item", left=True),
    Column("TIME", "time", output.local_time, left=True, rank=1),
    Column("TAGS", "tags", ", ".join, left=True),
)
_RAW = Column("RAW", "raw_bytes", output.size, rank=4)
_CHANGE = (
    Column("KEYFRAMES", "keyframes", rank=5),
    Column("DELTAS", "deltas", rank=5),
    Column("UNCHANGED", "unchanged", rank=5),
    Column("DENSITY", "density", output.share, rank=1),
)
_WHY = Column("WHY", "causes", lambda causes: _summary(causes), left=True)
_REASON = Column("DECISION", "stage_reason", left=True, rank=3)
_FAILED = Column("FAILED", "failed_saves")
_COURSE = Column("COURSE", "course")
_MERGED = Column("MERGED", "merged_bytes", output.size)
_SURVIVES = Column(
    "SURVIVES",
    "durability",
    lambda durability: "power cut" if durability == "power" else f"end of {durability}",
    left=True,
)


def ls(words: RootOnly = None, item: Item = None, as_json: Json = False) -> None:
    """List the committed steps of a root."""
    root = open_root(words, item)
    rows, problems = listed_steps(root)
    columns = (
        *_STEP,
        _RAW,
        Column("STORED", "stored_bytes", output.size),
        # Most roots have one course and no saves without syncs.
        *([_COURSE] if any(row["course"] != 1 for row in rows) else []),
        *([_SURVIVES] if any(row["durability"] != "power" for row in rows) else []),
        Column("METRICS", "metrics", output.pairs, left=True),
    )
    _print_steps(root, rows, columns, as_json, problems)


def listed_steps(root: Root) -> tuple[list[Row], list[str]]:
    """Return the rows of ``ls``, oldest save first, and the problems of unreadable documents.

    No table of a segment is read, so a segment is only known to be there.
    """
    # An unreadable tag or manifest becomes a warning. A listing is needed most when a root is
    # damaged.
    problems: list[str] = []
    tags = _read_tags(root, problems)
    checkpoints, damaged = root.read_all()
    problems += [str(error) for error in damaged.values()]
    needed = set[str]().union(*(checkpoint.brief.segments for checkpoint in checkpoints))
    missing = set(root.store.missing_segments(needed))
    courses: dict[str, int] = {}
    rows: list[Row] = []
    for checkpoint in checkpoints:
        brief = checkpoint.brief
        lost = sorted(brief.segments & missing)
        problem = f"missing: {', '.join(lost)}" if lost else None
        rows.append(
            {
                **_step_row(root, checkpoint.manifest_path, brief, problem, tags),
                "course": courses.setdefault(brief.course, len(courses) + 1),
                "raw_bytes": brief.raw_bytes,
                "stored_bytes": brief.stored_bytes,
                "durability": brief.durability,
                "metrics": dict(brief.metrics),
            }
        )
    return rows, problems


def log(
    words: RootOnly = None,
    by_class: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="One line for each leaf class: the first N components of the path, and the type.",
        ),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Show the bytes, their causes, the changed fraction and the time of each save."""
    root = open_root(words, item)
    rows, problems = logged_steps(root, by_class)
    since_column = Column("SINCE", "seconds_since_previous", output.seconds, rank=2)
    columns: tuple[Column, ...]
    if by_class:
        columns = (*_STEP, since_column, Column("CLASS", "class", left=True), _RAW, *_CHANGE)
    else:
        written_column = Column("WRITTEN", "written_bytes", output.size)
        columns = (*_STEP, since_column, _RAW, written_column, *_CHANGE, _WHY)
    # Short runs merge nothing, and most runs have no failed saves.
    merges = [_MERGED] if any(row["merged_bytes"] for row in rows) else []
    failures = [_FAILED] if any(row["failed_saves"] for row in rows) else []
    # Exact policies have no stages.
    stages = [_REASON] if any(row["stage_reason"] for row in rows) else []
    _print_steps(root, rows, (*columns, *merges, *failures, *stages), as_json, problems)
    if rows and not as_json:
        output.print_line(_mean_of(rows))


def logged_steps(root: Root, levels: int | None = None) -> tuple[list[Row], list[str]]:
    """Return the rows of ``log``, oldest save first, and the problems of unreadable documents.

    Args:
        root: The root.
        levels: The number of path components of a leaf class; ``None``: rows without classes.
    """
    from deltacheck.errors import DeltacheckError, StorageFailed
    from deltacheck.report import history
    from deltacheck.report.cause_sizes import CauseCounter
    from deltacheck.report.segment_cost import cost_of

    rows: list[Row] = []
    problems: list[str] = []
    tags = _read_tags(root, problems)
    # Differences are of neighbours in the order of the saves. They are negative if a resumed run
    # has a clock that is behind.
    previous_time: float | None = None
    counter = CauseCounter(cost_of)
    for step in history.steps(root, history.committed(root, problems)):
        time = step.manifest.time
        row: Row = {
            **_step_row(root, step.ref.manifest_path, step.manifest, step.problem, tags),
            "seconds_since_previous": None if previous_time is None else time - previous_time,
            "raw_bytes": step.manifest.raw_bytes,
            "stored_bytes": step.manifest.stored_bytes,
            "written_bytes": step.manifest.stored_bytes + step.manifest_bytes,
            "merged_bytes": step.manifest.merged_bytes,
            "failed_saves": step.manifest.failed_saves,
            "stage": step.manifest.stage,
            "stage_reason": step.manifest.stage_reason,
        }
        previous_time = time
        try:
            change = None if step.states is None else history.summed(step.states.values())
            row |= _change_row(change)
            row["causes"] = counter.count(step)
            if levels is not None:
                row["classes"] = _class_rows(history.by_class(step.states or {}, levels))
        except StorageFailed:
            raise
        except DeltacheckError as error:
            # The tables are whole, but an index that they name is damaged.
            row |= _change_row(None) | {"causes": None, "problem": str(error)}
        rows.append(row)
    return rows, problems


def _mean_of(rows: list[Row]) -> str:
    """Return the mean of all listed saves, first save, keyframes and merges included."""
    sizes = [[cast(int, row[f"{name}_bytes"]) for name in ("written", "merged")] for row in rows]
    written_bytes, raw_bytes = (
        sum(map(sum, sizes)),
        sum(cast(int, row["raw_bytes"]) for row in rows),
    )
    saves = len(rows)
    share = f", {written_bytes / raw_bytes:.2%} of the state" if raw_bytes else ""
    return (
        f"mean of {saves} saves, keyframes and merges included:"
        f" {output.size(written_bytes // saves)}{share}"
    )


def _summary(causes: dict[str, int]) -> str:
    from deltacheck.report.cause_sizes import summary

    return summary(causes)


def _read_tags(root: Root, problems: list[str]) -> dict[str, Tag]:
    """Return the tags of a root, and append the errors of unreadable ones to ``problems``."""
    from deltacheck.store.roots import tags

    readable, damaged = tags.read_all(root.store.path)
    problems += [str(error) for _, error in sorted(damaged.items())]
    return readable


def _step_row(
    root: Root,
    path: Place,
    manifest: Manifest | Brief,
    problem: str | None,
    known_tags: dict[str, Tag],
) -> Row:
    from deltacheck.store.roots import tags

    return {
        "step": manifest.step,
        "seq": manifest.seq,
        "item": path.parent.name if root.is_manager_root else None,
        "time": output.utc(manifest.time),
        "tags": tags.names_of(known_tags, manifest),
        "problem": problem,
    }


def _change_row(change: StepSums | None) -> Row:
    if change is None:
        return dict.fromkeys(
            ("keyframes", "deltas", "unchanged", "words", "changed_words", "density")
        )
    # ``raw_bytes`` of the row counts the whole state, derived leaves included. That of ``change``
    # counts the stored leaves only.
    counts = {name: value for name, value in asdict(change).items() if name != "raw_bytes"}
    return counts | {"density": change.density}


def _class_rows(groups: dict[tuple[str, str], list[ReportedLeaf]]) -> list[Row]:
    from deltacheck.report import history

    rows: list[Row] = []
    for (prefix, dtype), states in groups.items():
        change = history.summed(states)
        rows.append(
            {
                "prefix": prefix,
                "dtype": dtype,
                "raw_bytes": change.raw_bytes,
                **_change_row(change),
            }
        )
    return rows


def _print_steps(
    root: Root, rows: list[Row], columns: tuple[Column, ...], as_json: bool, problems: list[str]
) -> None:
    """Print steps. Any damage causes a warning and decides the exit code.

    ``problems`` are those of documents without a row, such as manifests that cannot be read.
    """
    damage = [
        f"step {row['step']}: {row['problem']}" for row in rows if row["problem"] is not None
    ] + problems
    for problem in damage:
        output.warn(problem)
    if as_json:
        output.print_json({"root": str(root.path), "steps": rows})
    elif rows:
        # JSON has every key in every row, so that scripts need no test. Tables leave empty columns
        # out.
        optional = {"item": root.is_manager_root, "tags": any(row["tags"] for row in rows)}
        visible_columns = [column for column in columns if optional.get(column.key, True)]
        output.print_table(visible_columns, _expand_classes(rows))
    else:
        output.print_line(f"{root.path} has no committed step")
    # All rows are printed first: exit code 4 says that the listing is not complete.
    if damage:
        raise typer.Exit(output.DAMAGED)


def _expand_classes(rows: list[Row]) -> list[Row]:
    """Repeat each row for each of its leaf classes. Rows without classes stay as they are."""
    lines = []
    for row in rows:
        classes = row.get("classes")
        if not isinstance(classes, list):
            lines.append(row)
            continue
        for leaf_class in classes:
            name = f"{leaf_class['prefix']} {leaf_class['dtype']}"
            lines.append(row | leaf_class | {"class": name})
    return lines


def show(
    words: RootNewestStep = None, leaves: Leaves = None, item: Item = None, as_json: Json = False
) -> None:
    """Show the leaves, the Python values and the segments of a step."""
    root, manifest = open_step(words, item)
    document = step_document(root, manifest, leaves or ())
    if as_json:
        output.print_json(document)
    else:
        tables = {name: document[name] for name in ("leaves", "scalars", "segments")}
        _print_step(manifest, root.digest_of(manifest), tables, is_grouped=not leaves)


def step_document(root: Root, manifest: Manifest, patterns: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document of ``show --json``.

    Args:
        root: The root.
        manifest: Manifest of the step.
        patterns: Patterns of leaves. Empty: all leaves, and the Python values.
    """
    from deltacheck.leaf import tree
    from deltacheck.report import history
    from deltacheck.restore import export
    from deltacheck.store.roots.root import open_segments

    owners = export.select(manifest, patterns)
    states = history.leaf_states(manifest, open_segments(root, manifest))
    scalars = {} if patterns else tree.scalars(manifest.tree)
    return {
        "root": str(root.path),
        "step": manifest.step,
        "seq": manifest.seq,
        "time": output.utc(manifest.time),
        "writer": manifest.writer,
        "digest": root.digest_of(manifest),
        "contract": manifest.contract,
        "absent": manifest.absent,
        "durability": manifest.durability,
        "stage": manifest.stage,
        "stage_reason": manifest.stage_reason,
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": manifest.stored_bytes,
        "metrics": dict(manifest.metrics),
        "leaves": [
            _leaf_row(path, owner, states.get(owner), manifest) for path, owner in owners.items()
        ],
        "scalars": [
            {"path": path, "type": type(value).__name__, "value": value}
            for path, value in scalars.items()
        ],
        "segments": [{"id": ref.id, "stored_bytes": ref.stored_bytes} for ref in manifest.segments],
    }


def _leaf_row(path: str, owner: str, state: ReportedLeaf | None, manifest: Manifest) -> Row:
    """Return the row of a leaf.

    Args:
        path: Path of the leaf.
        owner: Path of the leaf that holds its bytes; differs from ``path`` for a tied leaf.
        state: The stored state of the owner, ``None`` if nothing is stored under its path.
        manifest: Manifest of the step.
    """
    spec = manifest.spec(owner)
    derived = manifest.derived.get(owner)
    tiling = manifest.tiles.get(owner)
    changed = None if state is None else state.changed_words()
    words = None if state is None else state.words
    return {
        "path": path,
        "tied_to": None if path == owner else owner,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "raw_bytes": spec.raw_bytes,
        **contract_row(manifest.contracts.get(owner), manifest.step),
        "derived": derived.how if derived is not None else _ways(tiling),
        "kind": "derived" if state is None else str(state.kind),
        "chain_depth": None if state is None else state.depth,
        "words": words,
        "changed_words": changed,
        "density": None if changed is None or not words else changed / words,
        "tiles": None if tiling is None else len(tiling.lanes),
        "ranks": _ranks(manifest, owner),
    }


def contract_row(contract: Promise | None, step: int) -> Row:
    """Return what a step promises of a leaf; ``None``: every bit."""
    from deltacheck.leaf.contracts import name_of

    if contract is None:
        keys = ("measured", "limit", "used", "from_step", "age_steps")
        return {"contract": "exact", **dict.fromkeys(keys)}
    return {
        "contract": name_of(contract.terms),
        "measured": contract.measured,
        "limit": contract.allowed,
        "used": contract.used(step),
        "from_step": contract.from_step,
        "age_steps": None if contract.from_step is None else contract.age(step),
    }


def _ways(tiling: Tiles | None) -> str | None:
    """Return how the tiles of a leaf are derived; ``None`` if they are stored as they are."""
    if tiling is None or not tiling.forms:
        return None
    return ", ".join(sorted({rule.how for rule in tiling.forms}))


def _ranks(manifest: Manifest, path: str) -> list[int] | None:
    """Return the ranks that wrote a leaf.

    Returns:
        Ranks in ascending order. ``None`` if one process wrote the step, or if a maintenance
        command wrote it again.
    """
    tiling, record = manifest.tiles.get(path), manifest.leaves.get(path)
    lanes = set(tiling.lanes if tiling is not None else () if record is None else (record.lane,))
    # Lane -1 means "any segment" (format.md, section 3): the manifest no longer says who wrote the
    # leaf.
    return sorted(lanes) if lanes and -1 not in lanes else None


def _format_ranges(numbers: list[int]) -> str:
    """Format ascending numbers, consecutive ones as a range: ``0-3, 6``."""
    runs: list[list[int]] = []
    for number in numbers:
        # Runs of many ranks would otherwise fill the table with numbers.
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# The most leaves that ``show`` lists one by one without being asked to.
_MOST_ROWS = 40


def grouped(rows: list[Row]) -> list[tuple[Row, list[Row]]]:
    """Group leaves whose paths differ in numbers only.

    Returns:
        The row of each group, and its leaves.
    """
    from deltacheck.report.groups import classes

    by_path = {str(row["path"]): row for row in rows}
    sizes = {path: cast(int, row["raw_bytes"]) for path, row in by_path.items()}
    members = {
        name: [by_path[path] for path in paths]
        for name, paths in classes(sizes, _MOST_ROWS).items()
    }
    return [(_group_row(name, leaves), leaves) for name, leaves in members.items()]


def _group_row(name: str, rows: list[Row]) -> Row:
    """Return the row of a group: sums, the greatest age, depth and error, and all other values."""

    def of(key: str) -> list[Any]:
        return [row[key] for row in rows if row[key] is not None]

    def most(key: str) -> object:
        return max(of(key), default=None)

    def each(key: str) -> str | None:
        return ", ".join(sorted(set(map(str, of(key))))) or None

    words = sum(row["words"] for row in rows if row["density"] is not None)  # type: ignore[misc]
    return {
        "path": name.strip(),
        "leaves": len(rows),
        **{key: each(key) for key in ("dtype", "contract", "derived", "kind")},
        **{key: most(key) for key in ("measured", "age_steps", "chain_depth")},
        "raw_bytes": sum(of("raw_bytes")),
        "density": sum(of("changed_words")) / words if words else None,
    }


def _grouped_values(rows: list[Row]) -> list[Row]:
    """Return a row for each group of Python values whose paths differ in numbers only."""
    from deltacheck.report.groups import classes

    by_path = {str(row["path"]): row for row in rows}
    lines: list[Row] = []
    for name, paths in classes(dict.fromkeys(by_path, 1), _MOST_ROWS).items():
        group = [by_path[path] for path in paths]
        values = list(dict.fromkeys(output.short(row["value"]) for row in group))
        ellipsis = f", ... ({len(group)} values)" if len(values) > 2 else ""
        lines.append(
            {
                "path": name.strip(),
                "type": ", ".join(sorted({str(row["type"]) for row in group})),
                "value": ", ".join(values[:2]) + ellipsis,
            }
        )
    return lines


_LEAF_COLUMNS = (
    Column("LEAF", "path", left=True),
    Column("LEAVES", "leaves", rank=1),
    Column("TIED TO", "tied_to", left=True, rank=3),
    Column("TYPE", "dtype", left=True, rank=2),
    Column("SHAPE", "shape", output.shape, left=True, rank=2),
    _RAW._replace(rank=1),
    Column("CONTRACT", "contract", left=True),
    Column("DERIVED", "derived", left=True, rank=4),
    Column("MEASURED", "measured", output.number),
    Column("ALLOWED", "limit", left=True),
    Column("AS OF", "from_step"),
    Column("AGE", "age_steps"),
    Column("KIND", "kind", left=True, rank=5),
    Column("DEPTH", "chain_depth", rank=6),
    Column("DENSITY", "density", output.share, rank=3),
    Column("TILES", "tiles", rank=5),
    Column("RANKS", "ranks", _format_ranges, rank=5),
)
# Most states have none of these, and the table is wide enough without them.
_OPTIONAL = (
    *("leaves", "shape", "tied_to", "derived", "measured", "limit", "from_step", "age_steps"),
    *("tiles", "ranks"),
)


def _print_step(
    manifest: Manifest, digest: str, tables: dict[str, list[Row]], *, is_grouped: bool
) -> None:

    leaves, scalars, segments = tables["leaves"], tables["scalars"], tables["segments"]
    is_grouped = is_grouped and len(leaves) + len(scalars) > _MOST_ROWS
    if is_grouped:
        leaves, scalars = [row for row, _ in grouped(leaves)], _grouped_values(scalars)
    else:
        scalars = [row | {"value": output.short(row["value"])} for row in scalars]
    needed_bytes = sum(ref.stored_bytes for ref in manifest.segments)
    output.print_line(f"step {manifest.step}, seq {manifest.seq}, written by {manifest.writer}")
    output.print_line(f"digest {digest}")
    output.print_line(
        f"{output.count(len(manifest.specs), 'leaf', 'leaves')} of"
        f" {output.size(manifest.raw_bytes)}; this step stored"
        f" {output.size(manifest.stored_bytes)}, a restore reads from"
        f" {output.size(needed_bytes)}"
    )
    if manifest.absent:
        output.print_line(f"removed by prune: {', '.join(manifest.absent)}")
    if manifest.stage_reason:
        output.print_line(manifest.stage_reason)
    output.print_line("")
    columns = [
        column
        for column in _LEAF_COLUMNS
        if column.key not in _OPTIONAL or any(row.get(column.key) is not None for row in leaves)
    ]
    output.print_table(columns, leaves)
    if is_grouped:
        output.print_line("leaves whose paths differ in numbers only; --leaves '*' lists each")
    if scalars:
        output.print_line("")
        values = (
            Column("VALUE", "path", left=True),
            Column("TYPE", "type", left=True),
            Column("", "value", left=True),
        )
        output.print_table(values, scalars)
    output.print_line("")
    output.print_table(
        (Column("SEGMENT", "id", left=True), Column("STORED", "stored_bytes", output.size)),
        segments,
    )
