"""The ``run`` command itself."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacheck.backends.launched.launch_options import STARTUP, LaunchOptions, say
from deltacheck.cli import output
from deltacheck.cli.arguments import Json, as_misuse
from deltacheck.cli.launch import command_probe
from deltacheck.cli.launch.attempts import run_attempts, signals_held
from deltacheck.cli.launch.command_probe import CALLS, PACKAGES, PythonFacts
from deltacheck.errors import StorageFailed

if TYPE_CHECKING:
    from deltacheck.store.files.storage import Place

# The least free space of a root. A save needs more for any model; a full disk has none.
_LEAST_BYTES = 16 << 20
# Environment variables in which the starters of several processes number them.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND", help="The training command, as it is."),
    ],
    root: Annotated[
        str | None,
        typer.Option(
            "--root",
            metavar="ROOT",
            envvar="DELTACHECK_ROOT",
            help=(
                "The root, a directory or s3://BUCKET/PREFIX. Default: deltacheck in the output"
                " folder of the trainer."
            ),
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            envvar="DELTACHECK_POLICY",
            help=(
                "exact (every bit), auto (fewer bytes, weights exact, the optimizer within"
                " bounds), or whole; with arguments, auto:moments=bounded. Default: exact."
            ),
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            min=1,
            metavar="N",
            envvar="DELTACHECK_EVERY",
            help=(
                "Save every N steps, beside the saves of the trainer. Smaller: a failure costs"
                " less; larger: less to write. Default: only when the trainer saves."
            ),
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            metavar="N",
            envvar="DELTACHECK_KEEP",
            help="Keep the newest N steps. Default: as many as the trainer keeps.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            min=0,
            metavar="N",
            envvar="DELTACHECK_RESTARTS",
            help="Start the command again after a failure, at most N times.",
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Start a training command that then saves in the background and resumes, without an edit.

    It covers Hugging Face Trainer and what is built on it, Lightning, and Accelerate. Ends with the
    exit status of the command.
    """
    # A word of the command may be --json, too.
    output.use_json(as_json)
    speaks = next((int(n) for name in _RANKS if (n := os.environ.get(name))), 0) == 0
    with signals_held() as mask, tempfile.TemporaryDirectory(prefix="deltacheck-run-") as folder:
        options = LaunchOptions(
            None if root is None else str(_checked_root(root, speaks)),
            policy,
            every,
            keep,
            str(Path(folder, "events")),
        )
        try:
            options.engine()
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--policy") from error
        environment = _environment(options)
        if shutil.which(command[0]) is None:
            raise typer.BadParameter(f"there is no program {command[0]!r}", param_hint="COMMAND")
        _check_command(command_probe.probe(command, environment), speaks)
        status, attempts = run_attempts(
            command,
            environment,
            restarts,
            mask=mask,
            trainings=lambda: _processes(options),
            quiet_stdout=as_json,
        )
        trainings = _trainings(options)
        if speaks:
            _report(options, trainings)
    if as_json:
        output.print_json(
            {
                "command": shlex.join(command),
                "exit_code": status,
                "attempts": attempts,
                "trainings": trainings,
            }
        )
    raise typer.Exit(status)


def _checked_root(root: str, speaks: bool) -> Place:
    """Return a root that can be written to, and say what it has.

    Raises:
        DeltacheckError: The place is no root, cannot be written to, or another process writes.
        OSError: The same of the file system.
    """
    from deltacheck.store.files import storage
    from deltacheck.store.roots import opening

    with as_misuse():
        path = storage.of(root).absolute()
    is_root = opening.is_root_or_fresh(path)
    if isinstance(path, Path):
        _check_writable(path)
    storage.storage_of(path).check_writable()
    if not is_root:
        if speaks:
            say(f"new root {path}")
        return path
    opened = opening.open_root(path)
    newest = opened.latest_step()
    if speaks:
        # Only one of several launchers, which would find each other here.
        storage.storage_of(path).take_lease().release()
        say(f"root {path}, " + ("no step yet" if newest is None else f"newest step {newest}"))
    return path


