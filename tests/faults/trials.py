"""What the children of a zygote do: act under a fault, recover under another, and look at what is left. Arguments are JSON."""

from __future__ import annotations

from pathlib import Path

from faults import scenarios
from faults.scenarios import SCENARIOS


def prepare(name: str, root: str) -> None:
    """Make the root as it is before the fault."""
    SCENARIOS[name].prepare(Path(root))


def act(name: str, root: str, acknowledgements: str) -> None:
    """What is killed."""
    SCENARIOS[name].act(Path(root), scenarios.acknowledge_to(Path(acknowledgements)))


def recover(name: str, root: str, acknowledgements: str) -> None:
    """What the next process does; it may be killed, too."""
    subject = SCENARIOS[name].subject
    scenarios.acknowledge_to(Path(acknowledgements))(subject.go_on(Path(root)))
    subject.leftovers(Path(root))


def check(name: str, root: str, acknowledgements: str) -> list[str]:
    """Every promise that is broken now, or when the next writer and a collection have done their work."""
    scenario, acknowledged = SCENARIOS[name], scenarios.acknowledged_in(Path(acknowledgements))
    problems = scenarios.violations(scenario, Path(root), acknowledged)
    return problems + scenarios.recovery_violations(scenario, Path(root))
