"""Types of containers under the Orbax handler: the same with a target, or refused."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager
from deltacheck.backends.orbax.files.orbax_import import write_orbax
from deltacheck.backends.orbax.state import leaves
from deltacheck.errors import UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.store.roots.opening import open_root
from tests.support import nested

jax_leaves = st.sampled_from([np.arange(3), np.float64(0.5), jax.ShapeDtypeStruct((2,), "int4")])


@given(nested.states(jax_leaves))
@settings(max_examples=100, deadline=None)
def test_a_target_gives_its_types_back_or_save_refuses_them_by_path(state: Any) -> None:
    state = {"state": state}
    try:
        flat = tree.flatten(state, leaves.describe_target, leaves.expand)
    except UnsupportedLeaf as error:
        refusal = str(error)
    else:
        content = {**tree.scalars(flat.skeleton), **flat.arrays}
        back = leaves.map_leaves(lambda path, leaf: content[path], state)
        assert list(nested.differences(state, back)) == []
        return
    assert refusal.startswith(("leaf 'state", 'leaf "state')), refusal


def state() -> dict[str, Any]:
    return {
        "recent": deque([jnp.ones(2), 3], maxlen=4),
        "started": time.localtime(1e9),
        "milestones": Counter({30: 1}),
        "by_name": defaultdict(list, a=[1.5]),
        "order": OrderedDict(b=1, a=2),
        "moments": nested.Moments(jnp.zeros(3), None),
        "raw": bytearray(b"ab"),
        "seen": np.int64(2**62),
        "rate": np.float64(0.1),
        "count": np.arange(2, dtype=np.int64),
        "small": jnp.arange(4, dtype=jnp.uint4),
    }


def test_containers_and_scalars_come_back_with_a_target(tmp_path: Path) -> None:
    with manager(tmp_path / "root") as mngr:
        mngr.save(0, args=DeltaSaveArgs(state()))
        mngr.wait_until_finished()
        target = leaves.map_leaves(_emptied, state())
        back: Any = mngr.restore(0, args=DeltaRestoreArgs(target))
        plain: Any = mngr.restore(0, args=DeltaRestoreArgs())
    for restored in (back, plain):
        if restored is plain:
            assert restored["moments"].keys() == {"mu", "nu"}
            restored["moments"] = nested.Moments(**restored["moments"])
        assert list(nested.differences(_on_host(state()), _on_host(restored))) == []
    # Plain Orbax knows fewer containers, and no bytes.
    root = open_root(tmp_path / "root")
    manifest = root.manifest(0)
    skeleton: Any = manifest.tree
    skeleton["k"] = [pair for pair in skeleton["k"] if pair[0] in ("milestones", "recent")]
    write_orbax(tmp_path / "plain", root, manifest)
    assert (tmp_path / "plain").is_dir()


def _emptied(path: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
    return type(leaf)() if isinstance(leaf, int | float | np.generic) else leaf


def _on_host(value: Any) -> Any:
    return leaves.map_leaves(
        lambda path, leaf: ("jax", np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf, value
    )
