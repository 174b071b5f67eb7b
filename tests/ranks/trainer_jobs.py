"""Trainings of a Hugging Face Trainer on several ranks: python -m tests.ranks.trainer_jobs KIND
FOLDER.

Each training is two forked processes, because the imports take longer than the trainings.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
}

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import deltacheck
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.trainer import DeltaCheckCallback
from tests.support.best_step import EVALUATED, best_of
from tests.support.forked import digest

STEPS = 8
SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for the same index."""

    def __len__(self) -> int:
        return 40  # two and a half steps an epoch, so that a resume is within one

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Keeper(Trainer):  # type: ignore[misc]
    """A subclass that keeps files in ``checkpoint-N``, as TRL's asynchronous trainers do."""

    returned: dict[str, str]

    def _folder(self) -> Path:
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        rank, step = self.args.process_index, self.state.global_step
        (self._folder() / f"before-{rank}.json").write_text(json.dumps(["before", rank, step]))
        super()._save_checkpoint(model, trial)
        (self._folder() / f"after-{rank}.json").write_text(json.dumps(["after", rank, step]))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        folder = Path(checkpoint or "nowhere")
        self.returned = {
            path.relative_to(folder).as_posix(): path.read_text()
            for path in sorted(folder.rglob("*.json"))
            if path.name.startswith(("before", "after", "of-"))
        }


class Writes(TrainerCallback):  # type: ignore[misc]
    """A callback that writes a file to ``checkpoint-N`` after the trainer has."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}", "inner")
            folder.mkdir(exist_ok=True)  # a kill may have left it
            (folder / "of-callback.json").write_text("[]")


class Seeds(TrainerCallback):  # type: ignore[misc]
    """Lets the ranks draw different numbers."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(100 + args.process_index)


