"""Write to tensors while they are saved, and count steps that mix moments or do not restore.

``python -m tests.suites.torn --runs 200`` makes 200 saves against each kind of writer, under load.
All values of a state are one number, so that a restored step shows by itself whether it is of one
moment. A save may fail with ``SnapshotTorn``, but a committed step must restore, unmixed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.errors import DeltacheckError, SnapshotTorn

_LEAVES, _SIZE = 6, 60_000


@dataclass
class Outcome:
    """The saves of one kind.

    Attributes:
        steps: Committed steps.
        mixed: Steps whose leaves are of different moments, or not of the moment of the save.
        broken: Steps that do not restore.
        torn: Saves that failed with ``SnapshotTorn``.
    """

    steps: int = 0
    mixed: int = 0
    broken: int = 0
    torn: int = 0


def judge(
    root: Path,
    outcome: Outcome,
    wrong_leaves: Callable[[int, dict[str, Any]], list[str]] = lambda step, state: [],
) -> Outcome:
    """Restore every step of a root and count what is wrong with it.

    Args:
        root: The root.
        outcome: The counts to add to.
        wrong_leaves: Returns the leaves of a step and its restored state that are not of the
            moment of the save. By default, steps must be restorable only.
    """
    reader = deltacheck.open(root)
    for step in reader.steps():
        outcome.steps += 1
        try:
            state = reader.restore(step)
        except DeltacheckError as error:
            outcome.broken += 1
            print(f"step {step} does not restore: {error}", file=sys.stderr)
            continue
        wrong = wrong_leaves(step, state)
        if wrong:
            outcome.mixed += 1
            print(f"step {step} is mixed: {wrong}", file=sys.stderr)
    return outcome


# --- writers of the Engine: each sets all parameters to another value -----------------------------

Writer = Callable[[list[torch.nn.Parameter], float], None]


def by_data(parameters: list[torch.nn.Parameter], value: float) -> None:
    """torch_ema's and PEFT's way."""
    for parameter in parameters:
        parameter.data.copy_(torch.full_like(parameter, value))


def by_foreach(parameters: list[torch.nn.Parameter], value: float) -> None:
    """The way of the average of diffusers."""
    values = [torch.full_like(parameter, value) for parameter in parameters]
    torch._foreach_copy_([parameter.data for parameter in parameters], values)


def by_assignment(parameters: list[torch.nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.data = torch.full_like(parameter, value)


def by_torch(parameters: list[torch.nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(value)


def by_set(parameters: list[torch.nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.set_(torch.full_like(parameter, value))


def by_storage(parameters: list[torch.nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.untyped_storage().copy_(torch.full_like(parameter, value).untyped_storage())


def by_numpy(parameters: list[torch.nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.detach().numpy()[:] = value


def by_dlpack(parameters: list[torch.nn.Parameter], value: float) -> None:
    for parameter in parameters:
        torch.from_dlpack(np.from_dlpack(parameter.detach())).fill_(value)


def by_thread(parameters: list[torch.nn.Parameter], value: float) -> None:
    thread = threading.Thread(target=by_numpy, args=(parameters, value))
    thread.start()
    thread.join()


def by_compiled_code(parameters: list[torch.nn.Parameter], value: float) -> None:
    _compiled_fill(parameters, torch.tensor(value))


@torch.compile(backend="eager", fullgraph=True)
def _compiled_fill(parameters: list[torch.nn.Parameter], value: torch.Tensor) -> None:
    for parameter in parameters:
        parameter.data.copy_(value)


WRITERS: dict[str, Writer] = {
    writer.__name__: writer
    for writer in (
        by_data,
        by_foreach,
        by_assignment,
        by_torch,
        by_set,
        by_storage,
        by_numpy,
        by_dlpack,
        by_thread,
        by_compiled_code,
    )
}


def engine_run(root: Path, saves: int, writer: Writer, options: dict[str, Any]) -> Outcome:
    """Train, save, and let the writer swap values in and out before the next step."""
    parameters = [torch.nn.Parameter(torch.zeros(_SIZE)) for _ in range(_LEAVES)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    outcome, expected = Outcome(), {}
    with Engine(root, options=SaveOptions(durability="process", **options)) as engine:
        engine.guard(optimizer)
        for step in range(saves):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            value = expected[step] = float(parameters[0][0].item())
            handle = engine.save(step, {f"w{n}": p for n, p in enumerate(parameters)})
            writer(parameters, value + 1000)
            writer(parameters, value)
            outcome.torn += _settled(handle, engine)

    def wrong_leaves(step: int, state: dict[str, Any]) -> list[str]:
        return [
            name for name, value in state.items() if not np.all(np.asarray(value) == expected[step])
        ]

    return judge(root, outcome, wrong_leaves)


@dataclass
class Scenario:
    """A training whose ``write`` changes weights between a save and the next step.

    Attributes:
        step: Train one step.
        state: Return what is saved.
        write: Write to the state, in the way of a framework.
        guarded: Return the optimizer and modules that the engine is told of, at every save.
        group: The process group of the engine.
    """

    step: Callable[[], object]
    state: Callable[[], dict[str, Any]]
    write: Callable[[], object]
    guarded: Callable[[], list[Any]]
    group: Any = None


def scenario_run(root: Path, saves: int, make: Callable[[], Any]) -> Outcome:
    """Train and save; every step must hold the bits that the state had when it was saved."""
    outcome, saved = Outcome(), {}
    with (
        make() as scenario,
        Engine(
            root, process_group=scenario.group, options=SaveOptions(durability="process")
        ) as engine,
    ):
        for step in range(saves):
            scenario.step()
            for owner in scenario.guarded():
                engine.guard(owner)
            saved[step] = {name: _bits(value) for name, value in scenario.state().items()}
            handle = engine.save(step, scenario.state())
            # Until the capture has ended, so that a write that does not wait for it meets it.
            scenario.write()
            while handle.state == "started":
                scenario.write()
            outcome.torn += _settled(handle, engine)

    def wrong_leaves(step: int, state: dict[str, Any]) -> list[str]:
        different = [
            name
            for name in state.keys() & saved[step].keys()
            if not np.array_equal(state[name], saved[step][name])
        ]
        return [*different, *(state.keys() ^ saved[step].keys())]

    return judge(root, outcome, wrong_leaves)


def _bits(value: torch.Tensor) -> np.ndarray:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.detach().numpy().copy()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))


def _trainer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        module(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()

    return step


def _swap(parameters: Any, others: Any) -> None:
    """Exchange weights for others, in the way of torch_ema and diffusers."""
    for parameter, other in zip(parameters, others, strict=True):
        kept = parameter.data.clone()
        parameter.data.copy_(other.data)
        other.data.copy_(kept)


@contextlib.contextmanager
def swa_utils() -> Iterator[Scenario]:
    """Update an ``AveragedModel``, swap it in and out."""
    model = _model()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def write() -> None:
        average.update_parameters(model)
        for _ in range(2):
            _swap(model.parameters(), average.module.parameters())

    yield Scenario(
        _trainer(model, optimizer),
        lambda: {
            f"{name}.{leaf}": tensor
            for name, module in (("model", model), ("average", average))
            for leaf, tensor in module.state_dict().items()
        },
        write,
        lambda: [optimizer, model],
    )


@contextlib.contextmanager
def compiled_module() -> Iterator[Scenario]:
    """Train compiled code, and swap the weights of the compiled module."""
    module: Any = torch.compile(_model(), backend="aot_eager")
    others = [torch.randn_like(parameter) for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

    def write() -> None:
        for _ in range(2):
            _swap(module.parameters(), others)

    yield Scenario(_trainer(module, optimizer), module.state_dict, write, lambda: [optimizer])


@contextlib.contextmanager
def lora(merge: Callable[[Any], Any]) -> Iterator[Scenario]:
    """Train an adapter of PEFT and merge it into its base.

    Args:
        merge: Merges the adapter of a model of PEFT, and returns the model without it if that is no
            longer usable. A new adapter is then made.
    """
    import peft

    config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(_model(), config)
    optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.01)

    def write() -> None:
        nonlocal adapted, optimizer
        base = merge(adapted)
        if base is not None:
            adapted = peft.get_peft_model(base, config)
            optimizer = torch.optim.AdamW(adapted.parameters(), lr=0.01)

    yield Scenario(
        lambda: _trainer(adapted, optimizer)(),
        lambda: adapted.state_dict(),
        write,
        lambda: [optimizer, adapted],
    )


def merged_and_unmerged(adapted: Any) -> None:
    adapted.merge_adapter()
    adapted.unmerge_adapter()


def merged_and_unloaded(adapted: Any) -> Any:
    return adapted.merge_and_unload()


@contextlib.contextmanager
def fsdp2() -> Iterator[Scenario]:
    """Swap the weights of a module of ``fully_shard``, which are DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        module = _model()
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        others = [torch.randn_like(parameter) for parameter in module.parameters()]

        def write() -> None:
            for _ in range(2):
                _swap(module.parameters(), others)

        yield Scenario(
            _trainer(module, optimizer),
            module.state_dict,
            write,
            lambda: [optimizer],
            torch.distributed.group.WORLD,
        )
    finally:
        torch.distributed.destroy_process_group()


