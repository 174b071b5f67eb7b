"""Define the jobs of the torch ranks: a model in several layouts, its training and its saves."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import deltacheck
from deltacheck import Keep, Policy, SaveOptions, StopSignals
from deltacheck.backends.torch import Engine, Shard
from deltacheck.errors import LeafPruned, SaveFailed
from deltacheck.restore import read
from deltacheck.restore.content import chunk_bytes
from tests.support.waiting import wait_until

WIDTH = 517  # of the hidden layers: no number of ranks divides it


@contextmanager
def world(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def model(layout: str, size: int) -> torch.nn.Module:
    """The same weights in every layout: ``plain`` (each rank has all), ``fsdp``, ``tp_fsdp`` (2 x
    size / 2).
    """
    torch.manual_seed(0)
    width = WIDTH + 3 if "tp" in layout else WIDTH
    made = torch.nn.Sequential(
        torch.nn.Linear(67, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 5),
    )
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
    elif layout == "tp_fsdp":
        grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
        parallelize_module(made, grid["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = grid["data"]
    if layout != "plain":
        for layer in (0, 2, 4):
            fully_shard(made[layer], mesh=mesh)
        fully_shard(made, mesh=mesh)
    return made


class Run:
    """A training whose gradients depend on the step alone, so that every layout goes the same
    way.
    """

    def __init__(self, layout: str, size: int) -> None:
        self.model = model(layout, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def update(self, number: int) -> None:
        for position, parameter in enumerate(self.model.parameters()):
            generator = torch.Generator().manual_seed(1000 * number + position)
            whole = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                parameter.grad = distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            else:
                parameter.grad = whole
        self.optimizer.step()

    def state(self, step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": step}


def whole(tree: Any) -> dict[str, np.ndarray]:
    """Every array of a state, put together, by its path."""
    found = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{path}/{key}" if path else str(key))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                visit(item, f"{path}/{number}")
        elif isinstance(value, torch.Tensor):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[path] = value.detach().numpy().copy()
        elif isinstance(value, np.ndarray):
            found[path] = value

    visit(tree, "")
    return found


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    """The paths at which two states differ in a bit."""
    return sorted(one.keys() ^ other.keys()) + [
        p for p in sorted(one.keys() & other.keys()) if one[p].tobytes() != other[p].tobytes()
    ]


def reads(counted: list[int]) -> None:
    """Count from now on the bytes of the chunks that restores read."""
    load = read.read_chunks

    def counting(chains: Any, chunks: Any) -> Any:
        counted.append(sum(chunk_bytes(chains[path].spec, chunks[path]) for path in chains))
        return load(chains, chunks)

    read.read_chunks = counting


def save(rank: int, size: int, port: int, root: Path, layout: str, steps: int) -> Any:
    """Train and save; the state of the last step, put together, and the reports of each save on
    this rank.
    """
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        run = Run(layout, size)
        reports = []
        for step in range(steps):
            run.update(step)
            handle = engine.save(step, run.state(step), metrics={"loss": 1.0 / (step + 1)})
            handle.wait("committed")
            reports.append(handle.report)
        return whole(run.state(steps - 1)), reports


def resume(rank: int, size: int, port: int, root: Path, layout: str, step: int) -> Any:
    """Restore a step into another training, save it again, then one step later: its content, what
    was read, the reports.
    """
    counted: list[int] = []
    reads(counted)
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        run = Run(layout, size)
        run.update(99)
        target = run.state(0)
        restored = engine.restore(step, into=target)
        read = sum(counted)
        held = sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in _tensors(target))
        content = whole(restored)
        again = engine.save(100, restored)
        again.wait("committed")
        run.optimizer.zero_grad()
        run.update(100)
        later = engine.save(101, run.state(101))
        later.wait("committed")
        return (
            content,
            read,
            held,
            [again.report, later.report],
            whole(run.state(101)),
            engine.restored_step,
        )


def large(rank: int, size: int, port: int, root: Path, first: bool) -> Any:
    """Save a leaf of 80 MB, or restore it: what was read, what this rank holds, and whether it is
    right.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    counted: list[int] = []
    reads(counted)
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        mesh = init_device_mesh("cpu", (size,))
        content = torch.arange(20_001 * 1024, dtype=torch.float32).reshape(20_001, 1024)
        if first:
            engine.save(0, {"w": distribute_tensor(content, mesh, [Shard(0)])}).wait("committed")
            return None
        target = {"w": distribute_tensor(torch.zeros_like(content), mesh, [Shard(0)])}
        engine.restore(into=target)
        own = distribute_tensor(content, mesh, [Shard(0)]).to_local()
        return sum(counted), own.nbytes, torch.equal(target["w"].to_local(), own)


