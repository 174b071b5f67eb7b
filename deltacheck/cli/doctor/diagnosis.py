"""Judgement of facts: each check is a pure function of ``MachineFacts``, and returns one line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from deltacheck.cli.doctor.environment import FileSystem, MachineFacts
from deltacheck.cli.output import count
from deltacheck.report.formatting import format_bytes
from deltacheck.save.save_options import SaveOptions, cache_bytes_of

# A flush of a real disk takes tens of microseconds at the least, a system call that does nothing
# less than one.
_SHORTEST_SYNC_SECONDS = 5e-6

_IN_MEMORY = ("tmpfs", "ramfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "beegfs", "ceph", "gpfs", "glusterfs")
# Options with which a lock holds on this machine only, or not at all.
_LOCAL_LOCKS = ("nolock", "local_lock=all", "local_lock=flock", "localflock", "nobrl")


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one check.

    Attributes:
        name: Subject of the check.
        status: ``degraded``: deltacheck works, at a cost; ``broken``: it does not.
        text: The facts.
        cost: Consequence of a degraded line.
        remedy: What the user can do.
    """

    name: str
    status: Literal["ok", "degraded", "broken"]
    text: str
    cost: str = ""
    remedy: str = ""


class Verdict(NamedTuple):
    """The result of a check without its name, as in ``Line``."""

    status: Literal["ok", "degraded", "broken"]
    text: str
    cost: str = ""
    remedy: str = ""


_ok, _degraded, _broken = (partial(Verdict, status) for status in ("ok", "degraded", "broken"))


def diagnose(facts: MachineFacts) -> list[Line]:
    """Return one line for each check, in the order in which they are printed."""
    packages = {name: _ok(version or "not installed") for name, version in facts.packages.items()}
    verdicts = {"python": _ok(facts.python), **packages}
    verdicts |= {name: check(facts) for name, check in _MACHINE.items()}
    if facts.file_system is None:
        verdicts["storage"] = _ok("object store; the first save tests its writes")
    else:
        verdicts |= {name: check(facts, facts.file_system) for name, check in _FILE_SYSTEM.items()}
    return [Line(name, *verdict) for name, verdict in verdicts.items()]


# --- software -------------------------------------------------------------------------------------


def instruction_set(facts: MachineFacts) -> Verdict:
    """Judge the kernels in use."""
    used, best = facts.encoder.instruction_set, facts.encoder.best_instruction_set
    if used != best:
        return _degraded(
            f"{used}, but this processor has {best}",
            cost="comparison and packing of a save are slower",
            remedy="unset DELTACHECK_ISA",
        )
    if used in ("plain", "x86-64-v2"):
        return _degraded(
            f"{used}: this processor has no AVX2, or is no x86",
            cost="comparison and packing of a save are slower",
        )
    return _ok(used)


def threads(facts: MachineFacts) -> Verdict:
    """Judge the threads of the encoder."""
    threads, cores = facts.encoder.threads, facts.encoder.cores
    quota = facts.encoder.core_quota
    text = f"{threads} on {count(cores, 'core')}"
    if quota is not None and quota < threads:
        return _degraded(
            f"{text}, of which the container may use {quota:g} at a time",
            cost="while a save is encoded, the system stops the process again and again",
            remedy="raise the quota, or start the process with taskset on fewer cores",
        )
    if cores == 1:
        return _degraded(
            text,
            cost="training and encoder share one core: a save takes its time from the training",
            remedy="give the process at least two cores",
        )
    return _ok(text)


def jax_handlers(facts: MachineFacts) -> Verdict:
    """Judge the handlers of the Orbax backend."""
    has_jax = facts.packages["jax"] is not None
    if facts.encoder.jax_handlers:
        return _ok("built in")
    if not has_jax:
        return _ok("not built; JAX is not installed")
    return _broken(
        "not built: deltacheck.backends.orbax cannot save",
        remedy="install deltacheck again; its build finds the headers of XLA in jaxlib",
    )