def thread_run(root: Path, saves: int, options: dict[str, Any]) -> Outcome:
    """Save while threads write all the time: nothing can be one moment, but all must restore."""
    parameters = [torch.nn.Parameter(torch.randn(8 * _SIZE)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters)
    stop, outcome = threading.Event(), Outcome()

    def write(seed: int) -> None:
        random = np.random.default_rng(seed)
        arrays = [parameter.detach().numpy() for parameter in parameters]
        while not stop.is_set():
            array = arrays[int(random.integers(len(arrays)))]
            start = int(random.integers(array.size - 64))
            array[start : start + 64] += 1

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    with Engine(root, options=SaveOptions(durability="process", **options)) as engine:
        engine.guard(optimizer)
        for thread in threads:
            thread.start()
        try:
            for step in range(saves):
                handle = engine.save(step, {"w0": parameters[0], "w1": parameters[1]})
                outcome.torn += _settled(handle, engine)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return judge(root, outcome)


def _settled(handle: Any, engine: Engine) -> int:
    """Wait for a save; return 1 if it was torn."""
    error = handle.exception(240)
    if error is None:
        return 0
    if not isinstance(error, SnapshotTorn):
        raise error
    # The next call of the engine would raise it.
    with contextlib.suppress(SnapshotTorn):
        engine.wait()
    return 1


# --- frameworks -----------------------------------------------------------------------------------


def lightning_run(root: Path, saves: int, lightning: Any, kind: str) -> Outcome:
    """Train with one of Lightning's own averages; every checkpoint must hold the live weights.

    Args:
        root: The folder of the run.
        saves: The number of checkpoints.
        lightning: The module ``lightning.pytorch``.
        kind: The class of the callback.
    """
    from deltacheck.backends.torch.lightning import DeltaCheckIO

    saved: dict[int, dict[str, torch.Tensor]] = {}

    class Recorded(DeltaCheckIO):
        """Remembers what Lightning handed over."""

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            saved[int(checkpoint["global_step"])] = {
                f"{part}/{name}": tensor.clone()
                for part in ("state_dict", "current_model_state")
                for name, tensor in checkpoint[part].items()
            }
            super().save_checkpoint(checkpoint, path, storage_options)

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any) -> None:
            self.layer(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(4 * saves, 256)), batch_size=2
    )
    callbacks = lightning.callbacks
    average = (
        callbacks.EMAWeightAveraging() if kind.startswith("EMA") else callbacks.WeightAveraging()
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=root,
        val_check_interval=2,
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[Recorded(root / "steps", options=SaveOptions(durability="process"))],
        callbacks=[
            average,
            callbacks.ModelCheckpoint(dirpath=root / "files", every_n_train_steps=2, save_top_k=-1),
        ],
    )
    trainer.fit(Model(), data, data)
    outcome = judge(root / "steps", Outcome())
    reader = deltacheck.open(root / "steps")
    for step in reader.steps():
        state = reader.restore(step)
        for name, tensor in saved[step].items():
            part, _, leaf = name.partition("/")
            if not np.array_equal(state[part][leaf], tensor.numpy()):
                outcome.mixed += 1
                break
    return outcome


