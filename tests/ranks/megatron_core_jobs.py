"""Define the jobs of ``test_megatron_core.py``: Megatron-Core itself, on gloo and the CPU.

Megatron-Core expects a GPU. ``prepare`` replaces what the CPU lacks: names of devices, the kernels
of Triton, and the fused Adam of Apex or Transformer Engine. The model, its parallelism, the
distributed optimizer, ``dist_checkpointing`` and the queue of asynchronous saves are Megatron's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from deltacheck.errors import Damaged, DeltacheckError
from tests.ranks.dcp_jobs import join, stored_bytes

ROWS, HIDDEN, LAYERS, HEADS = 64, 32, 2, 4
# Gathers the optimizer's state on one rank of each data-parallel group, for any parallelism.
RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
# Keeps it sharded, for the same tensor and pipeline parallelism.
SAME_MODEL_PARALLELISM = {"distrib_optim_sharding_type": "dp_reshardable"}


class _OnCpu(TorchFunctionMode):
    """Creates on the CPU what is to be created on a GPU, and names types as a GPU does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **options)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class FusedAdam(torch.optim.Optimizer):
    """Adam with the state of Apex and Transformer Engine: the step count is in the groups."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, **others: Any) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": others["weight_decay"]}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["exp_avg"].lerp_(weight.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(
                    weight.grad, weight.grad, value=1 - second
                )
                size = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
                rate = group["lr"] / (1 - first ** group["step"])
                weight.addcdiv_(state["exp_avg"], size + group["eps"], value=-rate)


def prepare(folder: str) -> None:
    """Make Megatron-Core importable from a folder, and let it run on the CPU."""
    # Megatron starts processes for its saves, which one of ``launch`` may otherwise not do.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    sys.path.insert(0, folder)
    # PyTorch looks for Triton too, and must not take the stand-in for it.
    for module in ("torch._inductor.runtime.triton_compat", "torch._dynamo"):
        importlib.import_module(module)
    torch._dynamo.config.disable = True  # seconds of compilation
    importlib.import_module("torch.utils._triton").has_triton_package()
    # No kernel is called. In most modules Megatron itself replaces a missing Triton by a mock.
    for name in ("", ".language", ".language.extra", ".runtime", ".runtime.cache"):
        sys.modules["triton" + name] = MagicMock(__version__="3.4.0", jit=lambda function: function)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *device: None
    _OnCpu().__enter__()
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.Adam = distributed.Adam = FusedAdam  # type: ignore[attr-defined]
    optimizer.USING_PYTORCH_OPTIMIZER = False  # type: ignore[attr-defined]
    distributed.HAVE_APEX_OR_TE = True  # type: ignore[attr-defined]


class Training:
    """A small GPT with the distributed optimizer.

    Args:
        tensor_parallel: Ranks of a tensor-parallel group. The others are data-parallel.
        seed: Of the weights.
    """

    def __init__(self, tensor_parallel: int, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=tensor_parallel,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
        )
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=ROWS,
            max_sequence_length=8,
        ).bfloat16()
        self.parallel = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=0.0,
            ),
            [self.parallel],
        )
        self.iteration = 0

    def step(self) -> None:
        """Train by gradients that depend on the iteration only."""
        self.iteration += 1
        generator = torch.Generator().manual_seed(self.iteration)
        for weight in self.model.parameters():
            weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
        assert self.optimizer.step()[0]

    def state(self, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject

        metadata = dict(metadata)  # Megatron adds the process group to it
        model = self.model.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        # An object of each rank, as random states are.
        note = ShardedObject("note", f"rank {rank} at {self.iteration}", (size,), (rank,))
        common = {"iteration": self.iteration, "args": {"lr": 0.1, "betas": [0.9, 0.999]}}
        return {"model": model, "optimizer": optimizer, "note": note, **common}

    def adopt(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["iteration"]

    def digest(self) -> str:
        """Return a digest of every bit that this rank has: weights, masters, moments, counts."""
        content = hashlib.sha256()
        inner = self.optimizer.chained_optimizers[0].optimizer
        tensors = [weight.detach() for weight in self.model.parameters()]
        for group in inner.param_groups:
            content.update(str(group["step"]).encode())
            for weight in group["params"]:
                tensors += [weight.detach(), *(inner.state[weight][k] for k in MOMENTS)]
        for tensor in tensors:
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return content.hexdigest()


MOMENTS = ("exp_avg", "exp_avg_sq")


def directory(root: str, step: int) -> str:
    path = Path(root) / f"iter_{step:07d}"
    path.mkdir(exist_ok=True, parents=True)
    dist.barrier()
    return str(path)


def newest(root: str) -> int:
    """Return the newest step whose directory Megatron takes for complete."""
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint

    complete = [
        int(path.name[5:])
        for path in Path(root).glob("iter_*")
        if check_is_distributed_checkpoint(str(path))
    ]
    return max(complete)


def killed(rank: int, size: int, port: int, folder: str, root: str) -> None:
    """Train; save; save while training goes on; be killed during a third save."""
    prepare(folder)
    join(rank, size, port)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from deltacheck.backends.torch.dcp import DeltaStorageWriter
    from deltacheck.backends.torch.megatron import DeltaSaveStrategy

    strategy = DeltaSaveStrategy(f"{root}/deltas")
    queue = AsyncCallsQueue()
    training = Training(1, seed=0)
    digests, calls = {}, []
    for step in (1, 2):
        training.step()
        digests[step] = training.digest()
        state = training.state(RESHARDABLE, is_loading=False)
        if step == 1:
            dist_checkpointing.save(
                state, directory(root, 1), strategy, content_metadata=dict(RESHARDABLE)
            )
    # Held until training has changed every tensor, so that the queue must wait without blocking.
    gate, write = threading.Event(), strategy._save

    def held(*args: Any) -> None:
        assert gate.wait(240)
        write(*args)

    strategy._save = held  # type: ignore[method-assign]
    request = dist_checkpointing.save(state, directory(root, 2), strategy, async_sharded_save=True)
    queue.schedule_async_request(request)
    training.step()
    digests[3] = training.digest()
    calls.append(queue.maybe_finalize_async_calls(blocking=False))
    calls.append(newest(root))
    gate.set()
    calls.append(queue.maybe_finalize_async_calls(blocking=True))
    calls.append(newest(root))
    Path(root, f"killed-{rank}.json").write_text(json.dumps({"digests": digests, "calls": calls}))
    dist.barrier()

    whole = DeltaStorageWriter.write_data

    def write_data(*args: Any) -> Any:
        whole(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    DeltaStorageWriter.write_data = write_data  # type: ignore[method-assign]
    state = training.state(RESHARDABLE, is_loading=False)
    request = dist_checkpointing.save(state, directory(root, 3), strategy, async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)


def resumed(rank: int, size: int, port: int, folder: str, root: str) -> dict[str, Any]:
    """Resume after ``killed``, and load under other conditions."""
    prepare(folder)
    join(rank, size, port)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from deltacheck.backends.torch.megatron import DeltaLoadStrategy, DeltaSaveStrategy

    deltas = f"{root}/deltas"
    save, load = DeltaSaveStrategy(deltas), DeltaLoadStrategy(deltas)
    told: dict[str, Any] = {"newest": newest(root)}

    def loaded(tensor_parallel: int, path: str, metadata: Any, **options: Any) -> tuple[Any, Any]:
        training = Training(tensor_parallel, seed=7)
        state = training.state(metadata, is_loading=True)
        result = dist_checkpointing.load(state, path, **options)
        training.adopt(result[0] if isinstance(result, tuple) else result)
        return training, result

    training, state = loaded(1, directory(root, 2), RESHARDABLE, sharded_strategy=load)
    told["resumed"] = training.digest()
    told["note"] = state["note"]
    told["args"] = state["args"]
    told["content"] = dist_checkpointing.load_content_metadata(directory(root, 1))
    training.step()
    told["continued"] = training.digest()

    # The same step that the killed run had begun, and Megatron's own format beside it.
    before = stored_bytes(deltas)
    dist_checkpointing.save(training.state(RESHARDABLE, False), directory(root, 3), save)
    told["files"] = sorted(path.name for path in Path(directory(root, 3)).iterdir())
    told["bytes"] = before, stored_bytes(deltas)
    dist_checkpointing.save(training.state(RESHARDABLE, False), directory(f"{root}/own", 3))
    ours, _ = loaded(2, directory(root, 3), RESHARDABLE, sharded_strategy=load)
    theirs, _ = loaded(2, directory(f"{root}/own", 3), RESHARDABLE)
    told["other parallelism"] = ours.digest(), theirs.digest()

    # Two tensor-parallel ranks, no gathering of the optimizer's state, Megatron's wrappers.
    ours.step()
    dist_checkpointing.save(
        ours.state(SAME_MODEL_PARALLELISM, False),
        directory(root, 4),
        FullyParallelSaveStrategyWrapper(save),
        validate_access_integrity=True,
    )
    again, result = loaded(
        2,
        directory(root, 4),
        SAME_MODEL_PARALLELISM,
        sharded_strategy=FullyParallelLoadStrategyWrapper(load),
        strict=StrictHandling.RETURN_ALL,
    )
    told["wrapped"] = ours.digest(), again.digest()
    told["mismatches"] = [sorted(keys) for keys in result[1:]]

    # A file of another step, and a directory that is gone.
    if rank == 0:
        shutil.copy(f"{root}/iter_0000001/common.pt", f"{root}/iter_0000003/common.pt")
    dist.barrier()
    try:
        loaded(2, directory(root, 3), RESHARDABLE, sharded_strategy=load)
    except Damaged as error:
        told["damaged"] = str(error)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{root}/iter_0000003")
        load.write_directory(f"{root}/iter_0000003")
    dist.barrier()
    anew, _ = loaded(2, directory(root, 3), RESHARDABLE, sharded_strategy=load)
    told["written anew"] = anew.digest()
    dist.destroy_process_group()
    return told


def refused(
    rank: int, size: int, port: int, folder: str, root: str, change: str
) -> tuple[str, str, list[str]]:
    """Save with a version that could not load the step: the error, the version, what exists.

    Args:
        change: ``""``: none; ``"no file"``: the version does not look for ``common.pt``;
            ``"no planner"``: it has another name for what we need.
    """
    prepare(folder)
    join(rank, size, port)
    from megatron.core import dist_checkpointing, package_info
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from deltacheck.backends.torch.megatron import DeltaSaveStrategy

    if change == "no file":
        serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
        serialization._legacy_common_state_exists = lambda path: False  # type: ignore[attr-defined]
    if change == "no planner":
        strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
        del strategies.MCoreSavePlanner
    path = directory(root, 1)
    weight = ShardedTensor.from_rank_offsets("weight", torch.ones(4, 4), replica_id=rank)
    try:
        dist_checkpointing.save(
            {"weight": weight, "iteration": 1}, path, DeltaSaveStrategy(f"{root}/deltas")
        )
        text = ""
    except DeltacheckError as error:
        text = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    exists = ["deltas"] if Path(root, "deltas").exists() else []
    exists += ["metadata.json"] if Path(path, "metadata.json").exists() else []
    return text, package_info.__version__, exists