def by_law(rank: int, size: int, port: int, root: Path, first: int, steps: int) -> Any:
    """Go on from the step before ``first``, if there is one, and save each step by Adam's law.

    Returns:
        The content that was restored, ``None`` for a new run, and that of each step.
    """
    policy = Policy.exact(law=True)
    with world(rank, size) as group, Engine(root, policy=policy, process_group=group) as engine:
        run, restored = Run("fsdp", size), None
        if first:
            run.update(99)  # the optimizer has a state to fill
            state = engine.restore(into=run.state(0))
            assert engine.restored_step == first - 1
            restored = whole(state)
            set_state_dict(
                run.model,
                run.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        contents = {}
        for step in range(first, first + steps):
            run.update(step)
            engine.save(step, run.state(step)).wait("committed")
            contents[step] = whole(run.state(step))
        return restored, contents


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, Mapping):
        return [tensor for item in tree.values() for tensor in _tensors(item)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def fail(rank: int, size: int, port: int, root: Path, where: str) -> Any:
    """Save twice; in the second save rank 1 fails. What each rank was told, after how long, and
    whether a third save works.
    """
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        run = Run("fsdp", size)
        run.update(0)
        engine.save(0, run.state(0)).wait("committed")
        run.update(1)
        state = run.state(1)
        if rank == 1:
            break_it(engine, where, state)
        told = ""
        try:
            engine.save(1, state).wait("committed")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            told = f"{type(error).__name__}: {error}"
        with_second = engine.steps()
        with suppress(SaveFailed):
            engine.wait()
        run.update(2)
        handle = engine.save(2, run.state(2))
        handle.wait("committed")
        return told, with_second, whole(run.state(2)), handle.report


def fail_then_restore(rank: int, size: int, port: int, root: Path) -> Any:
    """A save fails; rank 0 looks at it, rank 1 does not, and both restore: what each is told, and
    whether the next restore works.
    """
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        run = Run("fsdp", size)
        run.update(0)
        engine.save(0, run.state(0)).wait("committed")
        if rank == 1:
            break_it(engine, "durable", {})
        run.update(1)
        handle = engine.save(1, run.state(1))
        wait_until(handle.done)
        told = []
        if rank == 0:
            with suppress(SaveFailed):
                engine.wait()
        dist.barrier()
        for _ in range(2):
            try:
                engine.restore(into=run.state(0))
                told.append("")
            except Exception as error:  # noqa: BLE001 - the test looks at it
                told.append(f"{type(error).__name__}: {error}")
        return told


def tolerate(rank: int, size: int, port: int, root: Path, places: list[str]) -> Any:
    """With ``on_error="log"``, rank 1 fails in every second save, then in several in a row.

    Return the state of each handle, the reports of the saves that worked, the error after too many
    failures, and whether the last step restores.
    """
    with (
        world(rank, size) as group,
        Engine(
            root, process_group=group, options=SaveOptions(on_error="log", max_failures=2)
        ) as engine,
    ):
        run = Run("fsdp", size)
        states, reports = [], []

        def save(step: int, broken: str = "") -> None:
            run.update(step)
            if broken and rank == 1:
                break_it(engine, broken, {})
            handle = engine.save(step, run.state(step))
            engine.wait()
            states.append(handle.state)
            if handle.report is not None:
                kinds = {str(leaf.kind) for leaf in handle.report.leaves if leaf.raw_bytes}
                reports.append((step, handle.report.failed_saves, kinds))

        save(0)
        for number, broken in enumerate(places):
            save(2 * number + 1, broken)
            save(2 * number + 2)
        raised = ""
        save(20, places[0])
        try:
            save(21, places[1])
        except SaveFailed as error:
            raised = str(error)
        save(22)
        return states, reports, raised, engine.steps(), whole(run.state(22))


def break_it(engine: Engine, where: str, state: dict[str, Any]) -> None:
    saver = engine._saver
    if where == "describe":
        state["function"] = print
    elif where == "shape":
        state["model"]["0.weight"] = torch.zeros(3)
    elif where == "encode":
        once(saver.codec, "encode", OSError("the encoder of rank 1 broke"))
    elif where == "write":
        once(saver._setup.store, "writer", OSError("No space left on device"))
    elif where == "durable":
        from deltacheck.save.job.save_job import SaveJob

        real = SaveJob.finish_segment

        def broken(work: SaveJob) -> Any:
            SaveJob.finish_segment = real  # type: ignore[method-assign]
            raise OSError("Input/output error")

        SaveJob.finish_segment = broken  # type: ignore[method-assign]


def once(owner: Any, name: str, error: Exception) -> None:
    real = getattr(owner, name)

    def broken(*args: Any, **options: Any) -> Any:
        setattr(owner, name, real)
        raise error

    setattr(owner, name, broken)


def killed(rank: int, size: int, port: int, root: Path) -> Any:
    """Rank 1 dies between its durable part and the commit. What the others are told, and when."""
    with world(rank, size) as group:
        engine = Engine(root, process_group=group)
        run = Run("fsdp", size)
        run.update(0)
        engine.save(0, run.state(0)).wait("committed")
        run.update(1)
        if rank == 1:
            from deltacheck.save.job.save_job import SaveJob

            def die(work: SaveJob) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            SaveJob.finish_segment = die  # type: ignore[method-assign]
        told = []
        for step in (1, 2):
            try:
                engine.save(step, run.state(step)).wait("committed", timeout=240)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                told.append(f"{type(error).__name__}: {error}")
        return told


def stages(rank: int, size: int, port: int, root: Path) -> Any:
    """Pipeline parallel: each rank has other leaves, and a key of its own."""
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        state = {
            "layers": {
                str(rank): {"w": torch.full((300, 500), float(rank)), "b": torch.arange(7) + rank}
            },
            "shared": torch.arange(6_000_000, dtype=torch.float32),
            "rng": {f"rank {rank}": torch.get_rng_state() + rank},
            "step": 5,
        }
        handle = engine.save(5, state)
        handle.wait("committed")
        target = {
            "layers": {
                str(rank): {"w": torch.zeros(300, 500), "b": torch.zeros(7, dtype=torch.int64)}
            },
            "rng": {f"rank {rank}": torch.zeros_like(torch.get_rng_state())},
            "step": 0,
        }
        restored = engine.restore(into=target)
        return (
            whole(restored),
            whole(state),
            restored["step"],
            {leaf.path: leaf.raw_bytes for leaf in handle.report.leaves},
        )


def disagree(rank: int, size: int, port: int, root: Path) -> Any:
    """Numbers and shapes that differ between ranks, another step, and a rank that is asked for
    another.
    """
    told = []
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        for step, state in (
            (1, {"w": torch.zeros(4), "lr": 0.1 * rank}),
            (1, {"w": torch.zeros(4 + rank)}),
            (1 + rank, {"w": torch.zeros(4)}),
            (1, {"w": torch.full((4,), float(rank))}),
        ):
            try:
                engine.save(step, state).wait("committed")
            except Exception as error:  # noqa: BLE001 - the test looks at it
                told.append(f"{type(error).__name__}: {error}")
            else:
                told.append("")
        return told, engine.steps()


def signalled(rank: int, size: int, port: int, root: Path) -> Any:
    """Return what each of three steps tells, of which rank 1 gets a signal in the second."""
    told = []
    with (
        world(rank, size) as group,
        Engine(root, process_group=group) as engine,
        StopSignals(signal.SIGUSR1) as signals,
    ):
        for step in range(3):
            if (rank, step) == (1, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
            told.append(engine.signal_to_stop(signals))
    return told


def timed(rank: int, size: int, port: int, root: Path, saves: int) -> Any:
    """Measure the waits of rank 0 for the other ranks during a save.

    Return their number and duration, and the time that training is blocked at the beginning.
    """
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        state = {"w": torch.arange(1000.0)}
        engine.save(0, state).wait("committed")
        joint = engine._session.group.joint  # type: ignore[attr-defined]
        spent: dict[str, list[float]] = {"begin": [], "commit": [], "make": []}

        def clock(owner: Any, name: str, into: str) -> None:
            real = getattr(owner, name)

            def measured(*args: Any, **options: Any) -> Any:
                began = time.perf_counter()
                try:
                    return real(*args, **options)
                finally:
                    spent[into].append(time.perf_counter() - began)

            setattr(owner, name, measured)

        exchanges: list[int] = []
        for channel in (joint.ranks.begin, joint.ranks.end):
            gather = channel.gather
            channel.gather = lambda payload, gather=gather: (exchanges.append(1), gather(payload))[
                1
            ]
        clock(joint, "begin", "begin")
        clock(joint, "report", "commit")
        clock(engine._writer, "commit", "make")
        for step in range(1, saves + 1):
            state["w"] += 1
            dist.barrier()
            engine.save(step, state).wait("committed")
        return spent | {"exchanges": len(exchanges)}


def types(rank: int, size: int, port: int, root: Path) -> tuple[Any, ...]:
    """Save containers and tensors of other types, and restore them into a target."""
    with world(rank, size) as group, Engine(root, process_group=group) as engine:
        content = OrderedDict({f"rank {rank}": rank})
        content._metadata = {f"layer{rank}": {"version": 1}}  # type: ignore[attr-defined]
        half = torch.ones(3, dtype=torch.float32).to(torch.complex32)
        part = torch.full((2,), rank + 1, dtype=torch.uint8).view(torch.int4)
        state = {
            "own": content,
            "milestones": Counter({3: 1}),
            "size": torch.Size([2]),
            "half": half,
            "part": Shard(part, (2 * size,), (2 * rank,)),
        }
        engine.save(0, state).result(240)
        zeros = Shard(part.view(torch.uint8).mul(0).view(torch.int4), (2 * size,), (2 * rank,))
        target = dict(state, milestones=Counter(), half=torch.zeros_like(half), part=zeros)
        back = engine.restore(into=target)
        whole = engine.restore()
        return (
            (type(back["milestones"]), back["milestones"], type(back["size"])),
            (dict(back["own"]), list(back["own"]._metadata)),
            torch.equal(back["half"].view(torch.int32), half.view(torch.int32)),
            back["part"].data.view(torch.uint8).tolist(),
            whole["part"].view(torch.uint8).tolist(),
        )


def merge(rank: int, size: int, port: int, root: Path, saves: int) -> Any:
    """Save a leaf of which little changes, with short chains and the newest two steps kept.

    Return the kinds of its parts by save on this rank, and the bytes of merges that steps state.
    """
    from torch.distributed.tensor import Shard as Cut
    from torch.distributed.tensor import distribute_tensor

    from deltacheck import Policy

    kinds, merged_bytes = [], 0
    with (
        world(rank, size) as group,
        Engine(
            root,
            process_group=group,
            policy=Policy.exact(max_chain_depth=6),
            keep=Keep(last=2),
            options=SaveOptions(grace_seconds=0),
        ) as engine,
    ):
        mesh = init_device_mesh("cpu", (size,))
        content = merged_content(0)
        first = max(engine.steps(), default=0)
        if first:
            engine.restore(into={"w": distribute_tensor(content, mesh, [Cut(0)])})
        for step in range(first + 1, first + saves + 1):
            state = {"w": distribute_tensor(merged_content(step), mesh, [Cut(0)])}
            report = engine.save(step, state).result(240)
            assert report is not None
            kinds.append({str(leaf.kind) for leaf in report.leaves})
            merged_bytes += deltacheck.open(root).manifest(step).merged_bytes
            # The merge that was planned with the save is taken by the next one.
            compactor = engine._saver.chains.compactor
            assert compactor is not None
            compactor.wait()
            dist.barrier()
    return kinds, merged_bytes


def merged_content(step: int) -> torch.Tensor:
    """Return the content of the leaf of ``merge`` at a step."""
    content = torch.arange(400_000, dtype=torch.float32).reshape(400, 1000)
    for number in range(1, step + 1):
        content.view(-1)[number * 37 :: 1009] += 1.0
    return content


def history(rank: int, size: int, port: int, root: Path, saves: int) -> Any:
    """Train under FSDP2 from the newest step on, and keep the optimizer of the newest steps.

    Return the content of each step that was saved, the bytes that this rank wrote, and what a
    restore of an old step says.
    """
    from deltacheck import Policy
    from deltacheck.save import root_writer

    root_writer._STEPS_OF_REWRITE = 3
    # Short chains, so that most segments are older than those that the next save needs.
    policy = Policy.exact(max_chain_depth=3, merge_deltas=False)
    options = SaveOptions(grace_seconds=0)
    contents, written = {}, 0
    with (
        world(rank, size) as group,
        Engine(
            root, process_group=group, policy=policy, keep=Keep(full_last=2), options=options
        ) as engine,
    ):
        run = Run("fsdp", size)
        run.update(99)
        first = max(engine.steps(), default=-1) + 1
        if first:
            state = engine.restore(into=run.state(0))
            set_state_dict(
                run.model,
                run.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        for step in range(first, first + saves):
            run.update(step)
            contents[step] = whole(run.state(step))
            report = engine.save(step, run.state(step)).result()
            assert report is not None
            written += report.stored_bytes
            if step == 4:
                engine.tag(4, "good")
        error = ""
        try:
            engine.restore(1, into=run.state(0))
        except LeafPruned as refused:
            error = str(refused)
    return contents, written, error
