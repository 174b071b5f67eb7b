"""The harness of the experiments in `examples/`, without a framework.

An experiment trains without a stop under a profiler, trains again with checkpoints, kills itself
with SIGKILL, resumes in a new process, and compares the end with the uninterrupted run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import deltacheck
from benchmarks.workloads import equality
from deltacheck import Policy, Profile, Profiler, SaveHandle
from examples.experiments import pairs
from examples.experiments.pairs import Coding, Pair

POLICIES = ("exact", "auto")
PROFILE, HELD_OUT_ROWS, TRAINING_ROWS = "profile.json", "held_out.npz", "train.npz"
# At most so many pairs, and one pair in so many.
_HELD_OUT_PAIRS, _HELD_OUT_EVERY = 32, 8
_QUICK_FILES = 30  # source files that a quick run reads its data from


class ExperimentRun(Protocol):
    """A training run of an experiment."""

    step: int

    def train_step(self) -> dict[str, float]:
        """Train one step, and return its metrics."""

    def state(self) -> dict[str, Any]:
        """Return everything that decides how the run continues."""

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state`` has returned."""


def argument_parser(description: str | None, *, lr: float) -> argparse.ArgumentParser:
    """Create a parser with the options of every experiment."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="an empty folder for all files (default: temporary)")
    add("--model", type=Path, help="a local transformers checkpoint (default: a small new model)")
    add("--data", type=Path, help="text, or .jsonl with text or prompt and completion")
    add("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    add("--steps", type=int, default=240)
    add("--every", type=int, default=10, help="steps between two checkpoints")
    add("--kill-in", type=int, help="the step in which to kill (default: in the last fifth)")
    add("--lr", type=float, default=lr)
    add("--seed", type=int, default=1)
    add("--quick", action="store_true", help="a model too small for meaningful sizes, in seconds")
    return parser


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of experiments that train on rows of tokens."""
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--context", type=int, default=128, help="tokens per row")


