"""Builds the encoder with a compiler's sanitizers, and runs what stresses it: `python -m
tests.suites.sanitized fuzz|threads`, for `make`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.paths import TESTS

SOURCES = TESTS.parent / "xla_ffi"
TARGETS = ("apply", "round_trip", "arithmetic", "codes", "laws", "changes")
READERS = ("documents", "roots")  # in Python, see tests/fuzz/readers.py
CORPUS = TESTS / "fuzz" / "corpus"  # inputs that reached code which none before them had, kept
LEVELS = {"kKernelsX86V2": "x86-64-v2", "kKernelsX86V3": "x86-64-v3", "kKernelsX86V4": "x86-64-v4"}
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)
QUICK = ("-O0", "-g0")  # a third of the time to build

# GCC 12 warns of undefined values in its own headers, clang of loops that it leaves as they are.
FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-ffp-contract=off",  # as in CMakeLists.txt
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
)
QUIET = ("-Wno-maybe-uninitialized", "-Wno-pass-failed")


def encoder(
    folder: Path, compiler: str, flags: Sequence[str], every_level: bool = True
) -> list[Path]:
    """The objects of the encoder, with the kernels of every level, or with the plain ones, which
    take a quarter of the time to build.
    """
    # As in CMakeLists.txt: older compilers lack it
    probe = 'int main() { return __builtin_cpu_supports("x86-64-v4"); }'
    command = [compiler, "-xc++", "-fsyntax-only", "-"]
    x86 = (
        every_level
        and subprocess.run(
            command, input=probe.encode(), capture_output=True, check=False
        ).returncode
        == 0
    )
    levels = {"kKernelsPlain": "plain"} | (LEVELS if x86 else {})
    jobs: list[tuple[str, str, list[str]]] = [
        (
            name,
            "kernels",
            [
                "-fopenmp-simd",
                f"-DDELTACHECK_KERNELS={name}",
                f'-DDELTACHECK_INSTRUCTION_SET="{text}"',
            ],
        )
        for name, text in levels.items()
    ]
    for _, _, options in jobs[1:]:
        options.append("-march=" + options[-1].partition('"')[2].rstrip('"'))
    jobs += [
        (name, name, ["-DDELTACHECK_X86_LEVELS"] if x86 else [])
        for name in ("delta", "changes", "blocks", "thread_pool")
    ]

    def compiled(job: tuple[str, str, list[str]]) -> Path:
        name, source, options = job
        made = folder / f"{name}.o"
        call(
            compiler,
            *FLAGS,
            *QUIET,
            *flags,
            *options,
            "-c",
            SOURCES / "encoder" / f"{source}.cc",
            "-o",
            made,
        )
        return made

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, jobs))


def program(
    made: Path,
    sources: Sequence[Path],
    objects: Sequence[Path],
    compiler: str,
    flags: Sequence[str],
) -> Path:
    call(
        compiler, *FLAGS, *QUIET, *flags, f"-I{SOURCES}", *sources, *objects, "-o", made, "-pthread"
    )
    return made


def fuzzers(
    folder: Path, compiler: str, flags: Sequence[str], objects: Sequence[Path]
) -> dict[str, Path]:
    """Every target with our own driver."""
    driver = folder / "driver.o"
    call(compiler, *FLAGS, *flags, f"-I{SOURCES}", "-c", TESTS / "fuzz" / "driver.cc", "-o", driver)

    def made(target: str) -> Path:
        return program(
            folder / target, [TESTS / "fuzz" / f"{target}.cc"], [*objects, driver], compiler, flags
        )

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TARGETS, pool.map(made, TARGETS), strict=True))


def call(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        [str(part) for part in command], check=True, env=os.environ | (environment or {})
    )


def fuzz(targets: Sequence[str], seconds: int, runs: int | None) -> None:
    """Every target for a while, or for a number of inputs: under libFuzzer where clang has it, else
    under our own driver.
    """
    limit = ["--runs", str(runs)] if runs else ["--seconds", str(seconds)]
    with tempfile.TemporaryDirectory(prefix="deltacheck-fuzz-") as name:
        folder = Path(name)
        clang = shutil.which("clang++")
        compiler = clang or "g++"
        objects = encoder(
            folder, compiler, (*MEMORY, *(["-fsanitize=fuzzer-no-link"] if clang else []))
        )
        for target, own in fuzzers(folder, compiler, MEMORY, objects).items():
            if target not in targets:
                continue
            if not clang:
                print(f"{target}: no clang++, seeded random mutation", flush=True)
                call(own, *limit, "--replay", CORPUS / target)
                continue
            print(f"{target}: libFuzzer", flush=True)
            corpus = folder / f"{target}-corpus"
            corpus.mkdir()
            call(own, "--write-seeds", corpus)
            guided = program(
                folder / f"{target}-guided",
                [TESTS / "fuzz" / f"{target}.cc"],
                objects,
                compiler,
                (*MEMORY, "-fsanitize=fuzzer"),
            )
            call(
                guided,
                corpus,
                CORPUS / target,
                "-max_len=65536",
                "-print_final_stats=1",
                "-verbosity=0",
                f"-artifact_prefix={Path.cwd()}/",
                f"-runs={runs}" if runs else f"-max_total_time={seconds}",
            )


def readers(targets: Sequence[str], seconds: int, runs: int | None, seed: int | None) -> None:
    """The targets in Python, each in a process of its own, since what breaks one may end it."""
    for target in READERS:
        if target in targets:
            limit = ["--runs", str(runs)] if runs else ["--seconds", str(seconds)]
            limit += [] if seed is None else ["--seed", str(seed)]
            with tempfile.NamedTemporaryFile("r", prefix="deltacheck-fuzz-") as note:
                command = [sys.executable, "-m", "tests.fuzz.readers", target, *limit]
                done = subprocess.run(
                    command, env=os.environ | {"DELTACHECK_FUZZ_NOTE": note.name}, check=False
                )
                if done.returncode:
                    raise SystemExit(note.read() or f"{target}: broken")


def threads(seconds: int) -> None:
    """The encoder and its pool of threads under ThreadSanitizer."""
    with tempfile.TemporaryDirectory(prefix="deltacheck-threads-") as name:
        folder = Path(name)
        objects = encoder(folder, "g++", THREADS)
        made = program(folder / "stress", [TESTS / "suites" / "stress.cc"], objects, "g++", THREADS)
        usable = (
            subprocess.run(
                [made, "0", "0", "x86-64-v3"], check=False, capture_output=True
            ).returncode
            == 0
        )
        # Not x86-64-v4: the sanitizer is known to report races between its masked stores that are
        # none.
        stress(made, seconds, ["plain", "x86-64-v3"] if usable else ["plain"], forks_too=True)


def stress(made: Path, seconds: float, kernels: Sequence[str], forks_too: bool) -> None:
    """Without forks, and with them where asked for: the sanitizer does not promise that a forked
    child of many threads runs on.
    """
    for forks in "01" if forks_too else "0":
        call(
            made,
            str(seconds),
            forks,
            *kernels,
            environment={"TSAN_OPTIONS": "halt_on_error=1 die_after_fork=0"},
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("fuzz", "threads"))
    parser.add_argument("targets", nargs="*", default=TARGETS + READERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int)
    parser.add_argument(
        "--seed",
        type=int,
        help="of the targets in Python; default: a new one. The native ones have 1",
    )
    given = parser.parse_intermixed_args()  # `make` puts targets behind options
    if given.what == "fuzz":
        readers(given.targets, given.seconds, given.runs, given.seed)
        if set(TARGETS) & set(given.targets):
            fuzz(given.targets, given.seconds, given.runs)
    else:
        threads(given.seconds)


if __name__ == "__main__":
    sys.exit(main())