def _check_writable(path: Path) -> None:
    """Write to the folder of a root, or to the first one above it that exists."""
    folder = next(part for part in (path, *path.parents) if part.is_dir())
    free = shutil.disk_usage(folder).free
    if free < _LEAST_BYTES:
        raise StorageFailed(
            f"{path} has {output.size(free)} of free space, and a save needs"
            f" {output.size(_LEAST_BYTES)} at least; free some, or choose another root with --root"
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The name of the temporary file says nothing.
        raise type(error)(error.errno, error.strerror, str(path)) from None


def _environment(options: LaunchOptions) -> dict[str, str]:
    environment = dict(os.environ)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path not in ("", str(STARTUP))]
    environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *others])
    options.leave_in(environment)
    return environment


def _check_command(facts: PythonFacts | None, speaks: bool) -> None:
    """Refuse a command that cannot be reached, and warn of one without a known trainer.

    Raises:
        ImportError: Its Python ignores the environment, or cannot import deltacheck.
    """
    if facts is None:
        return
    if not facts.is_hooked:
        reason = (
            f"it is started with {' '.join(facts.flags)}, which ignores PYTHONPATH: leave that out"
            if facts.flags
            else "it does not import sitecustomize from PYTHONPATH"
        )
        raise ImportError(f"deltacheck run cannot reach {facts.executable}: {reason}")
    if not facts.has_deltacheck:
        raise ImportError(
            f"{facts.executable} cannot import deltacheck; install it in the environment of the"
            " command"
        )
    if not facts.packages and speaks:
        say(
            f"{facts.executable} has no trainer that is known ({', '.join(PACKAGES)}), so nothing"
            " is saved unless the command starts another Python that has one"
        )


def _processes(options: LaunchOptions) -> set[int]:
    return {event["pid"] for event in options.read_events() if event["event"] == "process"}


def _trainings(options: LaunchOptions) -> list[dict[str, Any]]:
    """Return what each training of the command has saved, by root."""
    from deltacheck.cli.inspection.inspect import listed_steps
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.store.roots.opening import open_root

    first_events: dict[str, dict[str, Any]] = {}
    for event in options.read_events():
        if event["event"] == "training":
            # Of several attempts, the first.
            first_events.setdefault(event["root"], event)
    trainings = []
    for root, event in first_events.items():
        try:
            rows, problems = listed_steps(open_root(root))
        # Nothing was saved.
        except NotACheckpointRoot:
            rows, problems = [], []
        for problem in problems:
            output.warn(problem)
        new = [row for row in rows if _number(row, "seq") >= event["first_seq"]]
        trainings.append(
            {
                "trainer": event["trainer"],
                "root": root,
                "first_step": event["step"],
                "newest_step": rows[-1]["step"] if rows else None,
                "steps": len(rows),
                "new_steps": [row["step"] for row in new],
                "new_bytes": sum(_number(row, "stored_bytes") for row in new),
            }
        )
    return trainings


def _number(row: Mapping[str, object], key: str) -> int:
    value = row[key]
    return value if isinstance(value, int) else 0


def _report(options: LaunchOptions, trainings: list[dict[str, Any]]) -> None:
    for training in trainings:
        steps, new = training["steps"], training["new_steps"]
        say(
            f"{training['root']} has {output.count(steps, 'step')}"
            + (f", newest {training['newest_step']}" if steps else "")
            + f"; new: {len(new)} ({output.size(training['new_bytes'])})"
        )
    trainers = {event["trainer"] for event in options.read_events() if event["event"] == "own"}
    for trainer in sorted(trainers):
        say(f"{trainer} has checkpoints of deltacheck, or a plugin for them, by itself")
    if trainings or trainers:
        return
    if not os.path.exists(f"{options.events}.python"):
        say(
            "nothing was saved: no Python of the command has loaded the hook from PYTHONPATH (env"
            " -i, sudo, containers and python -I remove or ignore it)"
        )
    else:
        say(f"nothing was saved: no training was seen. Looked for calls of {CALLS}")
