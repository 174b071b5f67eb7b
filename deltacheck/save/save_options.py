"""The options of saves and their validation: one record for every public constructor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from deltacheck.policy import KeepBest, Policy
from deltacheck.policy.merging import can_merge
from deltacheck.policy.retention import History, Retention
from deltacheck.restore import receipt
from deltacheck.save.adaptive_effort import EFFORTS
from deltacheck.store.files.durability import Durability

SHADOWS = ("auto", "device", "host", "mapped", "none")
ON_BUSY = ("wait", "skip")
ON_ERROR = ("raise", "log")
# Half of a state is about what an exact save of AdamW's state encodes, less what a disk takes
# meanwhile.
_LEAST_CACHE_BYTES = 64 << 20
_MOST_CACHE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of the saves of one root.

    The public constructors (``Engine``, ``DeltaStorageWriter``, ``DeltaCheckpointHandler``,
    ``manager``) take them as keyword arguments and build this record. A backend leaves those that
    it does not offer at their defaults.

    Args:
        policy: The contract of each leaf and the length of chains. Default: ``Policy.exact()``.
        host_cache_bytes: The most encoded bytes between the training loop and the storage. Larger:
            a slow storage blocks training later; smaller: less memory. ``None``: half of the state,
            at least 64 MiB and at most 8 GiB. Copies that shorten a wait of training may take as
            much again.
        device_cache_bytes: The most memory on each device for a copy of the state, which lets
            training go on at once. Larger: training does not wait for larger states; smaller: more
            memory for training. ``None``: half of what nobody has reserved; 0: no copy.
        max_pending: The most saves under way. Larger: more overlap with a slow storage; smaller:
            less work is lost when a save fails.
        on_busy: The action when ``max_pending`` saves are under way. ``"wait"``: wait for the
            oldest, every step is saved; ``"skip"``: skip this save, training never waits.
        shadow: The place of the copies that changes are found against. ``"device"``: fastest
            captures, device memory of the size of the state; ``"host"``: no device memory, but
            the whole state crosses at each save; ``"mapped"``: as ``"host"``, in files of
            ``TMPDIR`` that the system may write out instead of running out of memory; ``"none"``:
            least memory, but a leaf that changed is written whole; ``"auto"``: the device if it
            has enough free memory, else the host.
        effort: The effort of the entropy stage, ``"low"``, ``"normal"``, ``"high"`` or
            ``"auto"``. Higher: smaller files; lower: less processor time beside training.
            ``"auto"`` follows the bottleneck of the last save; equal states then no longer give
            equal files.
        durability: The event that an acknowledged save survives. ``POWER``: a power cut, at the
            cost of syncs; ``PROCESS``: only the end of the process, and saves end sooner.
        verify: The check of what was written. ``"none"``: none, a restore checks it;
            ``"commit"``: the files of the save are read back before its step exists, so it
            commits later, and the state is hashed at the capture.
        retention: The checkpoints that stay after each save. More rules: more to go back to;
            fewer: less disk space. Default: all stay.
        history: The leaves that older checkpoints keep. Fewer leaves: less disk space; more: more
            to go back to. Default: all.
        grace_seconds: The time that unneeded segments stay for readers. Longer: safer for slow
            readers; shorter: disk space sooner.
        io_timeout_seconds: The longest wait for the storage before a save is given up. Longer: a
            slow storage gets its saves through; shorter: a dead one is reported sooner.
        redate_after_seconds: The age after which the files of a local root get the present time, so
            that a purge by age leaves them. Smaller: safer, but the tree is walked more often.
            Default: never, and a purge that removes files costs the steps that need them.
        exit_timeout_seconds: The longest wait for pending saves at interpreter exit. Longer: a
            slow storage gets the last save through; shorter: a dead one lets the process end.
        on_error: The effect of a failed save on later calls. ``"raise"``: the next one raises it,
            so no loss goes unseen; ``"log"``: it is logged and counted, and the run goes on.
        max_failures: The failed saves in a row after which ``"log"`` raises, too. Larger: the run
            survives longer without a new step; smaller: less work can be lost.

    Raises:
        ValueError: An option has a value that it cannot have.
    """

    policy: Policy = field(default_factory=Policy.exact)
    host_cache_bytes: int | None = None
    device_cache_bytes: int | None = None
    max_pending: int = 1
    on_busy: str = "wait"
    shadow: str = "auto"
    effort: str = "normal"
    durability: Durability = Durability.POWER
    verify: str = "none"
    retention: Retention = field(default_factory=Retention)
    history: History | None = None
    grace_seconds: float = 60.0
    io_timeout_seconds: float = 600.0
    exit_timeout_seconds: float = 120.0
    redate_after_seconds: float | None = None
    on_error: str = "raise"
    max_failures: int = 3

    def __post_init__(self) -> None:
        # Checked here, so that every public constructor refuses the same values with the same
        # words.
        if not isinstance(self.policy, Policy):
            remedy = (
                f"Policy.{self.policy}()"
                if isinstance(self.policy, str) and hasattr(Policy, self.policy)
                else "Policy.exact(), or another of the presets of Policy"
            )
            raise TypeError(f"policy must be a Policy, not {self.policy!r}: give {remedy}")
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
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {self.effort!r}")
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error must be 'raise' or 'log', not {self.on_error!r}")
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, not {self.max_failures}")
        if self.redate_after_seconds is not None and not self.redate_after_seconds > 0:
            raise ValueError(
                f"redate_after_seconds must be more than 0, not {self.redate_after_seconds}"
            )

    def cache_bytes(self, state_bytes: int) -> int:
        """Return the most encoded bytes that a save of ``state_bytes`` may hold in memory."""
        if self.host_cache_bytes is not None:
            return self.host_cache_bytes
        return cache_bytes_of(state_bytes)

    def without_merges(self) -> SaveOptions:
        """Return the same options with keyframes in place of merged deltas."""
        return replace(self, policy=replace(self.policy, merge_deltas=False))

    @property
    def merges(self) -> bool:
        """True if deltas are merged behind the saves.

        Else leaves are written whole instead, or by every save that finds them changed.
        """
        return self.keeps_shadow and can_merge(self.policy)

    @property
    def numbers_of_save(self) -> int:
        """The sequence numbers that ranks take for each save: with merges, the lower one is theirs.

        Ranks write the segments of a save under one number, and so those of its merges.
        """
        return 2 if self.merges else 1

    @property
    def keeps_shadow(self) -> bool:
        """True if the saver holds a copy of the state, so that a changed leaf becomes a delta."""
        return self.shadow != "none"


def cache_bytes_of(state_bytes: int) -> int:
    """Return the default of ``host_cache_bytes`` for a state."""
    return min(max(state_bytes // 2, _LEAST_CACHE_BYTES), _MOST_CACHE_BYTES)


def retention_of(
    keep_last: int | None,
    keep_every: int | None,
    keep_best: KeepBest | Iterable[KeepBest] = (),
) -> Retention:
    """Return the retention that the ``keep_*`` arguments of a public constructor describe.

    Raises:
        ValueError: A number is below 1.
    """
    best = (keep_best,) if isinstance(keep_best, KeepBest) else tuple(keep_best)
    return Retention(keep_last, keep_every, best)
