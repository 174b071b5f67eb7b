"""Records of the facts that ``doctor`` judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deltacheck.evaluate.machine import Mount


@dataclass(frozen=True, slots=True)
class Encoder:
    """The native module and the processor that it runs on.

    Attributes:
        instruction_set: Kernels in use.
        best_instruction_set: The fastest kernels that the module has for this processor.
        threads: Threads of one call.
        cores: Processors that this process may run on.
        core_quota: Processors that the container may use at a time; ``None``: no quota.
        jax_handlers: If true, the module has the handlers of the Orbax backend.
    """

    instruction_set: str
    best_instruction_set: str
    threads: int
    cores: int
    core_quota: float | None
    jax_handlers: bool


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of this machine.

    Attributes:
        count: GPUs that the driver lists.
        built: If true, this build has the CUDA encoder.
        problem: Reason why the CUDA encoder cannot be used; empty: it can.
        tests: Result of the encoder's own test by device: a difference, or an empty text if the
            test passed. ``None``: it did not run.
    """

    count: int
    built: bool
    problem: str
    tests: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a few small files in the root, or in the folder above it.

    Attributes:
        error: Reason why the files could not be written; empty: they could.
        flock: ``excludes``: a second lock was refused; ``admits``: it was granted; else the error.
        exclusive: If true, of two creations of one file the second one was refused.
        sync_seconds: Median time of an fsync of 4 KiB; ``None``: it failed.
    """

    error: str = ""
    flock: str = "excludes"
    exclusive: bool = True
    sync_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system of a root.

    Attributes:
        mount: Its mount; ``None``: unknown.
        trial: What it did with a few small files.
        free_bytes: Bytes that this user may still write.
    """

    mount: Mount | None
    trial: Trial
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a root.

    Attributes:
        problem: Reason why the root or its newest step cannot be read; empty: they can.
        kind: ``none``: there is no root yet.
        count: Number of steps.
        newest: The newest step.
        raw_bytes: Size of its state.
    """

    problem: str = ""
    kind: Literal["none", "root"] = "root"
    count: int = 0
    newest: int | None = None
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts that ``doctor`` judges.

    Attributes:
        python: Version of Python.
        packages: Name -> version of deltacheck and of the packages that it uses; ``None``: not
            installed.
        encoder: The native module.
        devices: The GPUs.
        root: Address of the root.
        file_system: That of the root; ``None``: the root is in an object store.
        steps: The steps of the root.
        state_bytes: Size of the state to plan for; ``None``: unknown.
        memory_bytes: Memory that this process can still get.
    """

    python: str
    packages: Mapping[str, str | None]
    encoder: Encoder
    devices: Devices
    root: str
    file_system: FileSystem | None
    steps: Steps
    state_bytes: int | None
    memory_bytes: int
