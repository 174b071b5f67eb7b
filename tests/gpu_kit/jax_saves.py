"""Part 4: saves of JAX arrays on the device."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.prepared import SIZES, Size
from benchmarks.record import Cell, Figure, Result, Table
from benchmarks.rivals import AUTO, BLOCKING_SECONDS, EXACT, RIVALS
from deltacheck import SaveOptions
from tests.gpu_kit.device_checks import require_equal, run_tests
from tests.gpu_kit.steps import Context, Step
from tests.gpu_kit.torch_saves import measure, summarize

_ORBAX = "Orbax CheckpointManager async"
_SIZE = Size(1024, 11, 8, 1e-3, 8, 200)
_SAVES = 5
# Of a blocking measurement: the first save writes whole leaves, the second creates the pools.
_TIMED_SAVES, _WARMUP_SAVES = 4, 2
_LEAVES = 100  # each a bfloat16 weight and a float32 moment


def check_handlers(context: Context) -> Result:
    """Compare the handlers with the host encoder, and make sure that saves use them."""
    import jax

    from deltacheck.backends.orbax.capture import ffi
    from deltacheck.codec import default_codec
    from tests.contracts.codec import moved, same, words

    device = jax.devices("cpu" if context.rehearse else "gpu")[0]
    codec = ffi.FfiCodec()
    if not codec.takes(device):
        raise RuntimeError(f"there are no handlers for {device}, so saves would use the host")
    for density in (0.001, 0.02, 0.3, 1.0):
        before = words(300_000, 4)
        after = moved(before, density, most=3)
        bounds = np.array([0, 100_000, 300_000], np.uint64)
        now, base = (
            jax.device_put(array.view(np.uint8).copy(), device) for array in (after, before)
        )
        encoded, shadow = codec.encode(now, base, bounds, 4)
        expected, _ = default_codec().encode(
            after.view(np.uint8), before.view(np.uint8).copy(), bounds, 4
        )
        assert same(encoded, expected), f"{density:.1%} changed: other rows or streams"
        assert np.array_equal(np.asarray(shadow), after.view(np.uint8)), "another shadow"
    return Result("the XLA handlers", f"on {device.device_kind}, equal to the host's bits", [])


def run_handler_tests(context: Context) -> Result:
    """Run the tests of the handlers."""
    return run_tests(context, "backends/orbax/test_codec_ffi_device.py")


def save_donated(context: Context) -> Result:
    """Donate the arrays to the next step right after each save, and restore every save."""
    import jax
    import jax.numpy as jnp

    from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

    size = 1 << (14 if context.rehearse else 26)

    @jax.jit
    def initial(key: Any) -> Any:
        return {"w": jax.random.normal(key, (size,), jnp.bfloat16), "m": jnp.zeros(size)}

    def advance(state: Any, step: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (size,))
        moment = 0.9 * state["m"] + noise
        return {"w": state["w"] + (1e-3 * moment).astype(jnp.bfloat16), "m": moment}

    donating = jax.jit(advance, donate_argnums=0)
    state = initial(jax.random.key(0))
    expected = {}
    with manager(context.folder / "donated") as saver:
        for step in range(_SAVES):
            expected[step] = jax.tree.map(lambda leaf: np.array(leaf), state)
            saver.save(step, args=DeltaSaveArgs(state))
            previous, state = state, donating(state, step)
            assert previous["w"].is_deleted() or context.rehearse, "the arrays were not donated"
        saver.wait_until_finished()
    with manager(context.folder / "donated") as saver:
        for step, arrays in expected.items():
            like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
            restored = saver.restore(step, args=DeltaRestoreArgs(like))
            require_equal(f"step {step}", arrays, restored)
    return Result("donated arrays", f"{_SAVES} saves of {6 * size >> 20} MiB, all equal", [])


def save_sharded(context: Context) -> Result:
    """Save arrays that are sharded over all devices, and restore them with their sharding."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from deltacheck.backends.orbax import DeltaRestoreArgs, DeltaSaveArgs, manager

    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = 4096 * mesh.size if not context.rehearse else 8 * mesh.size
    rules = {
        "rows": PartitionSpec("data"),
        "columns": PartitionSpec(None, "data"),
        "all": PartitionSpec(),
    }
    shardings = {name: NamedSharding(mesh, rule) for name, rule in rules.items()}
    state = {
        name: jax.device_put(
            jnp.arange(rows * rows, dtype=jnp.float32).reshape(rows, rows), sharding
        )
        for name, sharding in shardings.items()
    }
    with manager(context.folder / "sharded") as saver:
        for step in range(2):
            saver.save(step, args=DeltaSaveArgs(state))
            saver.wait_until_finished()
            expected = jax.tree.map(np.asarray, state)
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
                state,
            )
            restored = saver.restore(step, args=DeltaRestoreArgs(like))
            require_equal(f"step {step}", expected, restored)
            for name, leaf in restored.items():
                assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
            state = jax.tree.map(lambda leaf: leaf.at[0].add(1.0), state)
    return Result("sharded arrays", f"{mesh.size} devices: {', '.join(rules)}", [])


