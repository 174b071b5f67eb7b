"""Find the weight of each master by content, if names do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from deltacheck.policy import roles
from deltacheck.policy.parameters import Roles
from deltacheck.restore import derive
from deltacheck.save.job.source import LeafSource
from deltacheck.save.treatment.cells import Layout
from deltacheck.save.treatment.error_measures import sample
from deltacheck.save.treatment.run_state import LeafReader, RunState


def proven(
    run: RunState,
    reader: LeafReader,
    leaf_roles: Roles,
    layout: Layout,
    sources: Mapping[str, LeafSource],
) -> Roles:
    """Return the roles with each master's weight, found by content.

    The proof is repeated while a master has no weight, and after a capture has found a weight that
    is not the cast of its master.

    Args:
        run: Keeps the proof between saves.
        reader: Access to leaves.
        leaf_roles: The roles as names and shapes give them.
        layout: The leaves and tiles that this process writes.
        sources: Their sources, by stored path.
    """
    if run.proof is not None and run.proof[0] == leaf_roles:
        return run.proof[1]
    result = roles.prove(leaf_roles, partial(_is_cast, reader, layout, sources))
    is_complete = all(p.proven or p.master is None for p in result.parameters)
    run.proof = (leaf_roles, result) if is_complete else None
    return result


def _is_cast(
    reader: LeafReader, layout: Layout, sources: Mapping[str, LeafSource], weight: str, master: str
) -> bool:
    """Return true if a sample of a weight is the rounded master, as far as they are here.

    A sample is enough: every value is checked again when the weight is captured.
    """
    for cell in layout.cells([weight, master]):
        if len(cell.names) < 2:  # cut in different ways
            return False
        weights, masters = (
            sample(reader.live(sources[cell.names[path]])) for path in (weight, master)
        )
        restored = derive.cast(masters, weights.dtype)
        if not np.array_equal(weights.view(np.uint8), restored.view(np.uint8)):
            return False
    return True
