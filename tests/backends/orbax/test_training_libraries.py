"""The calls of training libraries to Orbax, on Orbax's own checkpoints and on ours.

The sequences are those of Tunix 0.1.7 (v0), of Tunix's development version (v1), and of MaxText.
"""

from __future__ import annotations

import contextlib
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=4"

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import deltacheck
from deltacheck.backends.orbax import manager, v1
from deltacheck.errors import TreeMismatch

SAVES, LAST = 3, 6
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


class Network(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(8, 64, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))
        self.adapter = nnx.LoRAParam(jnp.ones((4, 8)))


class Training:
    """A model on a mesh with an optimizer, whose updates need no compilation."""

    def __init__(self) -> None:
        self.model = Network()
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        nnx.update(
            self.model,
            jax.tree.map(
                lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))),
                nnx.state(self.model, nnx.Param),
            ),
        )
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def train(self, step: int) -> None:
        gradients = jax.tree.map(lambda x: jnp.cos(x + step), nnx.state(self.model, nnx.Param))
        self.optimizer.update(self.model, gradients)

    def state(self) -> list[Any]:
        """Return all leaves as NumPy, keys as their data, and each sharding."""
        leaves = jax.tree.leaves((nnx.state(self.model), nnx.state(self.optimizer)))
        return [
            (np.asarray(jax.random.key_data(x) if "key<" in str(x.dtype) else x), x.sharding)
            for x in leaves
        ]


def tunix_v1(root: Path, kill_at: int = 0) -> list[Any]:
    """Train and save as Tunix does: with a context of its own that knows nothing of ours."""
    ocp1, training, context = ocp.v1, Training(), ocp.v1.Context()
    context.asynchronous.timeout_secs = 1200
    checkpointer = ocp1.training.Checkpointer(
        root,
        context=context,
        save_decision_policy=ocp1.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=ocp1.training.preservation_policies.LatestN(n=SAVES),
        step_name_format=ocp1.path.step.standard_name_format(),
    )
    model, optimizer = training.model, training.optimizer
    last = 0
    if checkpointer.latest is not None:
        last = checkpointer.latest.step
        metadata = checkpointer.checkpointables_metadata(last)
        assert metadata.custom_metadata == {"step": last}
        assert "optimizer_state" in metadata.metadata
        lora = ocp1.Context(context)
        lora.pytree.loading.partial_load = True
        with lora:
            target = {"model_params": nnx.state(model, nnx.LoRAParam)}
            part = checkpointer.load_checkpointables(last, target)["model_params"]
        assert [*part] == ["adapter"]
        with context:
            restored = checkpointer.load_checkpointables(
                last,
                {
                    "model_params": nnx.state(model),
                    "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
                },
            )
        nnx.update(optimizer, restored["optimizer_state"])
        nnx.update(model, restored["model_params"])
    for step in range(last + 1, LAST + 1):
        training.train(step)
        response = checkpointer.save_checkpointables_async(
            step,
            {
                "model_params": nnx.state(model),
                "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
            },
            force=True,
            custom_metadata={"step": step},
        )
        assert response is not None
        if step == kill_at:
            os._exit(9)
    checkpointer.close()
    return training.state()


def tunix_v0(checkpoints: Any, kill_at: int = 0) -> list[Any]:
    """Train and save as Tunix 0.1.7 does, with the manager that it was given."""
    training, last = Training(), checkpoints.latest_step() or 0
    model, optimizer = training.model, training.optimizer
    if last:
        assert "optimizer_state" in checkpoints.metadata(last).item_metadata
        assert checkpoints.metadata(last).custom_metadata == {"step": last}
        targets = {
            "model_params": nnx.state(model),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        args = {
            name: ocp.args.PyTreeRestore(
                target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
            )
            for name, target in targets.items()
        }
        restored = checkpoints.restore(last, args=ocp.args.Composite(**args))
        nnx.update(optimizer, restored.optimizer_state)
        nnx.update(model, restored.model_params)
    for step in range(last + 1, LAST + 1):
        training.train(step)
        states = {
            "model_params": nnx.state(model),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        args = {
            name: ocp.args.PyTreeSave(
                state, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), state)
            )
            for name, state in states.items()
        }
        assert checkpoints.save(
            step, args=ocp.args.Composite(**args), custom_metadata={"step": step}, force=True
        )
        if step == kill_at:
            os._exit(9)
    checkpoints.close()
    return training.state()


