"""Replay the updates of a step on a replica, and prove the result by the digests of the step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from deltacheck.codec.base import U8
from deltacheck.errors import ReplayDiffers
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import Flat, Node
from deltacheck.restore import replay
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.root import Root

_HASH_THREADS = 4

_Content = TypeVar("_Content")


class Replica(Protocol):
    """A second instance of what an update works on, in memory of its own."""

    def update(self, options: Node, inputs: Mapping[str, Any]) -> None:
        """Do one update."""
        ...

    def memory(self) -> Flat:
        """Return the content after the updates so far."""
        ...


def replay_updates(
    root: Root,
    manifest: Manifest,
    plan: Replay,
    replica: Replica,
    input_at: Callable[[str], Any],
    content_of: Callable[[Flat], tuple[_Content, dict[str, str]]],
    update_name: str,
) -> _Content:
    """Do the updates of a step, prove the result, and return it.

    Args:
        root: The root of the step; the message of an error names its other steps.
        manifest: The step.
        plan: The updates.
        replica: Holds the content that the updates begin with.
        input_at: Returns the input that is stored under a path.
        content_of: Returns the content of a memory, and the digest of each leaf.
        update_name: The name of the code that computes the updates now.

    Raises:
        ReplayDiffers: An update fails, or a leaf has another digest than the step promises.
    """
    try:
        for step in plan.steps:
            inputs = {name: input_at(path) for name, path in step.inputs.items()}
            replica.update(step.options, inputs)
        content, digests = content_of(replica.memory())
    except Exception as error:
        raise ReplayDiffers(
            f"step {manifest.step}: {len(plan.steps)} updates of {plan.update} cannot be replayed"
            f" with {update_name}: {type(error).__name__}: {error}."
            f" {replay.way_out(root, manifest)}"
        ) from error
    by_place = {plan.places.get(path, path): digest for path, digest in digests.items()}
    replay.check(root, manifest, by_place, update_name)
    return content


def leaf_digests(leaves: Iterable[tuple[LeafSpec, U8]]) -> list[str]:
    """Return the digests of leaves in order, computed in a few threads."""
    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda leaf: digest_of(*leaf), leaves))
