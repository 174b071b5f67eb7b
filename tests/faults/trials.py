"""Tasks of the children of a zygote: act under a fault, recover under another, inspect the result.

Arguments are JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltacheck import Keep, SaveOptions
from tests.faults import scenarios, shim
from tests.faults.scenarios import ORBAX, SCENARIOS
from tests.faults.shim import Fault
from tests.support.waiting import set_deadline, wait_until

FAULT_OVER = "the fault is over"  # a mark
PATIENCE_SECONDS = 240.0  # nothing may take longer, whatever fails or hangs


def prepare(name: str, root: str) -> None:
    """Make the root as it is before the fault."""
    SCENARIOS[name].prepare(Path(root))


def act(name: str, root: str, acknowledgements: str) -> None:
    """Run the part of a scenario that is killed."""
    SCENARIOS[name].act(Path(root), scenarios.acknowledge_to(Path(acknowledgements)))


def recover(name: str, root: str, acknowledgements: str) -> None:
    """Run the next process, which may be killed too."""
    subject = SCENARIOS[name].subject
    scenarios.acknowledge_to(Path(acknowledgements))(subject.go_on(Path(root)))
    subject.leftovers(Path(root))


def check(name: str, root: str, acknowledgements: str) -> list[str]:
    """Every promise that is broken now, or when the next writer and a collection have done their
    work.
    """
    scenario, acknowledged = SCENARIOS[name], scenarios.acknowledged_in(Path(acknowledgements))
    problems = scenarios.violations(scenario, Path(root), acknowledged)
    return problems + scenarios.recovery_violations(scenario, Path(root))


def look(name: str, root: str, acknowledgements: str) -> list[str]:
    """As ``check``, changing nothing."""
    return scenarios.violations(
        SCENARIOS[name], Path(root), scenarios.acknowledged_in(Path(acknowledgements))
    )


# --- errors instead of kills ----------------------------------------------------------------------


def fail(name: str, root: str, acknowledgements: str) -> list[str]:
    """``act`` while calls fail: it may only raise errors of ours. Then, the fault over, the same
    process goes on.
    """
    scenario, acknowledge = SCENARIOS[name], scenarios.acknowledge_to(Path(acknowledgements))
    begin = time.monotonic()
    problems = []
    try:
        scenario.act(Path(root), acknowledge)
    except Exception as error:  # noqa: BLE001 - a finding, if it is not one of ours
        problems += untyped(error, is_command=name in scenarios.COMMANDS)
    problems += _late(begin)
    _end_fault()
    try:
        acknowledge(scenario.subject.go_on(Path(root)))
    except Exception as error:  # noqa: BLE001 - a finding
        problems.append(f"the same process cannot go on: {type(error).__name__}: {error}")
    return problems


def untyped(error: Exception, *, is_command: bool = False) -> list[str]:
    """Return a problem if an error that a public call has raised is not of our exception tree.

    ``is_command``: the scenario calls what a command calls, and the command reports the error.
    """
    from deltacheck.cli import output
    from deltacheck.errors import DeltacheckError

    is_ours = isinstance(error, DeltacheckError)
    if is_ours or (is_command and output.report_error(error) != output.DEFECT):
        return []
    return [f"an error that is not ours: {type(error).__name__}: {error}"]


def train(
    name: str,
    root: str,
    acknowledgements: str,
    area: str,
    fault: dict[str, Any],
    io_timeout_seconds: float,
) -> list[str]:
    """A training whose saves meet the fault: it goes on, learns of every failure, and its next save
    after the fault is whole.

    ``fault``: as ``Fault`` has it. It begins once the root is open, and with it the short deadline.
    """
    acknowledge = scenarios.acknowledge_to(Path(acknowledgements))
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deltacheck").addHandler(handler)
    scenario, options = SCENARIOS[name], SaveOptions(grace_seconds=0 if name in ORBAX else 60)
    first = max(scenario.prepared, default=-1) + 1

    def begin() -> None:
        set_deadline(options, io_timeout_seconds)
        shim.arm(area, Fault.of_json(fault))

    def end() -> None:
        _end_fault()
        set_deadline(options, PATIENCE_SECONDS)

    if name in ORBAX:
        return _train_orbax(Path(root), acknowledge, (begin, end), first, options, scenario.keep)
    return _train_torch(
        Path(root), acknowledge, (begin, end), first, options, scenario.keep, logged
    )


def _train_torch(
    root: Path,
    acknowledge: scenarios.Acknowledge,
    fault: tuple[Callable[[], None], Callable[[], None]],
    first: int,
    options: SaveOptions,
    keep: int | None,
    logged: list[str],
) -> list[str]:
    from deltacheck.errors import SaveFailed

    problems: list[str] = []
    begin_fault, end_fault = fault
    with scenarios.engine(root, keep=Keep(last=keep), options=options) as opened:
        if opened.steps():
            opened.restore()
        begin_fault()
        untold = None
        for step in range(first, first + 3):
            begin = time.monotonic()
            try:
                handle = opened.save(step, scenarios.torch_state(step))
            except SaveFailed as error:
                # Told at the next call, and only then: what it is told of must be the failure that
                # nobody has looked at.
                problems += (
                    []
                    if untold is not None and f"step {untold}" in str(error)
                    else [f"raised for nothing: {error}"]
                )
                untold = None
                continue
            if untold is not None:
                problems.append(f"the failure of step {untold} was not raised at the next call")
            untold = None
            with contextlib.suppress(AssertionError):  # the state below says it
                wait_until(handle.done, PATIENCE_SECONDS)
            problems += _late(begin)
            if handle.state == "committed":
                acknowledge(step)
            elif handle.done():
                problems += (
                    []
                    if any(f"step {step}" in line for line in logged)
                    else [f"the failure of step {step} is not in the log"]
                )
                if step % 2:
                    error = handle.exception(0)
                    problems += (
                        []
                        if isinstance(error, SaveFailed)
                        else [f"step {step} failed with {error!r}"]
                    )
                else:
                    untold = step
        end_fault()
        if untold is not None:
            try:
                opened.wait()
            except SaveFailed:
                pass
            else:
                problems.append(f"the failure of step {untold} was not raised by wait()")
        problems += _saves_again(
            lambda step: opened.save(step, scenarios.torch_state(step)).wait(
                timeout=PATIENCE_SECONDS
            ),
            first + 3,
            acknowledge,
        )
    return problems


def _train_orbax(
    root: Path,
    acknowledge: scenarios.Acknowledge,
    fault: tuple[Callable[[], None], Callable[[], None]],
    first: int,
    options: SaveOptions,
    keep: int | None,
) -> list[str]:
    problems: list[str] = []
    begin_fault, end_fault = fault
    with scenarios.orbax_manager(root, options, max_to_keep=keep) as opened:
        if opened.latest_step() is not None:
            opened.restore(opened.latest_step())
        begin_fault()
        for step in range(first, first + 3):
            begin = time.monotonic()
            try:
                scenarios.orbax_save(opened, step)
            except Exception as error:  # noqa: BLE001 - Orbax raises what failed the save
                problems += untyped(error)
            else:
                acknowledge(step)
            problems += _late(begin)
        end_fault()
        problems += _saves_again(
            lambda step: scenarios.orbax_save(opened, step), first + 3, acknowledge
        )
    return problems


def _end_fault() -> None:
    shim.mark(FAULT_OVER)
    shim.release()


def _saves_again(
    save: Callable[[int], object], step: int, acknowledge: scenarios.Acknowledge
) -> list[str]:
    """The fault is over: the next save is whole, as soon as a thread that hung has come back."""
    steps = itertools.count(step)

    def attempt() -> tuple[list[str]] | None:
        step = next(steps)
        try:
            save(step)
        except Exception as error:  # noqa: BLE001 - a finding, if it is of this save
            if "still hangs" in str(error):
                return None
            return ([f"the next save failed: {type(error).__name__}: {error}"],)
        acknowledge(step)
        return ([],)

    (problems,) = wait_until(attempt)
    return problems


def _late(begin: float) -> list[str]:
    took = time.monotonic() - begin
    return [f"a save took {took:.0f} s"] if took > PATIENCE_SECONDS else []


def check_trust(name: str, root: str, acknowledgements: str, trace: str, error: int) -> list[str]:
    """As ``check``; and that no acknowledged step needs a file of which a write, a sync or a rename
    has failed with ``error``.
    """
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.store.roots.opening import open_root

    problems = []
    with contextlib.suppress(NotACheckpointRoot):
        opened, acknowledged = open_root(root), scenarios.acknowledged_in(Path(acknowledgements))
        needed_by: dict[str, int] = {}
        for checkpoint in opened.checkpoints():
            if checkpoint.step in acknowledged:
                needed_by[checkpoint.manifest_path.parent.name] = checkpoint.step
                needed_by |= {
                    ref.id: checkpoint.step
                    for ref in opened.read(checkpoint.manifest_path).segments
                }
        for op in shim.read_trace(trace):
            if (
                op.number is not None
                and error
                and op.error == error
                and op.kind in ("open", "write", "truncate", "sync", "rename")
            ):
                steps = {needed_by[part] for part in Path(op.path).parts if part in needed_by}
                problems += [
                    f"step {step} was acknowledged, and needs what failed: {op}" for step in steps
                ]
    return problems + check(name, root, acknowledgements)
