"""Trainers publish weights through the interfaces of TRL and verl, and engines apply them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.weight_transfer import PublishedWeights, register_with_vllm
from deltacheck.errors import (
    Damaged,
    DuplicatePath,
    NotACheckpointRoot,
    RootBusy,
    StepNotFound,
    StorageTimeout,
    UnsupportedLeaf,
)
from tests.support import inference_engines
from tests.support.states import assert_same

NAMES = ("layers.0.weight", "layers.1.weight", "norm.weight", "router.weight")


def first_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(60, 50, generator=generator).to(
            torch.bfloat16 if "layers" in name else torch.float32
        )
        for name in NAMES
    }


def train(weights: dict[str, torch.Tensor], step: int) -> None:
    """Change a few elements of one tensor, and all of another."""
    weights["layers.0.weight"].view(torch.int16)[step % 60, :7] ^= 1
    weights["norm.weight"] += 1


class Server:
    """A server of vLLM with two workers of the backend ``deltacheck``, behind TRL's client."""

    def __init__(self, weights: dict[str, torch.Tensor], workers: int = 2) -> None:
        register_with_vllm()
        register_with_vllm()  # of each plug-in group of vLLM
        self.calls: list[str] = []
        self.models = [inference_engines.Model(weights) for _ in range(workers)]
        self.engines = [self.engine(model) for model in self.models]

    @staticmethod
    def engine(model: inference_engines.Model) -> inference_engines.WeightTransferEngine:
        return inference_engines.WeightTransferEngineFactory.create_engine(
            SimpleNamespace(backend="deltacheck"),
            SimpleNamespace(model_config="model config", parallel_config=None),
            torch.device("cpu"),
            model,
        )

    def wait_for_server_ready(self) -> None:
        self.calls.append("ready")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        for engine in self.engines:
            engine.finish_weight_update()

    def check(self, weights: dict[str, torch.Tensor]) -> None:
        for model in self.models:
            assert_same(model.weights(), weights)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    inference_engines.install(monkeypatch)


def test_weights_of_trl_reach_the_workers_of_vllm_as_sparse_patches(tmp_path: Path) -> None:
    weights = first_weights()
    server = Server(weights)
    transfer = PublishedWeights(tmp_path / "versions", server)
    transfer.init_weight_transfer()
    for step in range(3):
        transfer.pause()
        transfer.send_weights(iter(weights.items()))
        transfer.resume()
        server.check(weights)
        train(weights, step)
    transfer.destroy()
    # The first version is loaded as a checkpoint, and the others are patches.
    assert [model.calls for model in server.models] == [["reload", "done"]] * 2
    assert server.calls == ["ready"] + ["pause", "resume"] * 3
    sizes = [
        sum(file.stat().st_size for file in version.glob("*.safetensors"))
        for version in sorted((tmp_path / "versions").glob("weight_v*"))
    ]
    assert len(sizes) == 3
    # All of a float32 tensor of 12 kB changes, and seven elements of another one.
    assert max(sizes[1:]) < 15_000 < sizes[0]


def test_a_worker_that_starts_late_or_fails_loads_all_weights(tmp_path: Path) -> None:
    weights = first_weights()
    server = Server(weights)
    transfer = PublishedWeights(tmp_path / "versions", server)
    transfer.init_weight_transfer()
    transfer.send_weights(iter(weights.items()))
    train(weights, 1)
    late, failing = server.models
    # A loader that fails has changed a part of the model.
    failing.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        transfer.send_weights(iter(weights.items()))
    failing.fails = False
    server.models[0] = late = inference_engines.Model(weights)
    server.engines[0] = server.engine(late)
    server.engines[0].init_transfer_engine(
        server.engines[0].parse_init_info({"folder": str(tmp_path / "versions")})
    )
    server.update_weights({})  # the newest version
    server.check(weights)
    assert late.calls == ["reload", "done"]
    assert failing.calls == ["reload", "done"] * 2
    server.update_weights({"version": 2})  # that they have
    assert failing.calls == ["reload", "done"] * 2
    # NaN marks unchanged elements of a patch, so a version with new ones is loaded whole.
    weights["router.weight"][0, 0] = torch.nan
    transfer.send_weights(iter(weights.items()))
    server.check(weights)
    assert late.calls == ["reload", "done"] * 2


