"""Compare the resources of the CUDA kernels with their budget.

Run `python -m tests.suites.cuda_budget` on a machine with nvcc.

A kernel over its budget still works, at a fraction of the speed: fewer blocks fit a multiprocessor,
or registers go to memory.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "xla_ffi"
ARCHITECTURES = (80, 90, 100)

# Four blocks of 256 threads share the 65536 registers of a multiprocessor. 48 KiB is what a block
# may declare.
MOST_REGISTERS = 64
MOST_SHARED_BYTES = 48 << 10
MOST_SPILL_BYTES = 96  # stored; on the ways of all widths of words together


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """The resources that one kernel needs on one architecture."""

    kernel: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    def excess(self) -> str:
        """Return the resources over the budget; empty if there are none."""
        pairs = (
            ("registers", self.registers, MOST_REGISTERS),
            ("bytes of spills", self.spill_bytes, MOST_SPILL_BYTES),
            ("bytes of shared memory", self.shared_bytes, MOST_SHARED_BYTES),
        )
        over = ", ".join(
            f"{used} {what}, at most {most} are wanted" for what, used, most in pairs if used > most
        )
        return over and f"{self.kernel} on {self.architecture}: {over}"


def kernel_name(mangled: str) -> str:
    """The last name of a mangled one: of _ZN10deltacheck6device5placeENS0_3JobE it is `place`."""
    rest = mangled.removeprefix("_ZN").removeprefix("_Z")
    name = ""
    while match := re.match(r"\d+", rest):
        start = match.end()
        name, rest = rest[start : start + int(match[0])], rest[start + int(match[0]) :]
    return name or mangled


def uses_in(report: str) -> list[Use]:
    """Return the resources of each kernel from the output of ``ptxas -v``."""
    uses = []
    for part in report.split("Compiling entry function ")[1:]:
        mangled, architecture = re.findall(r"'([^']+)'", part)[:2]
        numbers = [
            re.search(pattern, part)
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes smem",
            )
        ]
        registers, spills, shared = (int(match[1]) if match else 0 for match in numbers)
        uses.append(Use(kernel_name(mangled), architecture, registers, spills, shared))
    return uses


def measured(sources: Sequence[Path]) -> list[Use]:
    """Compiles for every architecture; raises CalledProcessError where that fails, warnings
    included.
    """
    uses = []
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            command = [
                "nvcc",
                "-std=c++17",
                "-O3",
                "-Werror=all-warnings",
                "-Xptxas=-v",
                *targets,
                f"-I{SOURCES}",
                "-c",
                str(source),
            ]
            done = subprocess.run(
                [*command, "-o", f"{folder}/{source.stem}.o"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise subprocess.CalledProcessError(
                    done.returncode, command, done.stdout, done.stderr
                )
            uses += uses_in(done.stdout + done.stderr)
    return uses


def main() -> int:
    """Prints a table; 1 if any kernel is over the budget."""
    if shutil.which("nvcc") is None:
        print("no nvcc on PATH", file=sys.stderr)
        return 2
    uses = measured(sorted((SOURCES / "cuda").glob("*.cu")))
    print(f"{'kernel':20}{'':10}{'registers':>10}{'spilled':>10}{'shared':>10}")
    for use in sorted(
        uses, key=lambda use: (use.kernel, int(use.architecture.removeprefix("sm_")))
    ):
        print(
            f"{use.kernel:20}{use.architecture:10}{use.registers:10}"
            f"{use.spill_bytes:10}{use.shared_bytes:10}"
        )
    over = [use.excess() for use in uses if use.excess()]
    print("\n".join(over), file=sys.stderr, end="\n" if over else "")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
