"""Save and restore an Orbax item with several processes.

Every process calls the same methods in the same order. Each writes its tiles, and process 0
commits. The processes communicate over JAX's coordination service. They never use a collective on
the devices, because that would interleave with the collectives of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from deltacheck.backends.orbax.group import coordination
from deltacheck.backends.orbax.state import pieces
from deltacheck.errors import Damaged, NotACheckpointRoot, RankFailed
from deltacheck.leaf.structs import inspect_types
from deltacheck.leaf.tree import Flat
from deltacheck.save.ranks.group import Group
from deltacheck.save.ranks.joint import Joint


class Opening(msgspec.Struct, frozen=True):
    """The message of a process when a save begins.

    ``restored`` is the nonce of the step that it would continue from, if it has restored one since
    the last save. ``alike`` has the digests of leaves that must be equal on every process.
    """

    restored: str
    alike: dict[str, str]


class OpenAnswer(msgspec.Struct, frozen=True):
    """The answer of process 0.

    ``seq`` is the sequence number of the save. ``is_committed`` is true if Orbax has committed the
    step before. ``resumes`` is true if all processes continue from the step that they have
    restored.
    """

    seq: int
    is_committed: bool
    resumes: bool


inspect_types(Opening, OpenAnswer)


class RankGroup(Group):
    """One process of several that save one item.

    Args:
        name: Identifies the item. Each process must construct this equally often for a name.
        timeout_seconds: The longest wait for another process. Larger: a slow process is not taken
            for a lost one; smaller: the loss of a process is noticed sooner.
    """

    def __init__(self, name: str, timeout_seconds: float) -> None:
        super().__init__(coordination.join(name, timeout_seconds))

    def agree(
        self, flat: Flat, restored: str, take_number: Callable[[], int], is_committed: bool
    ) -> OpenAnswer:
        """Agree that a save begins.

        Args:
            flat: The state of this process.
            restored: The nonce of the step that this process has restored, or an empty string.
            take_number: Take the sequence number of the save; called on process 0.
            is_committed: Orbax has committed the step before. That of process 0 counts.

        Raises:
            RankFailed: A leaf that must be equal on every process is not. The message names it and
                the process.
        """

        def decide(messages: list[Any]) -> Any:
            # This runs on process 0 only. An error that it raises reaches all processes.
            openings = [msgspec.convert(message, Opening) for message in messages]
            _require_alike([opening.alike for opening in openings])
            # All or none: the processes cut the tiles alike only if they continue from one step.
            resumes = bool(openings[0].restored) and all(
                opening.restored == openings[0].restored for opening in openings
            )
            return msgspec.to_builtins(OpenAnswer(take_number(), is_committed, resumes))

        message = msgspec.to_builtins(Opening(restored, pieces.alike(flat)))
        opened: OpenAnswer = msgspec.convert(self.joint.agree(message, decide, "saves"), OpenAnswer)
        return opened


def restored_by_all(joint: Joint, restore: Callable[[], tuple[str, Any]]) -> Any:
    """Restore with ``restore`` on every process, and fail on every process if one fails.

    Args:
        joint: The processes.
        restore: Returns a digest of the step that was restored, and the result.

    Returns:
        The result of this process.

    Raises:
        Damaged: Another process found damage; the message names the process.
        RankFailed: Another process failed, or has restored a different step.
    """
    failure: Exception | None = None
    digest, result = "", None
    try:
        digest, result = restore()
    # Kept until the exchange. A process that raised here would let the others wait for it.
    except Exception as error:  # noqa: BLE001 - every process must learn of it
        failure = error
    kind = ""
    if failure is not None:
        # The class does not travel, but ``restore_whole`` must try an older step on every process.
        kind = "damaged" if isinstance(failure, Damaged | NotACheckpointRoot) else "failed"
    verdict = joint.agree(
        {
            "digest": digest,
            "kind": kind,
            "error": "" if failure is None else f"{type(failure).__name__}: {failure}",
        },
        _verdict,
        "restores",
    )
    # A process that has failed raises its own error, which has the traceback and the class.
    if failure is not None:
        raise failure
    if verdict["kind"]:
        raise (Damaged if verdict["kind"] == "damaged" else RankFailed)(verdict["error"])
    return result


def _verdict(outcomes: list[dict[str, str]]) -> dict[str, str]:
    """Return the first failure of a process, or that the processes restored different steps."""
    for rank, outcome in enumerate(outcomes):
        if outcome["kind"]:
            return {"kind": outcome["kind"], "error": f"process {rank}: {outcome['error']}"}
    for rank, outcome in enumerate(outcomes):
        if outcome["digest"] != outcomes[0]["digest"]:
            return {
                "kind": "failed",
                "error": (
                    f"processes 0 and {rank} have restored different steps; every process has to"
                    " ask for the same"
                ),
            }
    return {"kind": "", "error": ""}


def _require_alike(digests: list[Mapping[str, str]]) -> None:
    """Raise ``RankFailed`` if a leaf in host memory differs between the processes."""
    for rank, of_rank in enumerate(digests):
        # Sorted, so that the message names the same leaf at every attempt.
        for path in sorted(digests[0].keys() | of_rank.keys()):
            if digests[0].get(path) != of_rank.get(path):
                raise RankFailed(
                    f"leaf {path!r}, a NumPy array, is another on process {rank} than on process 0;"
                    " every process must have it alike, or make it a jax.Array of all of them"
                )
