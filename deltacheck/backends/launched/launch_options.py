"""The options of ``deltacheck run``, and the events that its processes report.

Both go through the environment, which every process that the command starts inherits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

# On these, a Trainer saves the step under way, and ends.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options that ``deltacheck run`` hands to the trainers of a command.

    Args:
        root: The root, absolute, or its address in an object store. ``None``: ``deltacheck`` in the
            trainer's own folder.
        policy: The policy, as ``policy_of`` reads it. ``None``: exact.
        every: The number of steps between two saves. ``None``: when the trainer itself saves.
        keep: The number of newest steps that stay. ``None``: as many as the trainer keeps.
        events: The file that events are appended to. ``None``: nobody reads them.
    """

    root: str | None = None
    policy: str | None = None
    every: int | None = None
    keep: int | None = None
    events: str | None = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the options that a launcher has left in an environment.

        Raises:
            ValueError: A number is none.
        """
        texts = {field.name: environment.get(_variable(field.name)) for field in fields(cls)}
        numbers = {name: int(text) for name in ("every", "keep") if (text := texts[name])}
        return cls(**{**texts, "every": None, "keep": None, **numbers})  # type: ignore[arg-type]

    def leave_in(self, environment: MutableMapping[str, str]) -> None:
        """Write the options to an environment, and remove those of another launcher."""
        for name, value in asdict(self).items():
            if value is None:
                environment.pop(_variable(name), None)
            else:
                environment[_variable(name)] = str(value)

    def engine(self) -> dict[str, Any]:
        """Return the policy as an argument of ``Engine``.

        Raises:
            ValueError: There is no such policy.
        """
        from deltacheck.policy.presets import policy_of

        return {} if self.policy is None else {"policy": policy_of(self.policy)}

    def record(self, event: str, **facts: object) -> None:
        """Append an event, which the launcher reads when the command has ended."""
        if self.events is None:
            return
        # A training must not end for want of a report about it. One write, so that lines of several
        # processes do not mix.
        with contextlib.suppress(OSError), open(self.events, "ab", buffering=0) as file:
            file.write(json.dumps({"event": event, **facts}).encode() + b"\n")

    def read_events(self) -> list[dict[str, Any]]:
        """Return all events, oldest first."""
        if self.events is None or not os.path.exists(self.events):
            return []
        events = []
        for line in Path(self.events).read_text().splitlines():
            # A process may have been killed in the middle of a line.
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events


class TrainingRoots:
    """The root of each training of this process.

    Two trainings in one root would take each other's steps for their own. So the second training of
    a process that would use a root gets one beside it, ``ROOT-2``, and so on. A process that is
    started again counts in the same order.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def root(self, base: str, *, continues: bool = False) -> str:
        """Return the root of the training that begins.

        Args:
            base: The root of the first training.
            continues: It continues the training before it.
        """
        number = self._counts[base] + (0 if continues and self._counts[base] else 1)
        return base if number == 1 else f"{base}-{number}"

    def end(self, base: str) -> None:
        """Count a training that has ended without an error. One that failed may be tried again."""
        self._counts[base] += 1


def say(text: str) -> None:
    """Print a line of ``deltacheck run`` on stderr: stdout is that of the command."""
    # A closed stderr must not end a training.
    with contextlib.suppress(OSError, ValueError):
        print(f"deltacheck run: {text}", file=sys.stderr, flush=True)


def say_begin(options: LaunchOptions, trainer: str, root: str, step: int) -> None:
    """Report the begin of a training: on stderr, and to the launcher.

    Args:
        options: The options of the launcher.
        trainer: The trainer's class.
        root: The root.
        step: The step that the training continues from; 0: it begins.
    """
    from deltacheck.errors import NotACheckpointRoot
    from deltacheck.store.roots.opening import open_root

    say(f"{trainer} saves to {root}, " + (f"continues from step {step}" if step else "from step 0"))
    try:
        seq = open_root(root).next_seq()
    except NotACheckpointRoot:
        seq = 0
    options.record("training", trainer=trainer, root=root, step=step, first_seq=seq)


def _variable(name: str) -> str:
    return f"DELTACHECK_{name.upper()}"
