"""Exceptions that deltacheck raises.

They form three groups. Misuse: the call is wrong. Refusal: the environment, another process or the
checkpoint does not allow the call. Corruption: bytes in storage differ from those that were saved.
"""

from __future__ import annotations


class DeltacheckError(Exception):
    """Base class of all errors that deltacheck raises on purpose."""


# Many classes also derive from the built-in exception of the same meaning. Callers that handle
# ``OSError`` or ``ValueError`` then need no import from this module.

# --- misuse: the call is wrong, storage is not at fault -------------------------------------------


class UnsupportedLeaf(DeltacheckError, TypeError):
    """A leaf, key or container has a type that cannot be kept exactly.

    Convert it to arrays, numbers, text, bytes or ``None``, or leave it out of the state.
    """


class DuplicatePath(DeltacheckError, ValueError):
    """Two leaves of one state have the same path.

    Rename one of the keys that the message names.
    """


class TreeMismatch(DeltacheckError, ValueError, KeyError):
    """The restore target has other paths, shapes or dtypes than the checkpoint.

    Build the target as it was when the step was saved, or restore without a target. Of
    ``Engine.reload``: a tensor has got memory since ``offload``, as the message says.
    """

    # Orbax raises ``ValueError`` or ``KeyError`` for a missing leaf. The latter quotes its message.
    __str__ = Exception.__str__


class StepNotFound(DeltacheckError, LookupError):
    """The requested step or tag does not exist in this root.

    The message names what exists. ``Checkpoints.steps`` and ``deltacheck ls`` list the steps.
    """


class LeafNotFound(StepNotFound):
    """The step has no such leaf, or none that matches a pattern.

    The message names similar leaves. ``deltacheck show`` lists all of them.
    """


class LeafPruned(LeafNotFound):
    """The retention has removed a leaf from a step, which keeps other leaves.

    Restore the leaves that the step has, or restore ``newest_step`` of the error.

    Args:
        message: The description.
        leaf: The path of the leaf, or of the container whose arrays were removed.
        step: The training step.
        newest_step: The newest step that has the leaf; ``None``: no step has it.

    Attributes:
        leaf: The path of the leaf, or of the container whose arrays were removed.
        step: The training step.
        newest_step: The newest step that has the leaf; ``None``: no step has it.
    """

    def __init__(
        self, message: str, *, leaf: str = "", step: int = -1, newest_step: int | None = None
    ) -> None:
        super().__init__(message)
        self.leaf = leaf
        self.step = step
        self.newest_step = newest_step


class StepTagged(DeltacheckError, ValueError):
    """A step was to be deleted while a tag refers to it.

    Remove the tag first.
    """


# --- refusal: the environment, another process or the checkpoint does not allow it ----------------


class NotACheckpointRoot(DeltacheckError):
    """The directory or prefix is not a deltacheck root, or is not empty where a new one must go.

    Check the path.
    """


class UnsupportedFormat(DeltacheckError):
    """The root has a format version or a feature that this version of deltacheck cannot read.

    Use a newer version.
    """


class RootBusy(DeltacheckError):
    """Another process writes to the root.

    Wait until it has ended, or write to another root. Readers are not affected.
    """


class ForeignMemory(DeltacheckError):
    """The content of a memory tier does not continue the newest durable step of the root.

    It belongs to another run, or to an abandoned part of this run. The message names the choices.
    """


class StorageFailed(DeltacheckError, OSError):
    """The storage refused a request, or lacks a capability that a root needs.

    This error says nothing about the stored content. Check access, space and the message of the
    storage, then repeat the call. If the system has a class for the failure, such as
    ``PermissionError``, the error is of that class, too.
    """


class StorageTimeout(StorageFailed, TimeoutError):
    """The storage did not answer in time.

    Repeat the call, or allow more time (``io_timeout_seconds``).
    """


class SaveFailed(DeltacheckError):
    """A save did not become a checkpoint. All earlier steps are unchanged.

    The cause is in ``__cause__``. Later saves can succeed.
    """


class RankFailed(SaveFailed):
    """Another process of the run failed, was lost, or holds an inconsistent state.

    The message names the rank. Restart the run from the newest step if the rank was lost.
    """


class SnapshotTorn(SaveFailed):
    """A tensor was modified before its capture had finished.

    Call ``Engine.before_update`` before every update, or use ``Engine.guard``.
    """


class ContractNotMet(DeltacheckError):
    """Some leaves of the step were saved under a weaker contract than the restore demands.

    Restore without ``contract``, choose an exact step, or save with a stronger policy.
    """


class BudgetExceeded(DeltacheckError, MemoryError):
    """A call would take more memory, disk or time than the caller or the machine allows.

    Raise ``max_bytes`` or the ``Limits`` of the call, or name fewer leaves or slices. If the
    machine has no memory or threads left, free some.
    """


# --- corruption: bytes in storage differ from those that were saved -------------------------------


# Not an ``OSError``: a handler that repeats failed I/O would meet the same bytes again.
class Damaged(DeltacheckError):
    """Bytes in storage differ from those that were committed.

    Restore one of the steps that the message lists as whole.

    Args:
        message: The description of the damage.
        file: The file or the array directory at fault, if known.
        leaf: The path of the leaf at fault, if known.

    Attributes:
        file: The file or the array directory at fault; empty if unknown.
        leaf: The path of the leaf at fault; empty if unknown.
    """

    def __init__(self, message: str, *, file: object = "", leaf: str = "") -> None:
        super().__init__(message)
        # Callers pass paths, addresses in an object store and names; users get text in all cases.
        self.file = str(file)
        self.leaf = leaf


class DamagedStream(Damaged):
    """An encoded chunk does not follow the format.

    Args:
        message: The description of the damage.
        file: The file or the array directory at fault, if known.
        leaf: The path of the leaf at fault, if known.
    """


class ReceiptFailed(Damaged):
    """A step that was just saved differs from the captured state when it is read from storage.

    The hardware or the storage changes data silently. Do not rely on the step.

    Args:
        message: The description of the damage.
        file: The file or the array directory at fault, if known.
        leaf: The path of the leaf at fault, if known.
    """


class ChainBroken(Damaged):
    """A segment that a step needs is missing, or does not continue the chain of a leaf.

    Restore one of the steps that the message lists as whole.

    Args:
        message: The description of the damage.
        file: The file or the array directory at fault, if known.
        leaf: The path of the leaf at fault, if known.
    """