def jax_run(root: Path, saves: int) -> Outcome:
    """Overwrite a host array that a JAX array shares, donate one and delete one."""
    import jax

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    memory = np.zeros(4 * _SIZE + 64, np.uint8)
    host = memory[-memory.ctypes.data % 64 :][: 4 * _SIZE].view(np.float32)
    outcome, expected = Outcome(), {}
    double = jax.jit(lambda array: array * 2, donate_argnums=0)
    with manager(root, save_options=SaveOptions(durability="process")) as saver:
        for step in range(saves):
            host[:] = expected[step] = step + 1.0
            shared = jax.device_put(host, may_alias=True)
            donated, deleted = (jax.numpy.full(_SIZE, step + 1.0) for _ in range(2))
            try:
                saver.save(
                    step,
                    args=DeltaSaveArgs({"shared": shared, "donated": donated, "deleted": deleted}),
                )
                double(donated).block_until_ready()
                deleted.delete()
                host[:] = -1
                saver.wait_until_finished()
            except SnapshotTorn:
                outcome.torn += 1
        steps = saver.all_steps()
        for step in steps:
            outcome.steps += 1
            try:
                state = saver.restore(step)
            except DeltacheckError:
                outcome.broken += 1
                continue
            outcome.mixed += any(
                not np.all(np.asarray(v) == expected[step]) for v in state.values()
            )
    return outcome


