"""Bugs planted on purpose: each must make tests fail that pass without it. This is the test of the
tests.

    python -m tests.suites.planted                 # all: exit status 1 if one is not caught
    python -m tests.suites.planted lease-ignored   # one
    # By hand; programs that tests start see the variable too:
    DELTACHECK_PLANT=lease-ignored python -m pytest tests/restore/test_refusals.py

A bug is a change of one function's source. Where the text to change is no longer there, that is an
error: the registry must keep up with the code.
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import io
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

from tests.support.paths import TESTS

PLANT = "DELTACHECK_PLANT"
_SECONDS = 60  # of a test, planted: one that hangs is caught, too


@dataclass(frozen=True, slots=True)
class Edit:
    """``old`` becomes ``new`` in the functions of ``module`` that contain it."""

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Bug:
    """``tests``: what must fail, at least one of them."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


_CUTS = ("faults/test_power_loss.py::test_no_power_cut_takes_an_acknowledged_step[two-saves]",)
_DURABILITY, _LOCAL, _ARRAYS, _SEGMENT = (
    "deltacheck.store.files.durability",
    "deltacheck.store.files.local_storage",
    "deltacheck.store.files.arrays",
    "deltacheck.store.segment",
)

BUGS = (
    Bug(
        "data-not-synced",
        (
            Edit(_DURABILITY, "if self.syncs:\n            os.fsync(descriptor)", "pass"),
            Edit(_ARRAYS, '"file_io_sync": durability.syncs', '"file_io_sync": False'),
            Edit(_LOCAL, '"file_io_sync": syncs', '"file_io_sync": False'),
        ),
        _CUTS,
    ),
    Bug(
        "synced-before-it-is-written",
        (
            Edit(
                _LOCAL,
                "            make(descriptor)\n            durability.sync_file(descriptor)\n",
                "            durability.sync_file(descriptor)\n            make(descriptor)\n",
            ),
        ),
        _CUTS,
    ),
    Bug(
        "directories-not-synced",
        (
            Edit(
                _LOCAL,
                "descriptor = os.open(self.path, os.O_RDONLY | os.O_DIR",
                "return\n        os.open(self.path, os.O_DIR",
            ),
        ),
        _CUTS,
    ),
    Bug(
        "way-to-the-root-not-synced",
        (Edit(_LOCAL, "device = os.stat(self.path).st_dev", "return"),),
        _CUTS,
    ),
    Bug(
        "orbax-renames-not-synced",
        (
            Edit(
                "deltacheck.backends.orbax.manager_root.durable",
                "options.temporary_path_class = _durable(path_class)",
                "pass",
            ),
        ),
        (
            "backends/orbax/test_orbax.py::test_a_step_is_synced_before_the_rename_that_makes_it_exist_and_after_it",
        ),
    ),
    Bug(
        "commit-before-data",
        (Edit(_SEGMENT, "for pending in self._pending:", "for pending in ():"),),
        (
            "restore/test_refusals.py::test_a_full_disk_fails_that_save_alone_whichever_write_it_hits",
        ),
    ),
    Bug(
        "timeout-ignored",
        (
            Edit(
                _SEGMENT,
                "except TimeoutError:\n",
                "except TimeoutError:\n                continue\n",
            ),
        ),
        (
            "restore/test_refusals.py::test_a_hanging_disk_fails_the_save_when_the_deadline_has_passed",
        ),
    ),
    Bug(
        "error-swallowed",
        (
            Edit(
                "deltacheck.save.pipeline",
                "progress.fail(failure)",
                "progress.advance('committed')",
            ),
        ),
        ("restore/test_refusals.py::test_a_failure_at_the_end_of_the_with_block_is_raised_there",),
    ),
    Bug(
        "lease-ignored",
        (
            Edit(
                "deltacheck.store.lock.lease",
                "fcntl.LOCK_EX | fcntl.LOCK_NB",
                "fcntl.LOCK_SH | fcntl.LOCK_NB",
            ),
        ),
        ("restore/test_refusals.py::test_a_second_writer_is_refused_with_the_holders_name",),
    ),
    Bug(
        "sequence-number-reused",
        (
            Edit(
                "deltacheck.store.roots.root",
                "return max(used_seqs, default=-1) + 1",
                "return max(used_seqs, default=0)",
            ),
        ),
        (
            "backends/torch/test_engine.py::test_a_new_process_continues_the_chain_of_the_step_that_it_restored",
        ),
    ),
    Bug(
        "collection-takes-saves-under-way",
        (Edit("deltacheck.store.collect", "layout.seq_of(name) <= newest_seq", "True"),),
        ("store/test_collect.py::test_a_segment_newer_than_the_newest_step_is_a_save_under_way",),
    ),
    Bug(
        "collection-forgets-what-is-protected",
        (Edit("deltacheck.store.collect", "set(protected)", "set()"),),
        ("store/test_collect.py::test_a_segment_that_the_next_save_builds_on_stays",),
    ),
    Bug(
        "collection-passes-over-what-it-cannot-read",
        (
            Edit(
                "deltacheck.store.collect",
                "            raise error\n        for path",
                "            pass\n        for path",
            ),
        ),
        ("store/test_collect.py::test_nothing_is_collected_while_a_manifest_cannot_be_read",),
    ),
    Bug(
        "segments-gone-before-their-step",
        (
            Edit(
                "deltacheck.store.collect",
                '(folder / "zarr.json").unlink(missing_ok=True)',
                "return",
            ),
        ),
        ("store/test_collect.py::test_exactly_the_needed_segments_stay",),
    ),
    Bug(
        "collection-takes-what-a-reader-has-pinned",
        (
            Edit(
                "deltacheck.store.lock.pins",
                "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
                "pass",
            ),
        ),
        ("maintain/test_retention.py::test_what_a_reader_has_open_stays_until_it_has_read",),
    ),
    Bug(
        "memory-let-go-before-it-is-copied",
        (Edit("deltacheck.maintain.drain", "frozenset(due | set(", "frozenset(set("),),
        (
            "maintain/test_memory_tier.py::test_what_a_killed_process_has_not_drained_is_drained_by_the_next_one",
        ),
    ),
    Bug(
        "memory-of-another-run-taken",
        (Edit("deltacheck.maintain.tier_bond", "if bond.root != root:", "if False:"),),
        (
            "maintain/test_memory_tier.py::test_the_memory_of_another_run_is_refused_naming_both_and_left_as_it_is",
        ),
    ),
    Bug(
        "half-a-copy-taken-for-a-segment",
        (
            Edit(
                "deltacheck.maintain.transfer",
                "    try:\n        table = arrays.read_file(path",
                (
                    "    if path.exists():\n        return True\n"
                    "    try:\n        table = arrays.read_file(path"
                ),
            ),
        ),
        ("maintain/test_memory_tier.py::test_the_drain_copies_what_a_kill_has_left_half_copied",),
    ),
    Bug(
        "fence-ignored",
        (
            Edit(
                "deltacheck.store.commit",
                "for entry in reversed(list_directory(Path(str(root / layout.CHECKPOINTS)))):",
                "for entry in ():",
            ),
        ),
        (
            "store/test_fence.py::test_a_writer_behind_another_that_has_gone_on_and_deleted_cannot_commit",
        ),
    ),
    Bug(
        "index-unchecked",
        (Edit("tests.reference.codec", "if count and steps[-1] >= room:", "if False:"),),
        (
            "codec/test_codec_contract.py",
            "codec/test_codec_native.py::test_a_refusal_reads_the_same_as_the_references",
        ),
    ),
    Bug(
        "merge-not-proven",
        (
            Edit(
                "deltacheck.save.chains.merged_deltas",
                "if not np.array_equal(before, after):",
                "if False:",
            ),
        ),
        ("save/test_merged_deltas.py::test_a_merge_that_is_not_proven_is_not_used[encoder]",),
    ),
    Bug(
        "content-not-compared-with-its-digest",
        (Edit("deltacheck.restore.read", "if wrong.size:", "if False:"),),
        ("restore/test_damage.py::test_a_stale_chunk_with_a_right_checksum_is_refused",),
    ),
    Bug(
        "base-not-compared",
        (Edit("deltacheck.restore.chain", "if entry.base != before.digest:", "if False:"),),
        (
            "restore/test_damage.py::test_a_delta_to_another_base_is_refused_before_anything_is_read",
        ),
    ),
    Bug(
        "checksum-not-compared",
        (
            Edit(
                "deltacheck.store.documents",
                "return xxhash.xxh3_128_hexdigest(body).encode() == checksum[len(_CHECKSUM) :]",
                "return True",
            ),
        ),
        (
            "store/test_store.py::test_a_document_that_says_another_thing_in_the_same_form_is_damage",
        ),
    ),
    Bug(
        "numbers-compared-and-not-bits",
        (
            Edit(
                "deltacheck.codec.native",
                "rows, streams = _native.encode(",
                "if shadow is not None and word_bytes == 4:\n            same = now.view('f4') =="
                " shadow.view('f4')\n            now = np.where(same, shadow.view('f4'),"
                " now.view('f4')).view(np.uint8)\n        rows, streams = _native.encode(",
            ),
            Edit(
                "deltacheck.codec.native",
                "return _encoded(*_native.encode_many(",
                "currents = [\n            np.where((now := a.view('f4')) == (old := b.view('f4')),"
                " old, now).view(np.uint8)\n            if size == 4 else a for a, b, size in"
                " zip(currents, bases, word_bytes, strict=True)\n        ]\n        return"
                " _encoded(*_native.encode_many(",
            ),
        ),
        ("backends/torch/test_engine.py::test_a_zero_that_changes_its_sign_is_a_change",),
    ),
)