def test_workers_read_what_a_run_publishes_and_refuse_damage(tmp_path: Path) -> None:
    weights = first_weights()
    run, to = tmp_path / "run", tmp_path / "versions"
    server = Server(weights)
    with pytest.raises(RuntimeError, match="call init_transfer_engine first"):
        server.update_weights({"version": 1})
    with Engine(run) as engine:
        engine.save(0, {"model": weights, "optimizer": torch.ones(3)}).wait()
        with deltacheck.Publisher(run, to, encoding="compact") as publisher:
            server.init_weight_transfer_engine({"folder": str(to)})
            with pytest.raises(RuntimeError, match="no version yet"):
                server.update_weights({})
            publisher.poll()
            server.update_weights({"version": 1})
            server.check(weights)
            expected = {name: tensor.clone() for name, tensor in weights.items()}
            train(weights, 1)
            engine.save(1, {"model": weights, "optimizer": torch.ones(3)}).wait()
            publisher.poll()
            (file,) = (to / "weight_v000002").glob("*.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
            with pytest.raises(Damaged, match="Publish a full version"):
                server.update_weights({"version": 2})
            with pytest.raises(StepNotFound, match="no version 7"):
                server.update_weights({"version": 7})
            server.check(expected)
            publisher.poll(full=True)
    server.update_weights({"version": 3})
    server.check(weights)
    with pytest.raises(NotACheckpointRoot, match="no folder of published versions"):
        server.init_weight_transfer_engine({"folder": str(run)})


def test_a_set_of_weights_that_cannot_be_sent_is_no_version(tmp_path: Path) -> None:
    weights = first_weights()
    transfer = PublishedWeights(tmp_path / "versions")
    receiver = deltacheck.Receiver(tmp_path / "versions")
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(weights.items()))
    with pytest.raises(RootBusy, match="another process publishes"):
        PublishedWeights(tmp_path / "versions")
    train(weights, 0)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights.items()))
        raise RuntimeError("a collective call failed")

    with pytest.raises(RuntimeError, match="a collective call failed"):
        transfer.send_weights(failing())
    with pytest.raises(DuplicatePath, match=r"'norm.weight'"):
        transfer.send_weights(iter([("norm.weight", torch.ones(2))] * 2))
    with pytest.raises(UnsupportedLeaf, match=r"'odd'.*sparse"):
        transfer.send_weights(iter([("odd", torch.eye(2).to_sparse())]))
    assert len(list((tmp_path / "versions").glob("weight_v*"))) == 1
    transfer.send_weights(iter(weights.items()))
    # A tensor less makes a full version, because receivers would keep it.
    del weights["router.weight"]
    transfer.send_weights(iter(weights.items()))
    transfer.resume()
    transfer.destroy()
    for version in (2, 3):  # two full ones, so that the first is removed
        receiver.poll(version)
    assert receiver.tensors.keys() == weights.keys()
    with pytest.raises(NotACheckpointRoot, match="has the versions of weights of TRL"):
        deltacheck.Publisher(_run(tmp_path / "run"), tmp_path / "versions")


def _run(root: Path) -> Path:
    with Engine(root) as engine:
        engine.save(0, {"model": first_weights()}).wait()
    return root


class Verl:
    """The manager of verl's checkpoint engines, with two trainer and two rollout processes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # As verl imports its custom_backend_module.
        module = import_module("deltacheck.backends.torch.weight_transfer.verl_engine")
        self.cls = module.DeltaCheckCheckpointEngine
        new = inference_engines.CheckpointEngineRegistry.new
        options = {"folder": str(folder), "bucket_size": 1 << 20, **options}
        self.actors = [new("deltacheck", is_master=rank == 0, **options) for rank in range(2)]
        self.rollouts = [new("deltacheck", **options) for _ in range(2)]

    def update(self, weights: Any, step: int) -> list[dict[str, torch.Tensor]]:
        """Return the weights that each rollout process receives."""
        metadata = [engine.prepare() for engine in (*self.actors, *self.rollouts)]
        for engines, arguments in zip(
            (self.actors, self.rollouts), self.cls.build_topology(2, 2, metadata), strict=True
        ):
            for rank, engine in enumerate(engines):
                engine.init_process_group(**{n: values[rank] for n, values in arguments.items()})

        async def received(engine: Any) -> dict[str, torch.Tensor]:
            pairs = [pair async for pair in engine.receive_weights(global_steps=step)]
            return dict(sorted(pairs))

        async def all_of_them() -> list[Any]:
            # The rollout processes begin first, and wait.
            return await asyncio.gather(
                *map(received, self.rollouts),
                *(actor.send_weights(iter(weights.items()), step) for actor in self.actors),
            )

        results = asyncio.run(all_of_them())[:2]
        for engine in (*self.actors, *self.rollouts):
            engine.finalize()
        return results


@pytest.mark.parametrize("changed_only", [False, True])
def test_weights_of_verl_reach_its_rollout_workers(tmp_path: Path, changed_only: bool) -> None:
    weights = first_weights()
    verl = Verl(tmp_path / "versions", changed_only=changed_only)
    copies: list[dict[str, torch.Tensor]] = [{}, {}]
    for step in range(3):
        for copy, received in zip(copies, verl.update(weights, step), strict=True):
            few = changed_only and step > 0
            assert len(received) == (2 if few else len(weights))
            copy |= received
            assert_same(dict(sorted(copy.items())), weights)
        train(weights, step)
    # A trainer that is started again continues the numbers with a full version.
    verl.actors[0]._publisher.close()
    verl.actors = Verl(tmp_path / "versions").actors
    for received in verl.update(weights, 3):
        # The copy of a rollout worker stays, so that it knows what the full version changes.
        assert len(received) == (2 if changed_only else len(weights))
        assert_same(dict(sorted((copies[0] | received).items())), weights)
    receiver = deltacheck.Receiver(tmp_path / "versions")
    receiver.poll()
    assert (receiver.version.number, receiver.version.base, receiver.version.step) == (4, None, 3)


def test_a_rollout_worker_of_verl_does_not_wait_forever(tmp_path: Path) -> None:
    verl = Verl(tmp_path / "versions", timeout_seconds=0.05)
    verl.rollouts[0].init_process_group(version=1)
    with pytest.raises(StorageTimeout, match=r"version 1 has not appeared .* within 0.05 s"):
        asyncio.run(anext(verl.rollouts[0].receive_weights()))