def cuda(facts: MachineFacts) -> Verdict:
    """Judge the CUDA encoder."""
    devices = facts.devices
    cost = "each save copies the whole state of a GPU to the host, and encodes it there"
    if not devices.built and not devices.count:
        return _ok("no GPU; not built")
    if not devices.built:
        return _degraded(
            f"{count(devices.count, 'GPU')}, but the CUDA encoder is not built",
            cost=cost,
            remedy="install deltacheck again with nvcc and DELTACHECK_CUDA=ON",
        )
    if devices.problem and not devices.count:
        return _ok("no GPU; built")
    if devices.problem:
        return _degraded(
            f"{count(devices.count, 'GPU')}, but {devices.problem}",
            cost=cost,
            remedy="update the driver, or check CUDA_VISIBLE_DEVICES",
        )
    if devices.tests is None:
        text = f"{count(devices.count, 'GPU')}; not verified: torch is not installed"
        return _ok(text)
    if not devices.tests:
        return _degraded(
            f"{count(devices.count, 'GPU')}, but torch sees no device",
            cost="no tensor of this torch lies on a GPU",
            remedy="install a build of torch with CUDA",
        )
    failed = {name: problem for name, problem in devices.tests.items() if problem}
    if failed:
        name, problem = next(iter(failed.items()))
        return _degraded(
            f"{name} failed the encoder's test: {problem}",
            cost=cost,
            remedy="run `make gpu-check`, and report its result",
        )
    return _ok(f"verified on {', '.join(devices.tests)}")


# --- memory ---------------------------------------------------------------------------------------


def memory(facts: MachineFacts) -> Verdict:
    """Judge the memory for the shadow."""
    free = f"{format_bytes(facts.memory_bytes)} free"
    if facts.state_bytes is None:
        return _ok(f"{free}; the shadow takes the size of the state")
    state = format_bytes(facts.state_bytes)
    cache_bytes = cache_bytes_of(facts.state_bytes, SaveOptions())
    needed_bytes = facts.state_bytes + min(facts.state_bytes, cache_bytes)
    text = f"{free}; a shadow of {state}, with encoded data {format_bytes(needed_bytes)}"
    if facts.memory_bytes >= needed_bytes:
        return _ok(text)
    if facts.memory_bytes >= facts.state_bytes:
        return _degraded(
            text,
            cost="a large save may end the process for lack of memory",
            remedy="lower host_cache_bytes: saves then block while the disk catches up",
        )
    remedy = 'use more processes, SaveOptions(shadow="mapped"), which keeps it in TMPDIR, or "none"'
    return _broken(text, remedy=remedy)


# --- the root -------------------------------------------------------------------------------------


def steps(facts: MachineFacts) -> Verdict:
    """Judge the root and its newest step."""
    steps = facts.steps
    if steps.problem:
        remedy = (
            "choose a new or empty folder"
            if steps.kind == "none"
            else f"deltacheck verify {shlex.quote(facts.root)}"
        )
        return _broken(steps.problem, remedy=remedy)
    if steps.kind == "none":
        return _ok("none yet")
    if steps.newest is None:
        return _ok("no steps yet")
    size = format_bytes(steps.raw_bytes)
    saved = count(steps.count, "step")
    return _ok(f"{saved}, the newest is {steps.newest}, a state of {size}")


def access(facts: MachineFacts, file_system: FileSystem) -> Verdict:
    """Judge whether files can be created."""
    trial = file_system.trial
    if trial.error:
        return _broken(
            trial.error,
            remedy="change the permissions, mount it for writing, or choose another root",
        )
    if not trial.exclusive:
        return _broken(
            "a file was created twice under one name",
            remedy="choose another file system: two writers could replace each other's steps",
        )
    return _ok("files are created once and whole")


