"""Cuts the power under a real file system: the image behind a loop device is copied while a program
saves, and the copy is mounted.

    python -m tests.faults.image                                   # 50 cuts on ext4
    python -m tests.faults.image --cuts 2000 --fs xfs
    python -m tests.faults.image --program torch.save-replaced     # a control: must lose steps

What the file system has not written to its device is not in the copy, as after a power cut; the
disk itself keeps all that it was given (no cache that is lost). The program is stopped, by SIGSTOP,
while the copy is made, at once after an acknowledgement or at a random time, and the copy is made
again until two are equal, since the file system's own threads cannot be stopped. Needs root,
``losetup`` and ``mkfs``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import filecmp
import gc
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deltacheck import Keep, SaveOptions
from tests.faults import cut, scenarios
from tests.faults.scenarios import Scenario

SIZES = {
    "ext4": 96 << 20,
    "xfs": 320 << 20,
    "btrfs": 256 << 20,
}  # of an image; the last two have a minimum
_PROGRAMS = ("engine", "process", "torch.save-replaced")
_STEPS_BEFORE_A_NEW_IMAGE = 10


def why_not(kind: str = "ext4") -> str | None:
    """Return the reason why images cannot be mounted here, or ``None`` if they can."""
    if os.geteuid() != 0:
        return "mounting an image needs root"
    for tool in ("losetup", f"mkfs.{kind}", "mount", "umount", "cp"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    with cut.workplace() as folder:
        try:
            with mounted(make(folder / "image", kind), folder / "mount"):
                return None
        except (OSError, subprocess.SubprocessError) as error:
            return f"an image cannot be mounted: {error}"


def make(image: Path, kind: str) -> Path:
    """An empty image of a file system."""
    with image.open("wb") as file:
        file.truncate(SIZES[kind])
    quiet = ["-q"] if kind != "btrfs" else ["-q", "-f"]
    subprocess.run([f"mkfs.{kind}", *quiet, image], check=True, timeout=240, capture_output=True)
    return image


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    """An image, mounted through a loop device that goes with the mount."""
    at.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-o", "loop,noatime", image, at], check=True, timeout=240, capture_output=True
    )
    try:
        yield at
    finally:
        for _ in range(100):
            # Readers let go of what they have pinned when they go, and some are in cycles
            gc.collect()
            if (
                subprocess.run(
                    ["umount", at], timeout=240, capture_output=True, check=False
                ).returncode
                == 0
            ):
                break
            time.sleep(0.1)
        else:
            subprocess.run(["umount", at], check=True, timeout=240, capture_output=True)


def copy(image: Path, to: Path) -> Path:
    """Copy the content of the device at one moment.

    Nothing else may write to the file system meanwhile.
    """
    for _ in range(50):
        for target in (to, to.with_suffix(".again")):
            subprocess.run(
                ["cp", "--reflink=auto", "--sparse=always", image, target], check=True, timeout=240
            )
        if filecmp.cmp(to, to.with_suffix(".again"), shallow=False):
            return to
    raise TimeoutError(f"{image} is written to all the time; there is no moment to cut at")


@dataclass(slots=True)
class Outcome:
    cuts: int = 0
    bad: int = 0
    first: str = ""


def try_cuts(
    program: str, cuts: int, kind: str, seed: int, folder: Path, *, at_once: float = 0.5
) -> Outcome:
    """Cut so often. ``at_once``: share of the cuts at once after an acknowledgement; the others
    come up to 0.5 s later.
    """
    outcome, rng = Outcome(), random.Random(seed)
    while outcome.cuts < cuts:
        image = make(folder / "image", kind)
        with (
            mounted(image, folder / "mount") as mount,
            _running(program, mount / cut.ROOT) as child,
        ):
            known: set[int] = set()
            for _ in range(min(_STEPS_BEFORE_A_NEW_IMAGE, cuts - outcome.cuts)):
                known |= _acknowledgements(child.stdout, wait=60)
                if rng.random() > at_once:
                    time.sleep(rng.uniform(0, 0.5))
                child.send_signal(signal.SIGSTOP)
                known |= _acknowledgements(child.stdout, wait=0)
                copied = copy(image, folder / "copy")
                child.send_signal(signal.SIGCONT)
                outcome.cuts += 1
                with mounted(copied, folder / "copied") as after:
                    problems = _problems(
                        program, after / cut.ROOT, known, also_save=rng.random() < 0.3
                    )
                if problems:
                    outcome.bad += 1
                    outcome.first = (
                        outcome.first
                        or f"cut {outcome.cuts} with seed {seed}: {'; '.join(problems)}"
                    )
    return outcome


def _problems(program: str, root: Path, known: set[int], also_save: bool) -> list[str]:
    scenario = _scenario(program)
    return scenarios.violations(scenario, root, known) or (
        scenarios.recovery_violations(scenario, root) if also_save else []
    )


def _scenario(program: str) -> Scenario:
    """As which the program's root is judged: it keeps three steps, the control one."""
    if program == "torch.save-replaced":
        return cut.ALL[program]
    return dataclasses.replace(cut.ALL["two-saves"], keep=3)


@contextlib.contextmanager
def _running(program: str, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.faults.image", "--save", program, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        try:
            yield child
        finally:
            child.kill()


def _acknowledgements(lines: IO[bytes] | None, wait: float) -> set[int]:
    """The steps that were acknowledged since the last call, at least one unless ``wait`` (seconds)
    is 0.
    """
    assert lines is not None
    text = b""
    while select.select([lines], [], [], wait)[0]:
        part = os.read(lines.fileno(), 1 << 16)
        if not part:
            raise EOFError("the program that saves has ended")
        text += part
        wait = 0
    assert text or wait == 0, f"no step was acknowledged within {wait} s"
    return {int(line) for line in text.split()}


def _save(program: str, root: Path) -> None:
    """Save until killed."""
    if program == "torch.save-replaced":
        for step in range(1_000_000):
            cut.ReplacedTorchSave.save(root, step)
            print(step, flush=True)
    with scenarios.engine(
        root,
        keep=Keep(last=3),
        options=SaveOptions(durability="process" if program == "process" else "power"),
    ) as engine:
        for step in range(1_000_000):
            engine.save(step, scenarios.torch_state(step)).wait(timeout=240)
            print(step, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", choices=_PROGRAMS, default="engine")
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--fs", choices=SIZES, default="ext4")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--save", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        _save(args.save[0], Path(args.save[1]))
    reason = why_not(args.fs)
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    begin = time.monotonic()
    with cut.workplace() as folder:
        outcome = try_cuts(args.program, args.cuts, args.fs, args.seed, folder)
    print(
        f"{args.program} on {args.fs}, seed {args.seed}: {outcome.bad} bad of {outcome.cuts} cuts,"
        f" {time.monotonic() - begin:.0f} s"
    )
    if outcome.first:
        print(f"  first: {outcome.first[:2000]}")
    if not outcome.bad:
        print(f"  less than {3 / outcome.cuts:.1e} of such cuts fail, with 95 % confidence")
    return (outcome.bad == 0) != (args.program == "engine")


if __name__ == "__main__":
    sys.exit(main())