class Experiment(ABC):
    """The course of an experiment. A subclass defines its training.

    Args:
        options: The parsed arguments.
        folder: For all files.
    """

    name: str  # of the temporary folder
    peer: str  # the files that checkpoints are compared with

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder

    # --- the training ---

    @abstractmethod
    def prepare(self) -> None:
        """Write data, and the weights of a small model unless the user gives some."""

    @abstractmethod
    def create_run(self) -> Any:
        """Create the run in its first state, a ``ExperimentRun``."""

    @abstractmethod
    def held_out_loss(self, run: Any) -> float:
        """Measure the model on data that is never trained on."""

    @abstractmethod
    def parameters(self, run: Any) -> str:
        """Describe the size of the model."""

    @abstractmethod
    def train_with_checkpoints(self, policy: str, kill_in: int | None) -> None:
        """Train with checkpoints, from the newest one if there is one.

        Args:
            policy: One of ``POLICIES``, also the name of the root.
            kill_in: The step in which the process kills itself; ``None``: never.
        """

    # --- the comparison ---

    @abstractmethod
    def save_plain(self, run: Any) -> int:
        """Save the final state without deltacheck, and return the bytes of the files."""

    @abstractmethod
    def final_state(self, run: Any) -> Any:
        """Return a copy of the uninterrupted run's final state."""

    @abstractmethod
    def restore(self, run: Any, policy: str) -> Any:
        """Load the model of the last checkpoint into ``run``, and return its whole state."""

    def describe_profile(self, profile: Profile) -> list[str]:
        """Describe the kinds of leaves of a profile."""
        kinds = [leaf.kind for leaf in profile.leaves.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return [f"{counts} of {len(kinds)} leaves"]

    def size_note(self, checkpoints: int) -> str:
        """Describe a further comparison of sizes, if there is one."""
        return ""

    def companion(self, policy: str) -> AbstractContextManager[Any]:
        """Start what accompanies the killed and the resumed run, if anything does."""
        return nullcontext()

    # --- the course ---

    def perform(self) -> None:
        """Perform the whole experiment, and print it."""
        start_time = time.perf_counter()
        self.prepare()
        say(f"prepared in {time.perf_counter() - start_time:.0f} s in {self.folder}")

        say("1. An uninterrupted run, observed by a profiler")
        run, final_loss = self._train_uninterrupted()
        # Before the comparison, which loads restored states into the same run.
        plain_bytes, expected = self.save_plain(run), self.final_state(run)
        for policy in self.options.policy:
            self._kill_and_resume(policy)
            say("4. The resumed run against the uninterrupted one")
            state = self.restore(run, policy)
            loss = self.held_out_loss(run)
            difference = f"difference {loss - final_loss:+.1e}"
            say(f"  held-out loss {loss:.6f}, uninterrupted {final_loss:.6f}: {difference}")
            _compare_bits(policy, expected, state)
            self._compare_sizes(policy, plain_bytes)

    def _train_uninterrupted(self) -> tuple[Any, float]:
        start_time, steps = time.perf_counter(), self.options.steps
        run, profiler = self.create_run(), Profiler(interval_steps=self.options.every)
        loss_before = self.held_out_loss(run)
        while run.step < steps:
            metrics = run.train_step()
            profiler.observe(run.step, run.state, **metrics)
        loss = self.held_out_loss(run)
        seconds = time.perf_counter() - start_time
        say(f"  {self.parameters(run)}, {steps} steps in {seconds:.0f} s")
        say(f"  held-out loss {loss_before:.4f} before, {loss:.4f} after")

        say("2. Its profile")
        profile = profiler.write(self.folder / PROFILE)
        stable = "no step" if profile.stable_start is None else f"step {profile.stable_start}"
        for line in (*self.describe_profile(profile), f"stable from {stable} on"):
            say(f"  {line}")
        return run, loss

    def _kill_and_resume(self, policy: str) -> None:
        options = self.options
        kill_in = options.kill_in or options.steps * 5 // 6 + options.every // 2 + 1
        say(f"3. The same run under Policy.{policy}, killed in step {kill_in}")
        with self.companion(policy):
            status = self._in_new_process(policy, kill_in)
            if status != -signal.SIGKILL:
                sys.exit(f"the run was to be killed, but ended with status {status}")
            say("  killed by SIGKILL")
            if self._in_new_process(policy, None) != 0:
                sys.exit("the resumed run failed")

    def _in_new_process(self, policy: str, kill_in: int | None) -> int | None:
        """Train with checkpoints in a new process, and return its exit status."""
        # Spawned, not forked: threads of torch and JAX do not survive a fork.
        process = multiprocessing.get_context("spawn").Process(
            target=self.train_with_checkpoints, args=(policy, kill_in)
        )
        process.start()
        process.join()
        return process.exitcode

    def _compare_sizes(self, policy: str, plain_bytes: int) -> None:
        count = len(deltacheck.open(self.folder / policy).steps())
        stored_bytes, peer_bytes = bytes_under(self.folder / policy), count * plain_bytes
        sizes = f"{stored_bytes / 1e6:.2f} MB, as {self.peer} {peer_bytes / 1e6:.2f} MB"
        share = f"{stored_bytes / peer_bytes:.1%}"
        say(f"  {count} checkpoints: {sizes} ({share}){self.size_note(count)}")


def main(
    parser: argparse.ArgumentParser, experiment: type[Experiment], **quick_defaults: Any
) -> None:
    """Parse the command line, and perform an experiment.

    Args:
        parser: Its options.
        experiment: The experiment.
        **quick_defaults: Defaults under ``--quick``. Options on the command line override them.
    """
    options = parser.parse_args()
    # The first parse only looks for ``--quick``. Defaults that are set after it yield to given
    # options.
    if options.quick:
        parser.set_defaults(**quick_defaults)
        options = parser.parse_args()  # again, with the new defaults
    folder = options.folder or Path(tempfile.mkdtemp(prefix=f"deltacheck-{experiment.name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    experiment(options, folder.resolve()).perform()


# --- data -----------------------------------------------------------------------------------------


def coding_of(model: Path | None) -> Coding:
    """Return the tokenizer of a local transformers checkpoint; without one, text is bytes."""
    if model is None:
        return pairs.BYTES
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    # Some tokenizers have no token for the beginning. The end of the text before it serves as one.
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Coding(
        lambda line: tokenizer.encode(line, add_special_tokens=False), begin, tokenizer.eos_token_id
    )


def split(data: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Split data into training data and a few pairs that are held out."""
    training = [pair for number, pair in enumerate(data) if number % _HELD_OUT_EVERY]
    return training, data[::_HELD_OUT_EVERY][:_HELD_OUT_PAIRS]


def write_rows(options: argparse.Namespace, folder: Path) -> None:
    """Write rows of tokens: of the user's data, by default of Python functions."""
    data = pairs.read(options.data) if options.data else pairs.standard_library(files(options))
    coding = coding_of(options.model)
    for name, part in zip((TRAINING_ROWS, HELD_OUT_ROWS), split(data), strict=True):
        pairs.rows(part, coding, options.context).write(folder / name)


def files(options: argparse.Namespace) -> int | None:
    """Return the number of source files to read data from; ``None`` for all."""
    return _QUICK_FILES if options.quick else None


# --- checkpoints ----------------------------------------------------------------------------------


def policy_of(name: str, folder: Path) -> Policy:
    """Create one of ``POLICIES``, ``auto`` with the profile of the first run."""
    if name == "exact":
        return Policy.exact()
    return Policy.auto(Profile.read(folder / PROFILE))


def train_to_checkpoints(
    run: ExperimentRun, options: argparse.Namespace, kill_in: int | None
) -> Iterator[dict[str, float]]:
    """Train, and yield the metrics at every step that is to be saved.

    In step ``kill_in`` the process kills itself, as a failing machine would: nothing is flushed, no
    handler runs, and a save in progress is lost.
    """
    while run.step < options.steps:
        metrics = run.train_step()
        # The kill comes before the save of this step, so the step is always lost.
        if run.step == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if run.step % options.every == 0 or run.step == options.steps:
            yield metrics


class SavePrinter:
    """A printer of saves, which prints each one when the next would wait for it in any case."""

    def __init__(self) -> None:
        self._in_progress: SaveHandle | None = None

    def add(self, handle: SaveHandle | None) -> None:
        """Print the save before, and remember this one."""
        if self._in_progress is not None:
            result = self._in_progress.result()
            assert result is not None  # no save is skipped: each waits for the one before
            share = result.stored_bytes / result.raw_bytes
            loss = result.metrics["loss"]
            say(f"  step {result.step}: loss {loss:.4f}, {share:.2%} of the state written")
        self._in_progress = handle

    def finish(self) -> None:
        """Print the last save."""
        self.add(None)


# --- report ---------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line in one write, because other processes print to the same terminal."""
    print(f"{line}\n", end="", flush=True)


def bytes_under(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _compare_bits(policy: str, expected: Any, state: Any) -> None:
    verdict = equality.compare("final state", expected, state)
    if verdict.holds:
        say(f"  every bit equal: {verdict.detail.removesuffix(', equal')}")
    elif policy == "exact":
        sys.exit(f"every bit must be equal under Policy.exact, but {verdict.detail}")
    else:
        count = verdict.detail.partition(",")[0]
        say(f"  not every bit, which this policy does not promise: {count}")