def measure_waiting(context: Context) -> Result:
    """Measure how long `save` waits while the device is still busy with a step."""
    import jax
    import jax.numpy as jnp
    from orbax import checkpoint as ocp

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    size, width, repeats = (1 << 12, 64, 4) if context.rehearse else (1 << 28, 8192, 40)

    @jax.jit
    def work(matrix: Any) -> Any:
        return jax.lax.fori_loop(0, repeats, lambda _, m: jnp.tanh(m @ m), matrix)

    matrix = jnp.ones((width, width), jnp.bfloat16) / width
    state = {"w": jnp.ones(size, jnp.bfloat16), "m": jnp.ones(size)}
    jax.block_until_ready((work(matrix), state))
    rows: list[list[Cell]] = []
    ours = manager(context.folder / "ours", save_options=SaveOptions(capture="eager"))
    auto = manager(context.folder / "auto", save_options=SaveOptions(capture="auto"))
    orbax = ocp.CheckpointManager(context.folder / "orbax")
    ways = (
        ("deltacheck, eager", ours, DeltaSaveArgs),
        ("deltacheck, auto", auto, DeltaSaveArgs),
        ("Orbax", orbax, ocp.args.StandardSave),
    )
    for name, saver, arguments in ways:
        idle, busy, steps = [], [], []
        for number in range(6):
            state = {"w": state["w"].at[:: 1 << 6].add(1.0), "m": state["m"] * 0.9}
            jax.block_until_ready(state)
            start = time.perf_counter()
            if number % 2:
                jax.block_until_ready(work(matrix))
                steps.append(time.perf_counter() - start)
                start = time.perf_counter()
            pending = work(matrix) if number % 2 else matrix
            saver.save(number, args=arguments(state))
            (busy if number % 2 else idle).append(time.perf_counter() - start)
            saver.wait_until_finished()
            jax.block_until_ready(pending)
        rows.append([name, median(idle), median(busy), median(steps)])
        saver.close()
    units: Any = {
        "way": "text",
        "save, device idle": "seconds",
        "save, device busy": "seconds",
        "of which work": "seconds",
    }
    about = (
        f"{6 * size / 1e9:.1f} GB of state. A save that waits for the work that was dispatched"
        " before it takes at least the last column longer if the device is busy"
    )
    return Result("waiting", about, [Table("time of the call", units, rows)])


def block(context: Context, gigabytes: int, way: str) -> Result:
    """Measure how long the call of a save takes, with an idle device."""
    import jax
    import jax.numpy as jnp
    from orbax import checkpoint as ocp

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    size = 64 if context.rehearse else gigabytes * 10**9 // 6 // _LEAVES

    @jax.jit
    def advance(state: Any) -> Any:
        moments = [moment * 0.9 + 1 for moment in state["moments"]]
        return {"weights": [w.at[:: 1 << 6].add(1) for w in state["weights"]], "moments": moments}

    state = {
        "weights": [jnp.full(size, number, jnp.bfloat16) for number in range(_LEAVES)],
        "moments": [jnp.full(size, number, jnp.float32) for number in range(_LEAVES)],
    }
    seconds = []
    with tempfile.TemporaryDirectory(
        prefix="way-", dir=context.fast_folder(4 * gigabytes * 10**9)
    ) as folder:
        saver = ocp.CheckpointManager(folder) if way == _ORBAX else manager(folder)
        arguments = ocp.args.StandardSave if way == _ORBAX else DeltaSaveArgs
        for number in range(_TIMED_SAVES):
            state = jax.block_until_ready(advance(state))
            start = time.perf_counter()
            saver.save(number, args=arguments(state))
            seconds.append(time.perf_counter() - start)
            saver.wait_until_finished()
        saver.close()
    blocking = median(seconds[_WARMUP_SAVES:])
    title = f"blocking of a save, JAX, {gigabytes} GB"
    rows: list[list[Cell]] = [[way, blocking, max(seconds[_WARMUP_SAVES:])]]
    units: Any = {"way": "text", "median": "seconds", "largest": "seconds"}
    figures = [Figure(title, blocking, BLOCKING_SECONDS, "seconds")] if way == EXACT else []
    about = f"{2 * _LEAVES} arrays; each save waits for the one before, and the device is idle"
    return Result(title, about, [Table("time of the call", units, rows)], figures)


def compare(context: Context) -> Result:
    """Measure saves of a real training beside Orbax."""
    size = SIZES["tiny"] if context.rehearse else _SIZE
    ways = (_ORBAX, EXACT, AUTO)
    measured = {
        kind.name: measure(context, "jax", "adamw", size, kind)
        for kind in RIVALS["jax"]
        if kind.name in ways
    }
    return summarize("JAX, adamw, 2 GB", _ORBAX, measured)


_JAX = ("jax", "orbax")


def _blocking_step(gigabytes: int, way: str, seconds: float) -> Step:
    run = partial(block, gigabytes=gigabytes, way=way)
    return Step(f"blocking, {gigabytes} GB, {way}", run, needs=_JAX, seconds=seconds)


STEPS = (
    Step("XLA handlers against the host", check_handlers, needs=_JAX, seconds=10),
    *(_blocking_step(gigabytes, EXACT, 5 + 1.5 * gigabytes) for gigabytes in (2, 8, 16)),
    _blocking_step(2, _ORBAX, 10),
    Step("donated arrays", save_donated, needs=_JAX, seconds=10),
    Step("sharded arrays", save_sharded, needs=_JAX, seconds=10),
    Step("a save while the device is busy", measure_waiting, needs=_JAX, seconds=30),
    *(_blocking_step(gigabytes, _ORBAX, 5 + 2 * gigabytes) for gigabytes in (8, 16)),
    Step(
        "saves of 2 GB beside Orbax", compare, needs=(*_JAX, "flax", "optax", "torch"), seconds=60
    ),
    Step("tests of the handlers", run_handler_tests, needs=(*_JAX, "pytest"), seconds=60),
)
