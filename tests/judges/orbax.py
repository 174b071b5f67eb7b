"""Compare restores of Orbax's handlers and of ours: python -m tests.judges.orbax.

Each case is a sequence from Orbax's documentation of metadata and partial restores: a
``CheckpointManager`` saves a tree and restores it. It runs with Orbax's own handlers and with the
manager of deltacheck, which takes Orbax's arguments. Trees, types, dtypes, shardings, values and
errors must be equal, except where ``EXPECTED`` says why not. Other differences are printed, and the
exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax import checkpoint as ocp

from deltacheck.backends.orbax import manager

STANDARD = (ocp.args.StandardSave, ocp.args.StandardRestore)
PYTREE = (ocp.args.PyTreeSave, ocp.args.PyTreeRestore)
MESH = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(MESH, PartitionSpec("x"))
COLUMNS = NamedSharding(MESH, PartitionSpec(None, "x"))
WHOLE = NamedSharding(MESH, PartitionSpec())
Case = Callable[[Any, Any], object]


def tree() -> dict[str, Any]:
    w = jax.device_put(jnp.arange(32.0).reshape(4, 8), ROWS)
    return {
        "params": {"w": w, "b": jnp.ones(4, jnp.bfloat16)},
        "opt": [jnp.full(3, 2), np.arange(5, dtype=np.int32)],
        "step": 7,
        "rate": 0.5,
    }


def abstract(leaf: Any, **changes: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    options = {"dtype": leaf.dtype, "sharding": leaf.sharding} | changes
    return jax.ShapeDtypeStruct(leaf.shape, **options)  # type: ignore[no-untyped-call]


def target(**changes: Any) -> Any:
    return jax.tree.map(partial(abstract, **changes), tree())


def args_of(wanted: Any) -> Any:
    return ocp.checkpoint_utils.construct_restore_args(wanted)


def metadata(mngr: Any, restore: Any) -> object:
    return mngr.item_metadata(0).tree


def args_of_metadata(mngr: Any, restore: Any) -> object:
    found = mngr.item_metadata(0).tree
    return mngr.restore(0, args=restore(found, restore_args=args_of(found)))


def restored(make: Callable[[], dict[str, Any]]) -> Case:
    return lambda mngr, restore: mngr.restore(0, args=restore(**make()))


def part() -> Any:
    return {"params": {"w": target()["params"]["w"]}}


def with_placeholder() -> Any:
    return {**target(), "opt": [..., ...], "rate": ...}


def arrays(**options: Any) -> Any:
    """Return ``ArrayRestoreArgs`` for the arrays of JAX, and defaults for the rest."""
    return jax.tree.map(
        lambda leaf: (
            ocp.ArrayRestoreArgs(**options) if isinstance(leaf, jax.Array) else ocp.RestoreArgs()
        ),
        tree(),
    )


BOTH: dict[str, Case] = {
    "metadata": metadata,
    "no target": restored(dict),
    "target": restored(lambda: {"item": target()}),
    "target, columns": restored(
        lambda: {
            "item": target()
            | {
                "params": target()["params"]
                | {"w": abstract(tree()["params"]["w"], sharding=COLUMNS)}
            }
        }
    ),
    "target, replicated": restored(lambda: {"item": target(sharding=WHOLE)}),
    "target, one device": restored(
        lambda: {"item": target(sharding=SingleDeviceSharding(jax.devices()[1]))}
    ),
    "target, concrete": restored(lambda: {"item": tree()}),
    "placeholder": restored(lambda: {"item": with_placeholder()}),
    "leaf missing": restored(lambda: {"item": part()}),
    "leaf unknown": restored(lambda: {"item": {**target(), "new": jnp.ones(2)}}),
    "dtype, wider": restored(
        lambda: {"item": {**target(), "params": {**target()["params"], "b": jnp.ones(4)}}}
    ),
    "dtype, narrower": restored(lambda: {"item": target(dtype=jnp.bfloat16)}),
    "another shape": restored(lambda: {"item": {**target(), "opt": [jnp.ones(2), np.arange(5)]}}),
}
ONLY_PYTREE: dict[str, Case] = {
    "restore_args": restored(lambda: {"item": target(), "restore_args": args_of(target())}),
    "restore_args alone": restored(lambda: {"restore_args": args_of(tree())}),
    "restore_args of metadata": args_of_metadata,
    "restore_type NumPy": restored(
        lambda: {
            "item": tree(),
            "restore_args": jax.tree.map(
                lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree()
            ),
        }
    ),
    "restore_args, dtype": restored(
        lambda: {"item": tree(), "restore_args": arrays(dtype=jnp.float32)}
    ),
    "restore_args, columns": restored(
        lambda: {
            "item": part(),
            "restore_args": {"params": {"w": ocp.ArrayRestoreArgs(sharding=COLUMNS)}},
            "partial_restore": True,
        }
    ),
    "restore_args, mesh": restored(
        lambda: {
            "item": part(),
            "restore_args": {
                "params": {"w": ocp.ArrayRestoreArgs(mesh=MESH, mesh_axes=PartitionSpec("x"))}
            },
            "partial_restore": True,
        }
    ),
    "restore_args, global_shape": restored(
        lambda: {
            "item": part(),
            "restore_args": {
                "params": {"w": ocp.ArrayRestoreArgs(sharding=ROWS, global_shape=(4, 8))}
            },
            "partial_restore": True,
        }
    ),
    "partial": restored(lambda: {"item": part(), "partial_restore": True}),
    "partial, restore_args of all": restored(
        lambda: {"item": part(), "restore_args": args_of(target()), "partial_restore": True}
    ),
    "partial, unknown leaf": restored(
        lambda: {"item": {**part(), "new": jnp.ones(2)}, "partial_restore": True}
    ),
    "partial, empty": restored(lambda: {"item": {}, "partial_restore": True}),
    "partial, a list": restored(
        lambda: {"item": {"opt": [jnp.ones(3, int), np.arange(5)]}, "partial_restore": True}
    ),
}
_TARGET = (
    "PyTreeRestore of Orbax takes dtypes and shardings from restore_args only; ours, as"
    " StandardRestore, from the target, too"
)
_ROUNDS = "Orbax rounds; ours refuses a dtype that does not hold every value (cast=True)"
# The differences that are meant: docs/how-to/orbax.md.
EXPECTED: dict[str, str] = {
    "Standard: placeholder": "StandardRestore of Orbax has no placeholders",
    "Standard: dtype, narrower": _ROUNDS,
    "PyTree: target, columns": _TARGET,
    "PyTree: target, replicated": _TARGET,
    "PyTree: target, one device": _TARGET,
    "PyTree: dtype, wider": _TARGET,
    "PyTree: dtype, narrower": _TARGET,
    "PyTree: another shape": "Orbax ignores the shape of the target; ours refuses another one",
    "PyTree: restore_args, dtype": _ROUNDS,
    "PyTree: partial, unknown leaf": "Orbax returns the target's value; ours refuses the leaf",
    "PyTree: partial, empty": "Orbax fails; ours restores nothing",
    "PyTree: partial, a list": _TARGET,
}


def described(value: Any) -> Any:
    """Return what two restores must have in common, as text by path."""

    def leaf_text(leaf: Any) -> str:
        kind = type(leaf)
        if isinstance(leaf, jax.Array):
            place = leaf.sharding
            shown = place.spec if isinstance(place, NamedSharding) else place.device_set
            return f"jax {leaf.dtype}{list(leaf.shape)} {shown} {np.asarray(leaf).tolist()}"
        if isinstance(leaf, np.ndarray):
            return f"numpy {leaf.dtype}{list(leaf.shape)} {leaf.tolist()}"
        for base in (ocp.metadata.ArrayMetadata, ocp.metadata.ScalarMetadata):
            if isinstance(leaf, base):
                sharding = leaf.sharding and leaf.sharding.to_jax_sharding()
                name = "Scalar" if isinstance(leaf, ocp.metadata.ScalarMetadata) else "Array"
                return f"{name} {leaf.shape} {np.dtype(leaf.dtype)} {sharding}"
        return f"{kind.__name__} {leaf!r}"

    flat, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda leaf: leaf is ...)
    return {jax.tree_util.keystr(path): leaf_text(leaf) for path, leaf in flat}


def run(case: Case, folder: Path, handler: Any, is_ours: bool) -> Any:
    save, restore = handler
    kind = ocp.PyTreeCheckpointHandler if handler is PYTREE else ocp.StandardCheckpointHandler
    stock = partial(ocp.CheckpointManager, item_handlers=kind())
    open_manager = manager(folder) if is_ours else stock(folder)
    with contextlib.closing(open_manager) as mngr:
        mngr.save(0, args=save(tree()))
        mngr.wait_until_finished()
        try:
            return described(case(mngr, restore))
        except Exception as error:  # noqa: BLE001 - both sides must raise one
            return f"an error ({type(error).__name__}: {' '.join(str(error).split())[:160]})"


def differences(name: str, orbax: Any, ours: Any) -> list[str]:
    if isinstance(orbax, str) or isinstance(ours, str):
        if isinstance(orbax, str) and isinstance(ours, str):
            return []
        return [f"Orbax: {str(orbax)[:300]}\n    ours:  {str(ours)[:300]}"]
    return [
        f"{path}\n    Orbax: {orbax.get(path, 'nothing')}\n    ours:  {ours.get(path, 'nothing')}"
        for path in sorted(orbax.keys() | ours.keys())
        if orbax.get(path) != ours.get(path)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    only = parser.parse_args().case
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    absl.logging.set_verbosity("fatal")
    failed = equal = documented = 0
    for kind, handler, cases in (
        ("Standard", STANDARD, BOTH),
        ("PyTree", PYTREE, BOTH | ONLY_PYTREE),
    ):
        for title, case in cases.items():
            name = f"{kind}: {title}"
            if only not in name:
                continue
            with tempfile.TemporaryDirectory(prefix="deltacheck-judge-") as folder:
                results = [
                    run(case, Path(folder, side), handler, side == "ours")
                    for side in ("orbax", "ours")
                ]
            found = differences(name, *results)
            is_expected = name in EXPECTED
            if not found and not is_expected:
                equal += 1
            elif found and is_expected:
                documented += 1
                print(f"{name}: as documented: {EXPECTED[name]}")
            else:
                failed += 1
                print(f"{name}: " + ("\n  ".join(found) or "no difference any more"))
    print(f"{equal} cases equal, {documented} differ as documented, {failed} otherwise")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
