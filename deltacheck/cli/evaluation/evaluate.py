"""The ``eval`` command: measure the checkpoints of a whole training."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Json, as_misuse, working_folder
from deltacheck.cli.evaluation.evaluation_tables import print_evaluation
from deltacheck.cli.output import Row

if TYPE_CHECKING:
    from deltacheck.evaluate.judge import Judgement
    from deltacheck.evaluate.records import Evidence

# The least number of unkilled runs: one more than a statement about the noise floor needs.
_UNKILLED_SEEDS = 6

# The options of ``eval``.
_Factory: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FACTORY",
        help="Or MODULE:FACTORY. factory(seed) makes the run to evaluate.",
    ),
]
_Policy: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help=(
            "Policy of the checkpoints: exact or auto, with arguments of its preset"
            " (auto:moments=bounded)."
        ),
    ),
]
_Profile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|measured",
        help="Profile for auto; measured: that of the first unkilled run. Default: none.",
    ),
]
_Steps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=3,
        metavar="N",
        help=(
            "Steps of each run. Default: 40; 100 if the policy is not exact, because moments"
            " are not reused before the run is stable."
        ),
    ),
]
_Every: TypeAlias = Annotated[
    int, typer.Option(min=1, metavar="K", help="Steps between two checkpoints.")
]
_Kills: TypeAlias = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Kills of each killed seed. More: rarer faults are found; fewer: faster.",
    ),
]
_Seeds: TypeAlias = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="S",
        help=(
            "Number of seeds to kill; as many, and at least 6, also run unkilled, for the noise"
            " floor. More: smaller differences of quality are detected."
        ),
    ),
]
_Quick: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="12 steps and one kill. The figures have no meaning.",
    ),
]
_Keep: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Work in this new or empty folder, and keep its files."),
]


def evaluate(  # noqa: PLR0913 - one argument per option
    factory: _Factory,
    policy: _Policy = "exact",
    profile: _Profile = None,
    steps: _Steps = None,
    every: _Every = 5,
    kills: _Kills = 2,
    seeds: _Seeds = 2,
    quick: _Quick = False,
    keep: _Keep = None,
    as_json: Json = False,
) -> None:
    """Measure size, latency, recovery and quality of the checkpoints of a run.

    The exit code is 1 if a restore is wrong, and 6 if the seeds are too few to tell the quality.
    """
    from rich.console import Console

    from deltacheck import __version__
    from deltacheck.evaluate import machine
    from deltacheck.evaluate.judge import judge
    from deltacheck.evaluate.records import EvaluationPlan
    from deltacheck.evaluate.run import evaluate as run
    from deltacheck.evaluate.run import show_progress
    from deltacheck.policy.presets import policy_of

    with as_misuse():
        is_lossless = policy_of(policy).hidden is None
    if profile is not None and is_lossless:
        raise typer.BadParameter("--profile goes with --policy auto")
    plan = EvaluationPlan(
        factory,
        policy,
        steps or (40 if is_lossless else 100),
        every,
        kills,
        seeds,
        # Every killed seed needs an unkilled run with the same seed to be compared with.
        max(seeds, _UNKILLED_SEEDS),
        profile=_profile_file(profile),
    )
    # This plan is short and still passes every phase. It replaces the options for the number of
    # steps, kills and seeds.
    plan = replace(plan, steps=12, every=3, kills=1, seeds=1, noise_seeds=2) if quick else plan
    # Sizes and latencies are judged from the second save on, and a kill needs a save to restore
    # from.
    if len(plan.checkpoints()) < 3:
        raise typer.BadParameter(
            f"--steps {plan.steps} leaves"
            f" {output.count(len(plan.checkpoints()), 'checkpoint')}; give at least"
            f" {3 * plan.every + 1}"
        )
    start = time.time()
    # On a terminal only: JSON and files have results alone.
    quiet = not sys.stderr.isatty() or output.json_requested()
    console = Console(stderr=True, quiet=quiet)
    with working_folder(keep, "deltacheck-eval-") as folder, show_progress(console) as progress:
        # The machine is described before the runs: afterwards its load would be ours.
        description = machine.describe(folder)
        evidence = run(plan, folder, progress)
    judgement = judge(evidence)
    seconds = time.time() - start
    command = shlex.join(["deltacheck", *sys.argv[1:]])
    if as_json:
        output.print_json(document(evidence, judgement, description, command, seconds))
    else:
        output.print_line(
            f"deltacheck {__version__}, {description['date']}, {description['processor']},"
            f" {description['cores']} cores, {description['file_system']}"
        )
        print_evaluation(evidence, judgement, description, seconds)
    if judgement.is_undecided:
        raise typer.Exit(output.UNDECIDED)
    if not judgement.holds:
        raise typer.Exit(output.FOUND_DAMAGE)


def document(
    evidence: Evidence, judgement: Judgement, machine: dict[str, Any], command: str, seconds: float
) -> Row:
    """Return an evaluation as one JSON object.

    The digests of the final states are left out: they are many, and the judgement compares them.
    """

    def without_digests(ending: Any) -> Row | None:
        if ending is None:
            return None
        return {name: value for name, value in ending.items() if name != "digests"}

    content = asdict(evidence)
    verdict = asdict(judgement)
    seeds = {
        "killed_seeds": evidence.plan.killed_seeds(),
        "unkilled_seeds": evidence.plan.unkilled_seeds(),
    }
    return {
        "command": command,
        "seconds": seconds,
        "machine": machine,
        "plan": content["plan"] | seeds,
        "framework": evidence.framework,
        "peer": evidence.peer,
        "holds": verdict["holds"],
        "is_undecided": verdict["is_undecided"],
        "reasons": verdict["reasons"],
        "size": verdict["size"] | {"groups": content["groups"]},
        "latency": verdict["latency"],
        "saves": content["saves"],
        "recovery": verdict["correctness"],
        "recoveries": [
            recovery | {"ending": without_digests(recovery["ending"])}
            for recovery in content["recoveries"]
        ],
        "contracts": content["contracts"],
        "quality": verdict["quality"],
        "unkilled": [without_digests(ending) for ending in content["unkilled"]],
    }


def _profile_file(profile: str | None) -> str:
    """Return the value of ``EvaluationPlan.profile`` for an argument of the command."""
    from deltacheck.evaluate.records import MEASURED

    if profile is None or profile == MEASURED:
        return profile or ""
    return str(Path(profile).resolve())
