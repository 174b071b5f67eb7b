"""Space and reading time of a history of weights (``prune --full-last``, ``gc --compact``)."""

from __future__ import annotations

import resource
from pathlib import Path
from statistics import median

import deltacheck
from benchmarks import states
from benchmarks.record import Cell, Figure, Result, Settings, Table
from deltacheck.backends.torch import Engine
from deltacheck.maintain.compaction import reclaim
from deltacheck.policy import Keep
from deltacheck.restore.chain import resolve_chains
from deltacheck.save import root_writer
from deltacheck.store import collect
from deltacheck.store.files import arrays
from deltacheck.store.files.storage import take_lease
from deltacheck.store.roots.opening import open_root

RATE = 1e-6  # of post-training with rewards
FULL_LAST = 2
PRUNE_EVERY = 50  # saves between two calls of prune, as after each job of a long run
TENSOR = "model/layers.0.weight"
SPACE_LIMIT = 10.0  # models
READ_LIMIT = 1.5


def run(settings: Settings) -> Result:
    """Save a run, prune it now and then, and read one tensor of steps all over it."""
    saves, every, size = (6, 3, 1 << 20) if settings.quick else (400, PRUNE_EVERY, 28 << 20)
    root = settings.folder / "run"
    training = states.Synthetic(size, RATE)
    sizes: list[int] = []
    last: dict[str, object] = {}
    changed = words = 0
    for first in range(0, saves, every):
        with Engine(root) as engine:
            if first:
                engine.restore(None, last)
            for step in range(first, min(first + every, saves)):
                training.train_step()
                last = training.state()
                report = engine.save(step, last).result()
                assert report is not None  # every save is waited for
                sizes.append(report.stored_bytes)
                model = [leaf for leaf in report.leaves if leaf.path.startswith("model/")]
                if step:
                    changed += sum(leaf.changed or 0 for leaf in model)
                    words += sum(leaf.raw_bytes for leaf in model) // 2
        _prune(root)
    model_bytes = sum(weight.nbytes for weight in training.weights.values())
    space = arrays.bytes_on_disk(root)
    full = _full_bytes(root, saves)
    steps = range(0, saves, max(1, saves // 40))
    bytes_ratios = [_bytes_ratio(root, step) for step in steps]
    time_ratios = _time_ratios(settings, root, training, steps)
    rows: list[list[Cell]] = [
        [
            saves,
            model_bytes,
            changed / max(1, words),
            sum(sizes) / model_bytes,
            space / model_bytes,
            full / model_bytes,
            median(bytes_ratios),
            max(bytes_ratios),
            median(time_ratios),
            max(time_ratios),
        ]
    ]
    return Result(
        "history",
        f"a run at lr {RATE:g} that saves every step and keeps the optimizer of the {FULL_LAST}"
        f" newest steps, pruned every {PRUNE_EVERY} saves. Bytes of one model in memory: written by"
        " all saves; on disk at the end; of these, in segments that the newest steps need. Reading"
        " one tensor of a step: bytes of its keyframe and deltas before compression, and processor"
        " time, of those of a root that holds one step",
        [
            Table(
                "history",
                {
                    "steps": "count",
                    "model": "bytes",
                    "weights changed a step": "ratio",
                    "written": "number",
                    "on disk": "number",
                    "newest steps": "number",
                    "bytes, median": "number",
                    "bytes, most": "number",
                    "time, median": "number",
                    "time, most": "number",
                },
                rows,
            )
        ],
        [
            Figure(
                "bytes of 1,000 older steps at this rate, of one model",
                (space - full) / model_bytes * 1000 / saves,
                SPACE_LIMIT,
                "number",
            ),
            Figure(
                "bytes decoded for a tensor of any step, of one that is whole",
                max(bytes_ratios),
                READ_LIMIT,
                "number",
            ),
        ],
    )


def _prune(root: Path) -> None:
    opened = open_root(root)
    lease = take_lease(opened.store.path)
    try:
        root_writer.prune(opened, Keep(full_last=FULL_LAST))
        reclaim(opened)
        collect.collect(opened, grace_seconds=0, writer_is_dead=True)
    finally:
        opened.store.close()
        lease.release()


def _full_bytes(root: Path, saves: int) -> int:
    """Return the bytes of the segments that the steps with an optimizer need."""
    opened = open_root(root)
    refs = {
        ref for step in range(saves - FULL_LAST, saves) for ref in opened.manifest(step).segments
    }
    return sum(ref.stored_bytes for ref in refs)


def _bytes_ratio(root: Path, step: int) -> float:
    """Return the bytes that a read decodes, of the bytes of the tensor."""
    opened = open_root(root)
    chain = resolve_chains(opened, opened.manifest(step), [TENSOR])[TENSOR]
    return 1 + sum(chain.delta_bytes) / chain.spec.raw_bytes


def _time_ratios(
    settings: Settings, root: Path, training: states.Synthetic, steps: range
) -> list[float]:
    """Return the times of reading a tensor of some steps, of one that is whole."""
    whole = settings.folder / "whole"
    with Engine(whole) as engine:
        engine.save(0, training.state()).wait()
    # Opened once: the list of steps is read at the first call.
    history, single = deltacheck.open(root), deltacheck.open(whole)
    return [_read_seconds(history, step) / _read_seconds(single, 0) for step in steps]


def _read_seconds(root: deltacheck.Checkpoints, step: int) -> float:
    """Return the processor time of one read; the files are in memory."""
    seconds = []
    for _ in range(5):
        begin = _processor_seconds()
        root.restore(step, leaves=[TENSOR])
        seconds.append(_processor_seconds() - begin)
    return median(seconds)


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