# --- the program ----------------------------------------------------------------------------------


Run = Callable[[Path, int], Outcome]


def kinds() -> Iterator[tuple[str, Run]]:
    """Yield each kind of writer, and a function of a folder and a number of saves."""
    for name, writer in WRITERS.items():
        yield name, partial(engine_run, writer=writer, options={})
    for name in ("by_data", "by_numpy"):
        options = {"shadow": "none"}
        yield f"{name}, no shadow", partial(engine_run, writer=WRITERS[name], options=options)
    for make in (swa_utils, compiled_module, fsdp2):
        yield make.__name__, partial(scenario_run, make=make)
    with contextlib.suppress(ImportError):
        import peft  # noqa: F401

        for merge in (merged_and_unmerged, merged_and_unloaded):
            make_lora = partial(lora, merge)
            yield f"PEFT, {merge.__name__}", partial(scenario_run, make=make_lora)
    yield "threads all the time", partial(thread_run, options={})
    yield "threads, eager", partial(thread_run, options={"capture": "eager"})
    options = {"capture": "eager", "verify": "commit"}
    yield "threads, receipts", partial(thread_run, options=options)
    with contextlib.suppress(ImportError):
        import lightning.pytorch as lightning

        for name in ("EMAWeightAveraging", "WeightAveraging"):
            yield name, partial(lightning_run, lightning=lightning, kind=name)
    with contextlib.suppress(ImportError):
        import jax  # noqa: F401

        yield "JAX arrays", jax_run


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Keep ``count`` processors busy, so that captures and writes interleave in other ways."""
    # Processes, because threads would also compete for the interpreter.
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Run all kinds and print a table; return 1 if a step was mixed or did not restore."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="saves of each kind")
    parser.add_argument(
        "--busy", type=int, default=os.cpu_count(), help="processes that keep processors busy"
    )
    parser.add_argument("--kind", help="only kinds whose name contains this")
    arguments = parser.parse_args()
    failed = False
    logging.disable(logging.CRITICAL)  # torn saves are expected
    print(f"{'kind':<28}{'runs':>6}{'steps':>8}{'torn':>8}{'mixed':>8}{'broken':>8}{'time':>8}")
    for name, run in kinds():
        if arguments.kind and arguments.kind not in name:
            continue
        begin = time.perf_counter()
        with load(arguments.busy), tempfile.TemporaryDirectory(prefix="deltacheck-torn-") as folder:
            total = run(Path(folder) / "root", arguments.runs)
        failed |= bool(total.mixed or total.broken)
        print(
            f"{name:<28}{arguments.runs:>6}{total.steps:>8}{total.torn:>8}{total.mixed:>8}"
            f"{total.broken:>8}{time.perf_counter() - begin:>6.0f} s",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
