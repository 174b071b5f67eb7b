"""The exception tree: misuse, refusal and corruption are different branches."""

from __future__ import annotations


class DeltacheckError(Exception):
    """Base of every error that deltacheck raises on purpose."""


# --- misuse: the call is wrong, nothing on disk is at fault ---------------------------------------


class UnsupportedLeaf(DeltacheckError, TypeError):
    """A leaf, key or container of a type that cannot be kept exactly."""


class DuplicatePath(DeltacheckError, ValueError):
    """Two leaves of one tree have the same path."""


class TreeMismatch(DeltacheckError, ValueError):
    """The restore target's paths, shapes or dtypes differ from the checkpoint's."""


class StepNotFound(DeltacheckError, LookupError):
    """The asked step or leaf is not in this root."""


class StepTagged(DeltacheckError, ValueError):
    """A step that is to be deleted has a tag."""


# --- refusal: the environment or another party does not allow it ----------------------------------


class NotACheckpointRoot(DeltacheckError):
    """The directory is not a deltacheck root."""


class UnsupportedFormat(DeltacheckError):
    """The root was written by a format version or with a feature that this reader does not know."""


class RootBusy(DeltacheckError):
    """Another writer holds the root."""


class ForeignMemory(DeltacheckError):
    """What a memory tier holds does not belong to the newest of the run that it is to serve."""


class StorageFailed(DeltacheckError, OSError):
    """The storage refused a request, or lacks what a root needs of it. Nothing is said of what it
    holds.
    """


class StorageTimeout(StorageFailed, TimeoutError):
    """The storage did not answer in time; it may hang."""


class SaveFailed(DeltacheckError):
    """A save did not become a checkpoint; every earlier step is as it was."""


class RankFailed(SaveFailed):
    """Another process of the run failed, was lost, or has another state than the others."""


class SnapshotTorn(SaveFailed):
    """A tensor was written to before its capture had finished."""


class ContractNotMet(DeltacheckError):
    """A step cannot give what the restore asks for: some of its leaves were saved under a weaker
    contract.
    """


class ReplayNeeded(DeltacheckError):
    """The step is kept as gradients: it is restored by replaying the optimizer, which this reader
    was not given.
    """


class ReplayDiffers(DeltacheckError):
    """Replaying the optimizer did not give the state that was saved."""


class BudgetExceeded(DeltacheckError, MemoryError):
    """A restore would allocate more than the caller allows."""


# --- corruption: what is on disk is not what was written ------------------------------------------


class Damaged(DeltacheckError):
    """Bytes on disk are not those that were committed.

    ``file``: the file or the array's directory at fault, ``leaf``: the leaf path, each where the
    place that found it knows; else empty.
    """

    def __init__(self, message: str, *, file: object = "", leaf: str = "") -> None:
        super().__init__(message)
        self.file = str(file)
        self.leaf = leaf


class DamagedStream(Damaged):
    """An encoded chunk does not follow the format."""


class ReceiptFailed(Damaged):
    """A step that was just saved does not come back from disk as it was captured."""


class ChainBroken(Damaged):
    """A step needs a segment that is missing or not its own."""