def mount(facts: MachineFacts, file_system: FileSystem) -> Verdict:
    """Judge the type of the file system."""
    if file_system.mount is None:
        return _ok("unknown")
    kind = file_system.mount.kind
    if kind in _IN_MEMORY:
        return _degraded(
            f"{kind}: in memory",
            cost="every step is lost when the machine stops",
            remedy="use a disk, or a memory tier: docs/how-to/every-step.md",
        )
    if kind == "overlay":
        return _degraded(
            "overlay: a layer of a container",
            cost="every step is lost when the container is removed",
            remedy="use a volume",
        )
    if kind.startswith("fuse"):
        return _degraded(
            f"{kind}: its program decides what an fsync and a lock mean",
            cost="an acknowledged step may be lost with the machine",
            remedy="for a bucket, use s3://, gs:// or az:// as the root",
        )
    if kind in _NETWORK:
        soft = "soft" in file_system.mount.options
        return _degraded(
            f"{kind}{', soft' if soft else ''}: a network file system",
            cost="an acknowledged step survives a failure of the server only if the server syncs"
            + ("; a slow server fails saves" if soft else ""),
            remedy="export with `sync`" + (", mount with `hard`" if soft else ""),
        )
    return _ok(kind)


def sync(facts: MachineFacts, file_system: FileSystem) -> Verdict:
    """Judge whether an fsync reaches the disk."""
    seconds = file_system.trial.sync_seconds
    if file_system.trial.error:
        return _ok("not tried")
    if seconds is None:
        return _broken("fails", remedy="look at the disk and the kernel's log")
    text = f"{seconds * 1e3:.3g} ms"
    in_memory = file_system.mount is not None and file_system.mount.kind in _IN_MEMORY
    if seconds < _SHORTEST_SYNC_SECONDS and not in_memory:
        return _degraded(
            f"{text}: too fast for any disk",
            cost="a power cut may take acknowledged steps",
            remedy="ask the administrator of the disk whether it honours flushes",
        )
    return _ok(text)


def locks(facts: MachineFacts, file_system: FileSystem) -> Verdict:
    """Judge the locks that keep out a second writer and protect readers from collection."""
    cost = (
        "a second writer is noticed only at its first step, and prune protects readers only for its"
        " grace period"
    )
    trial = file_system.trial
    options = frozenset() if file_system.mount is None else file_system.mount.options
    local = sorted(options.intersection(_LOCAL_LOCKS))
    if trial.error:
        return _ok("not tried")
    if trial.flock == "admits":
        return _degraded("locks are granted twice", cost, "mount with locks")
    if trial.flock != "excludes":
        remedy = "mount with locks (Lustre: the option `flock`), or choose another file system"
        return _broken(f"no locks: {trial.flock}", remedy=remedy)
    if local:
        return _degraded(
            f"the option {local[0]}: locks hold on this machine only",
            cost=cost,
            remedy="mount without it, or write from one machine at a time",
        )
    return _ok("excludes a second writer")


def space(facts: MachineFacts, file_system: FileSystem) -> Verdict:
    """Judge the free space against the state, which the first save and keyframes write."""
    free_bytes, state_bytes = file_system.free_bytes, facts.state_bytes
    text = f"{format_bytes(free_bytes)} free"
    if state_bytes is None:
        return _ok(text)
    text += f"; a state of {format_bytes(state_bytes)}"
    if free_bytes >= state_bytes:
        return _ok(text)
    cost = "a save that writes whole leaves fails"
    remedy = "free space, or delete steps: deltacheck prune"
    return _degraded(text, cost, remedy)


_MACHINE: dict[str, Callable[[MachineFacts], Verdict]] = {
    "instruction set": instruction_set,
    "threads": threads,
    "JAX handlers": jax_handlers,
    "CUDA": cuda,
    "memory": memory,
    "root": steps,
}
_FILE_SYSTEM: dict[str, Callable[[MachineFacts, FileSystem], Verdict]] = {
    "write access": access,
    "file system": mount,
    "fsync": sync,
    "flock": locks,
    "space": space,
}
