"""Find the steps of a run that are not published."""

from __future__ import annotations

from deltacheck.store.files.storage import Place
from deltacheck.store.root import Root, StepRef


class NewSteps:
    """The committed steps of a root after a save.

    Args:
        root: The root of the run.

    Attributes:
        seq: The number of the newest save that was published; -1: none.
    """

    def __init__(self, root: Root) -> None:
        self.seq = -1
        self._root = root
        # Manifests when nothing newer was left. While they stay the same, none is read.
        self._known_paths: list[Place] = []
        # Unreadable manifests whose errors were raised. They must not block the steps after them.
        self._reported: set[Place] = set()

    def next(self, newest_only: bool, repeat: bool) -> StepRef | None:
        """Return the step to publish next; ``None``: there is no new one.

        Args:
            newest_only: Skip all new steps but the newest.
            repeat: Return the newest step if there is no new one.

        Raises:
            Damaged: The newest manifest cannot be read. Raised once for each.
            UnsupportedFormat: A newer version of deltacheck has written it.
        """
        paths = self._root.manifest_paths()
        if paths == self._known_paths and not repeat:
            return None
        checkpoints, damaged = self._root.read_all()
        last = max((paths.index(r.manifest_path) for r in checkpoints), default=-1)
        for path in sorted(damaged.keys() - self._reported):
            self._reported.add(path)
            # It may be the newest step. An older one is not of interest.
            if path in paths[last + 1 :]:
                raise damaged[path]
        newer = [ref for ref in checkpoints if ref.seq > self.seq]
        if repeat and not newer:
            newer = checkpoints[-1:]
        if len(newer) <= 1 or newest_only or self.seq < 0:
            self._known_paths = paths
        if not newer:
            return None
        return newer[-1] if newest_only or self.seq < 0 else newer[0]