class Kill(TrainerCallback):  # type: ignore[misc]
    """Kills rank 1 within a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def model() -> LlamaForCausalLM:
    """Return a model with a buffer that differs between ranks, as running averages do."""
    torch.manual_seed(0)
    one = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, attention_dropout=0.2))
    one.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    one.register_forward_pre_hook(count, with_kwargs=True)
    return one


def count(one: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
    one.seen.add_(kwargs["input_ids"].sum())


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model(),
        LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights=False),
    )


def trainer(folder: Path, *callbacks: TrainerCallback, make: Any = model, **options: Any) -> Keeper:
    options = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "ddp_backend": "gloo",
        "use_cpu": True,
    } | options
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Keeper(
        make(), arguments, train_dataset=Lines(), eval_dataset=Lines(), callbacks=list(callbacks)
    )


def outcome(one: Keeper) -> dict[str, object]:
    """Return everything that a resumed run must have as the whole one has it.

    Under FSDP each rank has its own shards.
    """
    model_state = one.model.state_dict()
    return {
        "state": digest(
            [
                {k: v for k, v in model_state.items() if "seen" not in k},
                one.optimizer.state_dict(),
                one.lr_scheduler.state_dict(),
            ]
        ),
        "random": digest(torch.get_rng_state()),
        "losses": [entry["loss"] for entry in one.state.log_history if "loss" in entry],
        "began_at": one._initial_global_step,
        "returned": getattr(one, "returned", {}),
        "folders": sorted(os.listdir(one.args.output_dir)),
    }


def train(
    folder: Path,
    *more: TrainerCallback,
    resume: Any = None,
    saving: bool = True,
    **options: Any,
) -> dict[str, object]:
    callbacks = [Seeds(), *([DeltaCheckCallback(), Writes()] if saving else [])]
    one = trainer(folder, *callbacks, *more, **options)
    kinds: list[int] = []
    with counted(kinds):
        one.train(resume)
    return outcome(one) | {"deltas": kinds}


@contextlib.contextmanager
def counted(deltas: list[int]) -> Iterator[None]:
    """Append the number of leaves that each save of this rank stores as changes."""
    handles = []
    save = Engine.save

    def kept(self: Engine, *args: Any, **kwargs: Any) -> Any:
        handles.append(save(self, *args, **kwargs))
        return handles[-1]

    Engine.save = kept  # type: ignore[method-assign]
    yield
    deltas.extend(sum(leaf.kind == "delta" for leaf in h.report.leaves) for h in handles)


# --- ranks ----------------------------------------------------------------------------------------


def ranks(do: Callable[[], object], size: int = 2, kill_after: float | None = None) -> list[Any]:
    """Run a function on several ranks, and return the result of each.

    If one is killed or fails, the others are killed. All are killed after some seconds if asked.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    children: dict[int, tuple[int, int]] = {}  # reading end: process, rank
    for rank in range(size):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            _run(do, rank, size, port, writing)
        os.close(writing)
        children[reading] = process, rank
    results: list[Any] = [None] * size
    deadline = time.monotonic() + (240 if kill_after is None else kill_after)
    while children:
        ready, _, _ = select.select(list(children), [], [], max(0, deadline - time.monotonic()))
        for reading in ready:
            process, rank = children.pop(reading)
            with os.fdopen(reading) as pipe:
                text = pipe.read()
            _, status = os.waitpid(process, 0)
            results[rank] = (
                {"killed": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(text)
            )
        failed = [r for r in results if r is not None and ("killed" in r or "error" in r)]
        if not ready or any("killed" in result for result in failed):
            for process, _ in children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        elif failed:  # the others may have something to say, too
            deadline = min(deadline, time.monotonic() + 20)
    return results


def _run(do: Callable[[], object], rank: int, size: int, port: int, writing: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    try:
        value = do()
    except BaseException as error:  # noqa: BLE001 - told to the parent
        value = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        json.dump(value, pipe)
    sys.stderr.flush()
    os._exit(0)


def killed_and_resumed(folder: Path, **options: Any) -> dict[str, Any]:
    parts, root = folder / "parts", folder / "parts" / "deltacheck"
    results: dict[str, Any] = {
        "whole": ranks(lambda: train(folder / "whole", **options)),
        "killed": ranks(lambda: train(parts, Kill(), **options)),
    }
    results["resumed"] = ranks(lambda: train(parts, **options))
    results["steps"] = deltacheck.open(root).steps()
    return results


def other_ranks(folder: Path) -> dict[str, Any]:
    """Resume a finished run of two ranks on one and on three, which load it and end at once."""
    ranks(lambda: train(folder, max_steps=2))
    return {str(size): ranks(lambda: train(folder, max_steps=2), size) for size in (2, 1, 3)}


def killed_at_random(folder: Path, kills: int, **options: Any) -> dict[str, Any]:
    """Kill all ranks at random moments until a run ends."""
    seed = random.randrange(1 << 32)
    moments, killed, begin = random.Random(seed), 0, time.monotonic()
    whole = ranks(lambda: train(folder / "whole", **options))
    seconds = time.monotonic() - begin
    while True:
        wait = moments.uniform(0.5, 1.0) * seconds if killed < kills else None
        results = ranks(lambda: train(folder / "run", **options), kill_after=wait)
        if not any("killed" in result for result in results):
            return {"seed": seed, "killed": killed, "whole": whole, "resumed": results}
        killed += 1


def bare(folder: Path) -> Any:
    """The same training, with Trainer's own checkpoints."""
    return ranks(lambda: train(folder, saving=False))


def options(folder: Path) -> dict[str, Any]:
    """Return the results of options of the trainer."""
    ranks(lambda: train(folder / "limit", save_total_limit=2))
    only = {"save_only_model": True, "max_steps": 4}
    ranks(lambda: train(folder / "only", **only))
    leaves = deltacheck.open(folder / "only" / "deltacheck").manifest().specs
    return {
        "limit": deltacheck.open(folder / "limit" / "deltacheck").steps(),
        "best": ranks(lambda: best(folder / "best")),
        "best of a finished run": ranks(lambda: best(folder / "best")),
        "only": sorted({path.partition("/")[0] for path in leaves}),
        "only resumed": ranks(lambda: train(folder / "only", save_only_model=True, max_steps=6)),
    }


def best(folder: Path) -> dict[str, Any]:
    return best_of(trainer(folder, DeltaCheckCallback(), **EVALUATED), folder)


class Oversized(TrainerCallback):  # type: ignore[misc]
    """Writes a large file to the second checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and state.is_world_process_zero:
            Path(args.output_dir, "checkpoint-4", "large.bin").write_bytes(bytes(2000))


def refused(folder: Path) -> dict[str, Any]:
    def oversized() -> None:
        callbacks = [DeltaCheckCallback(file_limit_bytes=1999), Oversized()]
        one = trainer(folder / "large", *callbacks)
        one.model.config.to_json_file = lambda path, **_: Path(path).write_text("{}")
        one._save = lambda *_, **__: None
        one.train()

    return {
        "large": ranks(oversized),
        "steps": deltacheck.open(folder / "large" / "deltacheck").steps(),
        "each node": ranks(lambda: train(folder / "each", save_on_each_node=True)),
    }


def shard_on_cpu() -> None:
    """Let accelerate use FSDP on a CPU, too, where it has no other reason to refuse it."""
    initialise = AcceleratorState.__init__

    def initialised(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.num_processes > 1:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = initialised


def fsdp(folder: Path) -> dict[str, Any]:
    shard_on_cpu()
    sharded = {"fsdp": True, "fsdp_config": fsdp_config("SHARDED_STATE_DICT")}
    found = killed_and_resumed(folder, **sharded)
    loaded = {}
    for size in (2, 1, 3):
        loaded[str(size)] = ranks(lambda: {"loaded": gathered(folder / "parts", **sharded)}, size)
    full = {"fsdp": True, "fsdp_config": fsdp_config("FULL_STATE_DICT")}
    random = killed_at_random(folder / "random", 2, make=lora, **full)

    def first_version() -> None:
        one = trainer(folder / "fsdp1", DeltaCheckCallback(), **full)
        one.accelerator.state.fsdp_plugin.fsdp_version = 1
        one.train()

    return found | {"loaded": loaded, "random": random, "fsdp1": ranks(first_version)}


def fsdp_config(kind: str) -> dict[str, Any]:
    return {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": kind,
    }


def gathered(folder: Path, **options: Any) -> str:
    """Return a digest of all weights and moments of a finished run, by name."""
    one = trainer(folder, DeltaCheckCallback(), **options)
    one.train()
    whole = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(one.model, one.optimizer, options=whole)["state"]
    return digest([get_model_state_dict(one.model, options=whole), dict(sorted(state.items()))])


def deepspeed_options(stage: int) -> dict[str, Any]:
    """Return the options of a training under DeepSpeed, which accelerate refuses on a CPU."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled here
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    return {"use_cpu": False, "deepspeed": config}


def zero1(folder: Path) -> dict[str, Any]:
    sharded = deepspeed_options(1)
    only = {**sharded, "save_only_model": True}

    def loaded_best() -> dict[str, Any]:
        one = trainer(folder / "best", DeltaCheckCallback(), **sharded, **EVALUATED)
        one.train()
        step = one.state.best_global_step
        saved = deltacheck.open(folder / "best" / "deltacheck").restore(step)["master"]
        weights = dict(one.model.named_parameters())
        equal = all(
            bool((value == weights[name].detach().numpy()).all()) for name, value in saved.items()
        )
        return {"best": step, "equal": equal, "leaves": len(saved)}

    return {
        "best": ranks(loaded_best),
        "only": ranks(lambda: train(folder / "only", **only)),
    }


def zero2(folder: Path) -> dict[str, Any]:
    return killed_at_random(folder, 1, make=lora, **deepspeed_options(2))


def zero3(folder: Path) -> dict[str, Any]:
    sharded = deepspeed_options(3)
    found = killed_and_resumed(folder, **sharded)
    one = ranks(lambda: train(folder / "parts", max_steps=STEPS + 1, save_steps=1, **sharded), 1)
    return found | {"by one": one}


SCENARIOS: dict[str, dict[str, Callable[[Path], Any]]] = {
    "ddp": {
        "ddp": killed_and_resumed,
        "peft": partial(killed_at_random, kills=2, make=lora),
        "bare": bare,
        "other_ranks": other_ranks,
        "options": options,
        "refused": refused,
    },
    "fsdp": {"fsdp": fsdp},
    "zero": {"zero1": zero1, "zero2": zero2, "zero3": zero3},
}

if __name__ == "__main__":
    told = {}
    for name, scenario in SCENARIOS[sys.argv[1]].items():
        if len(sys.argv) > 3 and name not in sys.argv[3:]:
            continue
        (Path(sys.argv[2]) / name).mkdir()
        told[name] = scenario(Path(sys.argv[2]) / name)
    print("\n" + json.dumps(told))