def maxtext(checkpoints: Any, kill_at: int = 0) -> list[Any]:
    """Train and save as MaxText does: a ``TrainState``, and the data in an item of its own."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.sgd(0.1, momentum=0.9)
    params = {"params": {"w": jnp.linspace(0, 1, 256).reshape(16, 16), "b": jnp.zeros(3)}}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    places = jax.tree.map(
        lambda x: NamedSharding(
            mesh,
            PartitionSpec("fsdp" if jnp.ndim(x) == 2 else None) if jnp.ndim(x) else PartitionSpec(),
        ),
        state,
    )
    state = jax.device_put(state, places)
    batches = 0
    if checkpoints.latest_step() is not None:
        target = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
        )
        args = ocp.args.PyTreeRestore(
            item=target,
            restore_args=jax.tree.map(
                lambda x: ocp.type_handlers.ArrayRestoreArgs(sharding=x.sharding), target
            ),
            partial_restore=True,
        )
        restored = checkpoints.restore(
            checkpoints.latest_step(),
            args=ocp.args.Composite(items=args, iter=ocp.args.JsonRestore()),
        )
        state, batches = restored["items"], restored["iter"]["batches"]
        assert batches == int(state.step)
    for step in range(batches + 1, LAST + 1):
        state = state.apply_gradients(grads=jax.tree.map(jnp.cos, state.params))
        assert step not in checkpoints.all_steps()
        args = ocp.args.PyTreeSave(
            item=state,
            save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2**31), state),
            ocdbt_target_data_file_size=2**31,
        )
        checkpoints.save(
            step,
            args=ocp.args.Composite(items=args, iter=ocp.args.JsonSave({"batches": step})),
            custom_metadata={"scan_layers": True},
        )
        assert not checkpoints.reached_preemption(step)
        if step == kill_at:
            os._exit(9)
    checkpoints.wait_until_finished()
    checkpoints.close()
    return [(np.asarray(x), x.sharding) for x in jax.tree.leaves(state)]


def _options() -> Any:
    return ocp.CheckpointManagerOptions(max_to_keep=SAVES)


# Each program with the lines that a user adds.
def of_tunix_v1(root: Path, kill_at: int = 0) -> list[Any]:
    with v1.context(root):
        return tunix_v1(root, kill_at)


def of_tunix_v0(root: Path, kill_at: int = 0) -> list[Any]:
    return tunix_v0(manager(root, _options(), items=("model_params", "optimizer_state")), kill_at)


def of_maxtext(root: Path, kill_at: int = 0) -> list[Any]:
    return maxtext(manager(root, _options(), items=("items",)), kill_at)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "on_orbax", "items"),
    [
        (of_tunix_v1, tunix_v1, ("model_params", "optimizer_state")),
        (
            of_tunix_v0,
            lambda root: tunix_v0(ocp.CheckpointManager(root, options=_options())),
            ("model_params", "optimizer_state"),
        ),
        (of_maxtext, lambda root: maxtext(ocp.CheckpointManager(root, options=_options())), ()),
    ],
)
def test_a_killed_run_of_a_library_resumes_to_what_plain_orbax_gives(
    tmp_path: Path, program: Callable[..., Any], on_orbax: Callable[[Path], Any], items: Any
) -> None:
    root, name = tmp_path / "run", program.__name__
    code = f"from {__name__} import *; {name}(Path({str(root)!r}), kill_at=4)"
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=240
    )
    assert killed.returncode == 9
    before = deltacheck.open(root, item=items[0] if items else "items").steps()
    assert before
    assert max(before) in (3, 4)
    state, expected = program(root), on_orbax(tmp_path / "orbax")
    for (values, place), (others, other_place) in zip(state, expected, strict=True):
        assert values.dtype == others.dtype
        assert values.tobytes() == others.tobytes()
        assert place == other_place
    for item in items or ("items",):
        assert deltacheck.open(root, item=item).steps() == [4, 5, 6]
        assert deltacheck.open(root, item=item).verify(deep=True) == []


@pytest.mark.parametrize("kind", ["orbax", "deltacheck"])
def test_an_iterator_of_grain_returns_to_the_place_of_its_step(tmp_path: Path, kind: str) -> None:
    grain = pytest.importorskip("grain")
    args = ocp.args
    make = ocp.CheckpointManager if kind == "orbax" else manager

    def numbers() -> Any:
        return iter(grain.MapDataset.range(100).shuffle(3).repeat().batch(4).to_iter_dataset())

    data, batches = numbers(), []
    with make(tmp_path) as checkpoints:
        for step in range(3):
            state = {"sum": jnp.asarray(sum(batches))}
            items = {
                "state": args.StandardSave(state),
                "data": grain.checkpoint.CheckpointSave(data),
            }
            checkpoints.save(step, args=args.Composite(**items))
            batches.append(int(next(data).sum()))
    data = numbers()
    with make(tmp_path) as checkpoints:
        for step in (2, 1):
            items = {
                "state": args.StandardRestore(state),
                "data": grain.checkpoint.CheckpointRestore(data),
            }
            restored = checkpoints.restore(step, args=args.Composite(**items))
            assert restored["state"]["sum"] == sum(batches[:step])
            assert int(next(restored["data"]).sum()) == batches[step]


def _saved_by_deltacheck(root: Path) -> bool:
    return (root / "deltacheck").exists()


def test_contexts_of_libraries_save_in_the_root_only_while_ours_is_open(tmp_path: Path) -> None:
    def save(path: Path) -> Any:
        with ocp.v1.Context():
            ocp.v1.save(path, {"w": jnp.arange(3)})
            return ocp.v1.load(path)["w"].tolist()

    outer, inner, plain = (tmp_path / name for name in ("outer", "inner", "plain"))
    with v1.context(outer):
        with v1.context(inner):
            assert save(inner / "0") == [0, 1, 2]
        assert save(outer / "0") == [0, 1, 2]
        with pytest.raises(ValueError, match="is no item of a step of"):
            save(plain / "0")
    assert save(plain / "0") == [0, 1, 2]
    assert [_saved_by_deltacheck(root) for root in (outer, inner, plain)] == [True, True, False]


def test_options_of_a_context_inside_apply_to_every_call(tmp_path: Path) -> None:
    saved, part = {"x": jnp.zeros(3), "y": jnp.ones(3)}, {"x": jnp.zeros(3)}

    def partial(context: Any = None) -> Any:
        new = ocp.v1.Context(context)
        new.pytree.loading.partial_load = True
        return new

    before = partial()
    with v1.context(tmp_path):
        for given, entered in ((None, partial()), (partial(), contextlib.nullcontext())):
            with entered, ocp.v1.training.Checkpointer(tmp_path, context=given) as checkpointer:
                checkpointer.save(0, saved, force=True, overwrite=True)
                for _ in range(2):
                    assert checkpointer.load(0, part).keys() == {"x"}
        with (
            ocp.v1.training.Checkpointer(tmp_path) as checkpointer,
            pytest.raises(TreeMismatch, match="leaf 'y'"),
        ):
            checkpointer.load(0, part)
    assert _saved_by_deltacheck(tmp_path)
    with v1.context(tmp_path, before), ocp.v1.training.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):
            assert checkpointer.load(0, part).keys() == {"x"}


@pytest.mark.parametrize("way", ["entered", "given"])
def test_a_context_that_was_made_before_is_refused(tmp_path: Path, way: str) -> None:
    before, root = ocp.v1.Context(), tmp_path / "root"
    tree = {"x": jnp.zeros(3)}
    with v1.context(root):
        with contextlib.ExitStack() as stack:
            if way == "entered":
                stack.enter_context(before)
            context = before if way == "given" else None
            checkpointer = stack.enter_context(ocp.v1.training.Checkpointer(root, context=context))
            with pytest.raises(ValueError, match=r"v1\.context\(.*, base\)"):
                checkpointer.save(0, tree)
            with pytest.raises(ValueError, match=r"v1\.context\(.*, base\)"), before:
                ocp.v1.save(root / "1", tree)
        with before:
            ocp.v1.save(tmp_path / "elsewhere" / "0", tree)
    assert not (root / "0").exists()
    with before:
        ocp.v1.save(root / "0", tree)


@pytest.mark.parametrize("kind", ["orbax", "deltacheck"])
def test_orbaxs_arguments_save_and_restore_as_their_documentation_says(
    tmp_path: Path, kind: str
) -> None:
    args = ocp.args
    state = {"w": jnp.arange(4.0), "host": np.arange(3), "n": 7}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    abstract = {
        "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=here),
        "host": np.zeros(3, int),
        "n": 0,
    }
    construct = ocp.checkpoint_utils.construct_restore_args
    free = jax.ShapeDtypeStruct((4,), jnp.float32)
    requests = {
        args.StandardSave: [args.StandardRestore(abstract)],
        args.PyTreeSave: [
            args.PyTreeRestore(abstract, restore_args=construct(abstract)),
            args.PyTreeRestore(restore_args=construct(abstract)),
            args.PyTreeRestore(
                {"w": free}, restore_args={"w": construct(free)}, partial_restore=True
            ),
        ],
    }
    for save_args, restores in requests.items():
        root = tmp_path / save_args.__name__
        with ocp.CheckpointManager(root) if kind == "orbax" else manager(root) as checkpoints:
            checkpoints.save(0, args=save_args(state, custom_metadata={"by": "me"}))
            checkpoints.wait_until_finished()
            restored = [checkpoints.restore(0, args=request) for request in restores]
            assert checkpoints.item_metadata(0).custom_metadata == {"by": "me"}
        for tree in restored[:2]:
            assert (tree["w"].sharding, tree["w"].tolist()) == (here, [0, 1, 2, 3])
            assert (type(tree["host"]), tree["n"]) == (np.ndarray, 7)
    assert {name: type(value) for name, value in restored[2].items()} == {"w": np.ndarray}


def test_options_of_orbaxs_arguments_that_we_do_not_support_are_refused_by_name(
    tmp_path: Path,
) -> None:
    args, state = ocp.args, {"w": jnp.arange(4.0)}
    cast = {"w": ocp.SaveArgs(dtype=jnp.bfloat16)}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with manager(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"SaveArgs\(dtype='bfloat16'\).*Cast it before"):
            checkpoints.save(0, args=args.PyTreeSave(state, save_args=cast))
        assert checkpoints.save(0, args=args.PyTreeSave(state))
        checkpoints.wait_until_finished()
        for request, name in (
            (args.PyTreeRestore(state, transforms={}), "transforms of PyTreeRestore"),
            (args.StandardRestore(state, fallback_sharding=sharding), "fallback_sharding"),
            (args.StandardRestore(state, support_layout=True), "support_layout"),
        ):
            with pytest.raises(ValueError, match=name):
                checkpoints.restore(0, args=request)
