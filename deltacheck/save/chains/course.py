"""The course of a run that a writer's saves belong to."""

from __future__ import annotations

import logging

import msgspec

from deltacheck.store.manifest import Manifest
from deltacheck.store.roots.root import Root, newest_brief
from deltacheck.store.roots.wording import listed

log = logging.getLogger("deltacheck")


class Course:
    """A course: a save from which a run went on, and all saves that followed it.

    A run that restores a step goes on with the course of that step. Otherwise the first save
    decides: behind the newest step of the root it goes on with that step's course, too, since
    states are also restored by other means. At or before the newest step it begins a new course, as
    a program does that has forgotten to restore. Retention applies to one course only.

    Args:
        root: The root that the steps are in.
    """

    def __init__(self, root: Root) -> None:
        self._roots = [root]
        self._name: str | None = None

    def include(self, root: Root) -> None:
        """Look for earlier steps in another root, too."""
        self._roots.append(root)

    def follow(self, name: str) -> None:
        """Go on with a course, such as that of a restored step; empty: the first of the root."""
        self._name = name

    def assigned(self, manifest: Manifest) -> Manifest:
        """Return the manifest of a new save with its course."""
        if self._name is None:
            self._name = self._first(manifest)
        if manifest.course == self._name:
            return manifest
        return msgspec.structs.replace(manifest, course=self._name)

    def _first(self, manifest: Manifest) -> str:
        # Read anew, because a ``Root`` serves one thread.
        roots = [root.afresh() for root in self._roots]
        briefs = [brief for root in roots if (brief := newest_brief(root)) is not None]
        newest = max(briefs, key=lambda brief: brief.seq, default=None)
        if newest is None or manifest.step > newest.step:
            return "" if newest is None else newest.course
        steps = sorted({brief.step for root in roots for brief in root.briefs()[0].values()})
        log.warning(
            "%s has %d %s that this process has not restored (%s), and step %d does not follow"
            " them: it begins another course of the run. They stay whatever Keep(last=...) says. To"
            " go on with them, call restore() before the first save; to keep the runs apart, save"
            " to another root; to remove one: deltacheck delete ROOT STEP",
            self._roots[0].path,
            len(steps),
            "step" if len(steps) == 1 else "steps",
            listed(steps),
            manifest.step,
        )
        return manifest.nonce
