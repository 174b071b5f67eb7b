"""The options of saves, and the arguments of one save as callers give them, and their checks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from deltacheck.policy import Keep, Policy
from deltacheck.policy.merging import can_merge
from deltacheck.restore import receipt
from deltacheck.store import layout
from deltacheck.store.files.durability import Durability

CAPTURES = ("auto", "eager")
SHADOWS = ("auto", "device", "host", "mapped", "none")
ON_BUSY = ("wait", "skip")
ON_ERROR = ("raise", "log")
# Half of a state is about what an exact save of AdamW's state encodes, less what a disk takes
# meanwhile.
_LEAST_CACHE_BYTES = 64 << 20
_MOST_CACHE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of the saves of one root, the same for every framework.

    A backend that does not have an option refuses any value but its default.

    Args:
        host_cache_bytes: The most encoded bytes between the training loop and the storage. Larger:
            a slow storage blocks training later; smaller: less memory. Default: half of the state,
            at least 64 MiB and at most 8 GiB. Copies of leaves that may change at any time may take
            as much again, and so may copies of what is not encoded yet while an optimizer step
            waits for a save. A saver also holds one *shadow*, a copy
            of the state to compare with.
        device_cache_bytes: The most memory on each device for a copy of the state. With a copy the
            training waits for nothing. Larger: for larger states; smaller: more memory for the
            training. Default: half of what nobody has reserved. 0: no copy. Engine only.
        max_pending: The most saves under way. Larger: more overlap with a slow storage; smaller:
            less work is lost when a save fails. Engine only.
        on_busy: The action when ``max_pending`` saves are under way. ``"wait"``: wait for one, so
            that every step is saved; ``"skip"``: skip this save, so that training does not wait.
            Engine only.
        capture: ``"auto"``: what cannot change unnoticed is read behind the training loop. For
            PyTorch these are tensors of known optimizers and frozen weights (``Engine.guard``),
            and a write that comes too early waits or fails the save, except small ones past torch
            (``docs/explanation/guarantees.md``). For JAX these are all arrays: those on
            accelerators are copied there first if there is memory, and XLA copies a donated array
            in host memory that is not read yet. ``"eager"``: all is read or copied before ``save``
            returns, which is safe whatever the code does between saves, but blocks longer. Not for
            DCP, which waits for its writer.
        shadow: The place of the shadow. ``"device"``: beside the tensors. Only changes cross to the
            host, but it takes device memory of the size of the state, and 1.5 GiB in a capture.
            ``"host"``: no device memory, but the whole state crosses at each save, and the next
            optimizer step waits until all but ``host_cache_bytes`` of it is encoded.
            ``"mapped"``: as ``"host"``, in files of ``TMPDIR`` that the system may write out
            instead of running out of memory; each save then writes to that disk, too. ``"none"``:
            no shadow. Least memory, but a changed leaf is written whole. ``"auto"``: ``"device"``
            for CUDA tensors if enough memory is free at the first save, else ``"host"``. PyTorch
            only.
        durability: The event that an acknowledged save survives. ``"power"``: a power cut, at the
            cost of a flush of the disk's cache for every file and directory entry. ``"process"``:
            only the end of this process. Saves end sooner, but a power cut may take the last ones,
            or leave steps that are listed and raise ``Damaged``.
        verify: The check of each save against the captured state. ``"none"``: no check; a restore
            checks what was written. ``"commit"``: the files of the save are read back before its
            step exists (``handle.receipt``). A fault on the way to the disk becomes a failed save,
            but it commits later, and the state is hashed at the capture.
        grace_seconds: The time that unneeded segments stay for readers that are about to open them.
            Longer: safer for slow readers; shorter: disk space sooner. An open segment stays.
        io_timeout_seconds: The longest wait for the storage before a save is given up. Longer: a
            slow storage gets its saves through; shorter: a dead one is reported sooner.
        exit_timeout_seconds: The longest wait for pending saves at interpreter exit. A failure is
            then reported on stderr, with exit status 120. Longer: a slow storage gets the last
            save through; shorter: a dead one lets the process end.
        on_error: The effect of a failed save. ``"raise"``: the next call raises it, so that no loss
            goes unseen. ``"log"``: the run goes on. The failure is in the log, on the handle (whose
            ``wait`` raises it) and counted in the next report, manifest and ``deltacheck log``; the
            next save writes whole leaves. If nothing was committed since, the exit status is 120.
            Not for DCP.
        max_failures: The failed saves in a row after which ``on_error="log"`` raises, too. Larger:
            the run survives a longer outage; smaller: less work can be lost.

    Raises:
        ValueError: An option has a value that it cannot have.
    """

    host_cache_bytes: int | None = None
    device_cache_bytes: int | None = None
    max_pending: int = 1
    on_busy: str = "wait"
    capture: str = "auto"
    shadow: str = "auto"
    durability: str = "power"
    verify: str = "none"
    grace_seconds: float = 60.0
    io_timeout_seconds: float = 600.0
    exit_timeout_seconds: float = 120.0
    on_error: str = "raise"
    max_failures: int = 3

    def __post_init__(self) -> None:
        Durability.of(self.durability)
        if self.capture not in CAPTURES:
            raise ValueError(f"capture must be 'auto' or 'eager', not {self.capture!r}")
        if self.shadow not in SHADOWS:
            raise ValueError(f"shadow must be one of {', '.join(SHADOWS)}, not {self.shadow!r}")
        if self.on_busy not in ON_BUSY:
            raise ValueError(f"on_busy must be 'wait' or 'skip', not {self.on_busy!r}")
        receipt.check_when(self.verify)
        if self.max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, not {self.max_pending}")
        if self.host_cache_bytes is not None and self.host_cache_bytes < 1:
            raise ValueError(f"host_cache_bytes must be at least 1, not {self.host_cache_bytes}")
        if self.device_cache_bytes is not None and self.device_cache_bytes < 0:
            raise ValueError(
                f"device_cache_bytes must be at least 0, not {self.device_cache_bytes}"
            )
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'log', not {self.on_error!r}")
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, not {self.max_failures}")

    @property
    def is_eager(self) -> bool:
        """True if a save reads or copies all leaves before it returns."""
        return self.capture == "eager"

    @property
    def keeps_shadow(self) -> bool:
        """True if the saver holds a copy of the state, so that a changed leaf becomes a delta."""
        return self.shadow != "none"


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the user of one root has asked for.

    Args:
        policy: The contract of each leaf and the length of chains. Default: ``Policy.exact()``.
        keep: The steps and leaves that stay. Default: all.
        options: All else. Default: ``SaveOptions()``.
    """

    policy: Policy
    keep: Keep
    options: SaveOptions

    @classmethod
    def of(cls, policy: Policy | None, keep: Keep | None, options: SaveOptions | None) -> Settings:
        """Return the settings of the arguments that all public constructors have.

        Raises:
            TypeError: One of them is of another class.
        """
        if isinstance(policy, str) and hasattr(Policy, policy):
            raise TypeError(f"policy must be a Policy, not {policy!r}: give Policy.{policy}()")
        settings = cls(policy or Policy.exact(), keep or Keep(), options or SaveOptions())
        for name, kind in (("policy", Policy), ("keep", Keep), ("options", SaveOptions)):
            value = getattr(settings, name)
            if not isinstance(value, kind):
                remedy = (
                    "Policy.exact() or Policy.auto()" if kind is Policy else f"{kind.__name__}(...)"
                )
                raise TypeError(f"{name} must be a {kind.__name__}, not {value!r}: give {remedy}")
        return settings

    def values(self) -> dict[str, object]:
        """Return all settings by the names that users give them."""
        return {
            "policy": self.policy,
            **{f"keep.{field.name}": getattr(self.keep, field.name) for field in fields(self.keep)},
            **{field.name: getattr(self.options, field.name) for field in fields(self.options)},
        }

    @property
    def durability(self) -> Durability:
        """The event that an acknowledged save survives."""
        return Durability.of(self.options.durability)

    def without_merges(self) -> Settings:
        """Return the same settings with keyframes in place of merged deltas."""
        return replace(self, policy=replace(self.policy, merge_deltas=False))

    @property
    def merges(self) -> bool:
        """True if deltas are merged behind the saves.

        Else leaves are written whole instead, or by every save that finds them changed.
        """
        return self.options.keeps_shadow and can_merge(self.policy)

    @property
    def numbers_of_save(self) -> int:
        """The sequence numbers that ranks take for each save: with merges, the lower one is theirs.

        Ranks write the segments of a save under one number, and so those of its merges.
        """
        return 2 if self.merges else 1


def cache_bytes_of(state_bytes: int, options: SaveOptions) -> int:
    """Return the most encoded bytes that a save of a state may hold in memory."""
    if options.host_cache_bytes is not None:
        return options.host_cache_bytes
    return min(max(state_bytes // 2, _LEAST_CACHE_BYTES), _MOST_CACHE_BYTES)


def require_defaults(options: SaveOptions, names: Collection[str], owner: str) -> None:
    """Raise ``ValueError`` if an option that ``owner`` lacks has another value than its default."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            raise ValueError(
                f"{owner} has no {field.name}: leave out SaveOptions({field.name}={value!r})"
            )


def step_number(step: object) -> int:
    """Return a training step as an ``int``.

    Args:
        step: An integer of at least 0, of Python or of another library (``numpy.int64``).

    Raises:
        ValueError: It is none.
    """
    try:
        # bool is a subclass of int, and ``True`` would become step 1.
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step must be an integer of at least 0, not {step!r}")
    return number


def metric_numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics of a step as Python numbers, which a manifest holds.

    Args:
        metrics: Numbers and arrays of one element, by name.

    Raises:
        ValueError: One is neither.
    """
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            item = getattr(value, "item", None)
            numbers[name] = float(value if item is None else item())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metric {name!r} must be a number, not {value!r}: give its mean or another number,"
                " and keep lists and arrays in the state"
            ) from error
    return numbers


def step_or_tag(step: object) -> int | str | None:
    """Return what names a step: its number, a tag, or ``None`` for the newest one (``"latest"``).

    Raises:
        ValueError: It is none of them.
    """
    if step is None or step == layout.LATEST:
        return None
    return step if isinstance(step, str) else step_number(step)