def named(name: str) -> Bug:
    """A bug of the registry; ``SystemExit`` with the names that there are."""
    for bug in BUGS:
        if bug.name == name:
            return bug
    raise SystemExit(f"there is no bug {name!r}; there are {', '.join(bug.name for bug in BUGS)}")


# --- planting -------------------------------------------------------------------------------------


def places(edit: Edit) -> list[FunctionType]:
    """The functions that contain the text to change."""
    return [
        function
        for function in _functions(importlib.import_module(edit.module))
        if edit.old in _source(function)
    ]


def plant(bug: Bug) -> None:
    """Change the functions of this process. Raises ``LookupError`` where a text is in no function
    of its module.
    """
    for edit in bug.edits:
        found = places(edit)
        if not found:
            raise LookupError(
                f"{bug.name}: no function of {edit.module} contains {edit.old!r} any more"
            )
        for function in found:
            source = _source(function).replace(edit.old, edit.new)
            function.__code__ = _compiled(source, function)
            _sources[function] = source  # for a second edit of it


_sources: dict[FunctionType, str] = {}


def _source(function: FunctionType) -> str:
    if function not in _sources:
        try:
            _sources[function] = inspect.getsource(function)
        except OSError:  # made by a decorator such as dataclass
            _sources[function] = ""
    return _sources[function]


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a module defines, whatever wraps them."""
    holders = [
        module,
        *(
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ),
    ]
    for holder in holders:
        for value in vars(holder).values():
            for name in ("__func__", "fget", "func", "__wrapped__"):
                value = getattr(value, name, None) or value
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                yield value


def _compiled(source: str, function: FunctionType) -> CodeType:
    text = textwrap.dedent(source)
    text = (
        text[text.index("\ndef ") + 1 :] if not text.startswith("def ") else text
    )  # without its decorators
    whole = compile(
        text,
        f"<planted {function.__qualname__}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    return next(
        code
        for code in whole.co_consts
        if isinstance(code, CodeType) and code.co_name == function.__name__
    )


def plant_by_environment() -> None:
    """Plant the bug that ``DELTACHECK_PLANT`` names, if any.

    ``conftest.py`` calls this, and so do programs that tests start.
    """
    name = os.environ.get(PLANT)
    if name:
        plant(named(name))


# --- running --------------------------------------------------------------------------------------


def failing(bug: Bug) -> tuple[str, ...]:
    """The tests that fail with the bug, until the first; empty where none does. ``RuntimeError``
    where
    they cannot be run.

    Runs in a forked child, so that the frameworks are imported once for all.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.environ[PLANT] = bug.name
        with os.fdopen(write, "w") as out:
            out.write(_run(bug))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        status, *lines = told.read().splitlines() or ["nothing"]
    os.waitpid(child, 0)
    if status not in ("0", "1"):
        raise RuntimeError(
            f"NOT RUN: pytest ended with {status} on {', '.join(bug.tests)}:"
            f" {' / '.join(lines[-3:])}"
        )
    return tuple(
        line.partition(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")
        for line in lines
        if status == "1" and line.startswith(("FAILED ", "ERROR ")) and "::" in line
    )


def _run(bug: Bug) -> str:
    import pytest

    told = io.StringIO()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = [
        "-x",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        f"--timeout={_SECONDS}",
    ]
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            status: object = int(
                pytest.main([*arguments, *(str(TESTS / test) for test in bug.tests)])
            )
        except BaseException as error:  # noqa: BLE001 - the parent has to know
            status = f"{type(error).__name__}: {error}"
    return f"{status}\n{told.getvalue()}"


def main(names: list[str]) -> int:
    wanted = [named(name) for name in names] or list(BUGS)
    for module in (
        "torch",
        "hypothesis",
        "pytest",
        "deltacheck.backends.torch",
        "deltacheck.reader",
        "deltacheck.maintain.verify",
    ):
        importlib.import_module(module)  # once, before the forks

    missed = 0
    for bug in wanted:
        begin = time.monotonic()
        try:
            caught = failing(bug)
            how = (
                f"caught by {', '.join(caught)}"
                if caught
                else f"NOT CAUGHT by {', '.join(bug.tests)}"
            )
        except RuntimeError as error:
            caught, how = (), str(error)
        missed += not caught
        print(f"{bug.name}: {how} ({time.monotonic() - begin:.1f} s)", flush=True)
    print(f"{len(wanted) - missed} of {len(wanted)} planted bugs were caught")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
