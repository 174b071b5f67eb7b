"""What a handler does otherwise where several processes save and restore together: they agree, each
writes its tiles, process 0 commits.

Every process calls the same methods in the same order. What is said between them goes over JAX's
coordination service, never through a collective on the devices: those belong to the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from deltacheck.backends.orbax.group import coordination
from deltacheck.backends.orbax.state import pieces
from deltacheck.errors import Damaged, DeltacheckError, NotACheckpointRoot, RankFailed
from deltacheck.leaf import sharding
from deltacheck.leaf.structs import known
from deltacheck.leaf.tree import Flat
from deltacheck.save.joint import Begun, Joint
from deltacheck.store.documents import Written
from deltacheck.store.manifest import Manifest


class Opening(msgspec.Struct, frozen=True):
    """What a process says when a save begins. ``restored``: nonce of the step that it would go on
    from, where it has restored one since the last save; ``alike``: digests of what all must have
    alike.
    """

    restored: str
    alike: dict[str, str]


class Opened(msgspec.Struct, frozen=True):
    """What process 0 answers. ``seq``: the save's sequence number; ``is_committed``: whether Orbax
    has
    made the step before exist; ``resumes``: all go on from the step that they have restored.
    """

    seq: int
    is_committed: bool
    resumes: bool


known(Opening, Opened)


class Together:
    """One process's part in the saves of one item."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.joint = Joint(coordination.join(name, timeout_seconds))
        self.segments: frozenset[str] = (
            frozenset()
        )  # of the newest step of all processes, on process 0

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A failure of this process, before they agree, is one of all."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RankFailed):  # which the others raise
                self.joint.fail(error)
            raise

    def open(self, flat: Flat, restored: str, take: Callable[[], tuple[int, bool]]) -> Opened:
        """Agree that a save begins. ``take()``, on process 0: makes the root its own, and gives a
        sequence number and whether the step before exists. Raises ``RankFailed`` naming leaf and
        process where what must be alike is not.
        """

        def decide(said: list[Any]) -> Any:
            every = [msgspec.convert(one, Opening) for one in said]
            _require_alike([one.alike for one in every])
            resumes = bool(every[0].restored) and all(
                one.restored == every[0].restored for one in every
            )
            return msgspec.to_builtins(Opened(*take(), resumes))

        said = msgspec.to_builtins(Opening(restored, pieces.alike(flat)))
        opened: Opened = msgspec.convert(self.joint.agree(said, decide), Opened)
        return opened

    def begin(self, step: int, seq: int, flat: Flat) -> Begun:
        """Agree on who writes what. Raises ``RankFailed``."""
        begun = self.joint.begin(step, seq, pieces.held(flat), flat.skeleton, busy=False)
        assert begun is not None  # nobody is busy: Orbax has waited for the save before
        return begun

    def maker(self, make: Callable[[Manifest], Written]) -> Callable[[Manifest], Written]:
        """``make``, which makes a step exist, and remember what it needs."""

        def make_all(every: Manifest) -> Written:
            written = make(every)
            self.segments = frozenset(ref.id for ref in every.segments)
            return written

        return make_all


def names_of(begun: Begun) -> list[str]:
    """What this process's tiles are stored as."""
    return [
        name
        for path, (cuts, numbers) in begun.tiles.items()
        for name in sharding.names_of(path, cuts, numbers)
    ]


def restored_by_all(joint: Joint, give: Callable[[], tuple[str, Any]]) -> Any:
    """Let every process restore with ``give``, which also says (a digest) what was restored, and
    return what it gave here.

    Where one fails, all do: raises ``Damaged`` where that is what another found, else
    ``RankFailed``; both name the process.
    """
    mine: DeltacheckError | Exception | None = None
    digest, given = "", None
    try:
        digest, given = give()
    except Exception as error:  # noqa: BLE001 - all must know of it
        mine = error
    kind = (
        ""
        if mine is None
        else "damaged"
        if isinstance(mine, Damaged | NotACheckpointRoot)
        else "failed"
    )
    verdict = joint.agree(
        {
            "digest": digest,
            "kind": kind,
            "error": "" if mine is None else f"{type(mine).__name__}: {mine}",
        },
        _same,
    )
    if mine is not None:
        raise mine
    if verdict["kind"]:
        raise (Damaged if verdict["kind"] == "damaged" else RankFailed)(verdict["error"])
    return given


def _same(said: list[dict[str, str]]) -> dict[str, str]:
    for rank, one in enumerate(said):
        if one["kind"]:
            return {"kind": one["kind"], "error": f"process {rank}: {one['error']}"}
    for rank, one in enumerate(said):
        if one["digest"] != said[0]["digest"]:
            return {
                "kind": "failed",
                "error": (
                    f"processes 0 and {rank} have restored different steps; every process has to"
                    " ask for the same"
                ),
            }
    return {"kind": "", "error": ""}


def _require_alike(every: list[Mapping[str, str]]) -> None:
    for rank, one in enumerate(every):
        for path in sorted(every[0].keys() | one.keys()):
            if every[0].get(path) != one.get(path):
                raise RankFailed(
                    f"leaf {path!r}, a NumPy array, is another on process {rank} than on process 0;"
                    " every process must have it alike, or make it a jax.Array of all of them"
                )
