"""Trainings with transformers and accelerate for tests/backends/torch/test_trainer.py: python -m
tests.support.trainer_child FOLDER.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.hugging_face import model_export
from deltacheck.backends.torch import Engine, ResumableLoader, load
from deltacheck.backends.torch.accelerate import load_state, state_of
from deltacheck.backends.torch.files import torch_import
from deltacheck.backends.torch.trainer import DeltaCheckCallback
from deltacheck.cli import main
from deltacheck.save.saver import Saver
from tests.support import data_kills
from tests.support.best_step import EVALUATED, best_of
from tests.support.forked import digest, example, forked, run_all

STEPS = 8
KILLED_AT = 7  # begun, not done; steps 2, 4 and 6 were to be saved


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for the same index."""

    def __len__(self) -> int:
        return 20  # two and a half batches of eight an epoch: the kill comes within the third

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Kill(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.2)
    )


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model(),
        LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights=False),
    )


def trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    make: Any = model,
    kind: Any = Trainer,
    **options: Any,
) -> Any:
    options = {
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
    } | options
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return kind(
        make(), arguments, train_dataset=Lines(), eval_dataset=Lines(), callbacks=list(callbacks)
    )


def outcome(one: Trainer) -> dict[str, object]:
    """Everything that a resumed run must have as the whole one has it, and where it went on."""
    return {
        "state": digest(
            [one.model.state_dict(), one.optimizer.state_dict(), one.lr_scheduler.state_dict()]
        ),
        "random": digest(torch.get_rng_state()),
        "losses": [entry["loss"] for entry in one.state.log_history if "loss" in entry],
        "began_at": one._initial_global_step,
        "folders": sorted(os.listdir(one.args.output_dir)),
    }


def train(
    folder: Path,
    *more: TrainerCallback,
    resume: Any = None,
    start: Callable[..., Trainer] = trainer,
    **options: Any,
) -> dict[str, object]:
    one = start(folder, DeltaCheckCallback(), *more, **options)
    with logged() as lines:
        one.train(resume)
    return outcome(one) | {"logged": lines}


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Return the lines of deltacheck about resumes."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith(("training continues", "nothing is trained")):
                lines.append(f"{record.levelname} {record.getMessage().split(' of ')[0]}")

    log, handler = logging.getLogger("deltacheck"), Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def killed_and_resumed(start: Callable[..., Trainer], folder: Path) -> dict[str, Any]:
    return {
        "whole": forked(lambda: train(folder / "whole", start=start)),
        "killed": forked(lambda: train(folder / "parts", Kill(), start=start)),
        "resumed": forked(lambda: train(folder / "parts", start=start)),
    }


def asked_for(folder: Path) -> dict[str, Any]:
    """Return the results for each value of ``train(resume_from_checkpoint=...)``."""
    return {
        "whole": forked(lambda: train(folder)),
        "finished": forked(lambda: train(folder)),
        "named": forked(lambda: train(folder, resume="checkpoint-4")),
        "asked": forked(lambda: train(folder, DeltaCheckCallback(), resume=True)),
        "afresh": forked(lambda: train(folder, resume=False, max_steps=2)),
    }


def plain(folder: Path) -> Any:
    """A Trainer of a process in which the callback exists, without it."""
    DeltaCheckCallback()
    one = trainer(folder, max_steps=2)
    one.train()
    return sorted(os.listdir(folder))


def bare(folder: Path) -> Any:
    """The same training as ``whole``, checkpoints by Trainer itself."""
    one = trainer(folder)
    one.train()
    return outcome(one)


def peft_leaves(folder: Path) -> Any:
    train(folder, make=lora, max_steps=2)
    return specs(folder)


def specs(folder: Path) -> list[str]:
    return list(deltacheck.open(folder / "deltacheck").manifest().specs)


def partly_frozen(folder: Path) -> Any:
    """Return whether each save reads the frozen embedding in the background."""
    behind: list[bool] = []
    save = Saver.save

    def told(self: Saver, step: int, tree: Any, sources: Any, *rest: Any, **more: Any) -> Any:
        behind.append(sources["model/model.embed_tokens.weight"].lazy)
        return save(self, step, tree, sources, *rest, **more)

    def make() -> LlamaForCausalLM:
        one = model()
        one.model.embed_tokens.requires_grad_(False)
        return one

    Saver.save = told  # type: ignore[method-assign]
    train(folder, make=make)
    return behind


def kept(folder: Path) -> Any:
    train(folder, save_total_limit=2, save_strategy="no", max_steps=2)
    none = deltacheck.open(folder / "deltacheck").steps()
    one = trainer(folder, DeltaCheckCallback(every=1), save_total_limit=2, save_strategy="no")
    one.train()
    return [none, deltacheck.open(folder / "deltacheck").steps()]


def best(folder: Path) -> Any:
    return best_of(trainer(folder, DeltaCheckCallback(), **EVALUATED), folder)


class Keeper(Trainer):  # type: ignore[misc]
    """A subclass with a file of its own in each checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / "own.txt").write_text(f"{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.returned = sorted(path.name for path in Path(checkpoint).iterdir())
            self.own = Path(checkpoint, "own.txt").read_text()


class Deaf(Trainer):  # type: ignore[misc]
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load in a way of its own."""


class OwnRandom(Trainer):  # type: ignore[misc]
    """Reads the random states of ``Trainer`` from its file, without a call of ``Trainer``."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, "rng_state.pth").exists():
            raise AssertionError("this file is one of Trainer")


class OwnModel(OwnRandom):
    """Reads the weights from files of its own, as the trainers of sentence-transformers."""

    def _load_from_checkpoint(self, checkpoint: str) -> None:
        raise AssertionError("a step has no files of weights")


OwnModel.__module__ = "sentence_transformers.base.trainer"


class Elsewhere(Trainer):  # type: ignore[misc]
    """Saves some steps past ``Trainer``."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step != 4:
            super()._save_checkpoint(model, trial)


def files(folder: Path) -> Any:
    """Files of a checkpoint come back, and those that were there before stay."""
    old = folder / "checkpoint-2"
    old.mkdir()
    (old / "trainer_state.json").write_text("{}")
    (old / "old.txt").write_text("old")
    options = {"kind": Keeper, "save_only_model": True, "max_steps": 4}
    trainer(folder, DeltaCheckCallback(), **options).train()
    one = trainer(folder, DeltaCheckCallback(), **options | {"max_steps": 5})
    one.train()
    return {
        "returned": one.returned,
        "own": one.own,
        "began_at": one._initial_global_step,
        "old": sorted(os.listdir(old)),
        "folders": sorted(os.listdir(folder)),
        "leaves": sorted({path.partition("/")[0] for path in specs(folder)}),
        "model_folder": model_folder(folder),
    }


def model_folder(folder: Path) -> dict[str, bool]:
    """Load the newest step by ``from_pretrained``, and import what ``save_pretrained`` writes."""
    root, out, own = folder / "deltacheck", folder / "out", folder / "own"
    with patch.object(model_export, "SHARD_BYTES", 2000):
        assert main(["export", str(root), "--to", "hf", "--out", str(out)]) == 0
    weights = load(root)["model"]
    loaded = LlamaForCausalLM.from_pretrained(out)
    loaded.save_pretrained(own, max_shard_size="2KB")
    imported: Any = torch_import.read(own)
    return {
        "in_shards": not (out / "model.safetensors").exists(),
        "loaded": digest(loaded.state_dict()) == digest(weights),
        "imported": digest(imported["model"]) == digest(dict(sorted(weights.items()))),
    }


def refused(folder: Path) -> Any:
    def message(saving: DeltaCheckCallback, **options: Any) -> str:
        try:
            trainer(folder, saving, **options).train()
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    return {
        "large": message(DeltaCheckCallback(file_limit_bytes=100), max_steps=2),
        "override": message(DeltaCheckCallback(), kind=Deaf),
        "elsewhere": message(DeltaCheckCallback(), kind=Elsewhere),
    }


def failing(folder: Path) -> Any:
    """With ``on_error="log"``, a training ends although the save of step 4 fails."""
    saving = DeltaCheckCallback(options=SaveOptions(on_error="log"))

    class FullDisk(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert saving._engine is not None
            writer = saving._engine._writer
            if state.global_step == 4:
                saving._engine.wait()  # for the commit of step 2
                writer.commit = broken  # type: ignore[method-assign, assignment]
            elif state.global_step == 5:
                saving._engine.wait()
                del writer.commit

    one = trainer(folder, saving, FullDisk())
    one.train()
    return {"ended": one.state.global_step, "steps": deltacheck.open(folder / "deltacheck").steps()}


def broken(manifest: object) -> int:
    raise OSError(28, "No space left on device")


def accelerated(folder: Path) -> Any:
    """A loop that is killed within its second epoch."""

    def loop(root: Path, stop: int) -> str:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        loader = torch.utils.data.DataLoader(list(torch.randn(20, 8)), batch_size=4, shuffle=True)
        layers, optimizer, loader, schedule = accelerator.prepare(
            layers, optimizer, loader, schedule
        )
        batches = ResumableLoader(loader)
        with Engine(root) as engine:
            step = engine.steps()[-1] if engine.steps() else 0
            if step:
                saved = engine.restore()
                load_state(accelerator, saved["training"])
                batches.load_state_dict(saved["data"])
            while step < 15:
                for batch in batches:
                    accelerator.backward(layers(batch).square().mean())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    step += 1
                    state = {"training": state_of(accelerator), "data": batches.state_dict()}
                    engine.save(step, state)
                    if step == stop:
                        engine.wait()
                        os.kill(os.getpid(), signal.SIGKILL)
        return digest([layers.state_dict(), optimizer.state_dict(), torch.get_rng_state()])

    return {
        "whole": forked(lambda: loop(folder / "whole", 0)),
        "killed": forked(lambda: loop(folder / "parts", 8)),
        "resumed": forked(lambda: loop(folder / "parts", 0)),
    }


def data_position(folder: Path) -> Any:
    """Kills with Accelerate's stateful loader, and one whose order is not part of its state."""
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    accelerator.prepare(torch.utils.data.DataLoader(range(4), shuffle=True))
    try:
        state_of(accelerator)
    except ValueError as error:
        refusal = str(error)
    kind = "Accelerate, StatefulDataLoader"
    return {"refused": refusal, "killed": data_kills.killed(kind, folder, 3, 1)}


def examples(folder: Path) -> Any:
    options = ["--lora"] if "peft" in SCENARIOS else []
    runs = [
        ("hf_trainer.py", 6, "--every", 3, *options),
        ("hf_trainer.py", 8, *options),
        ("accelerate_loop.py", 5),
        ("accelerate_loop.py", 12),
    ]

    def run(name: str, steps: int, *more: object) -> str:
        return f"{name}: {forked(lambda: example(name, folder / name, '--steps', steps, *more))}"

    return [run(*one) for one in runs]


def reported(folder: Path) -> Any:
    """Return what a callback for a logger sees, and the keys of the trainer's own log."""
    seen: list[Any] = []
    ours = DeltaCheckCallback()

    class Observer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ours._run.engine.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            seen.append({key: value for key, value in logs.items() if "deltacheck" in key})

    # Callbacks for loggers come before those of a script.
    one = trainer(folder, Observer(), ours)
    one.train()
    return {"seen": seen, "logged": sorted(set().union(*one.state.log_history))}


SCENARIOS: dict[str, Any] = {
    "examples": examples,
    "killed_and_resumed": partial(killed_and_resumed, trainer),
    "asked_for": asked_for,
    "bare": bare,
    "plain": plain,
    "kept": kept,
    "partly_frozen": lambda folder: forked(lambda: partly_frozen(folder)),
    "best": best,
    "files": files,
    "refused": refused,
    "failing": failing,
    "reported": lambda folder: forked(lambda: reported(folder)),
    "accelerated": accelerated,
}
if importlib.util.find_spec("torchdata"):
    SCENARIOS["data_position"] = lambda folder: forked(lambda: data_position(folder))
if importlib.util.find_spec("peft"):
    SCENARIOS |= {
        "peft": partial(killed_and_resumed, partial(trainer, make=lora, kind=OwnModel)),
        "peft_leaves": peft_leaves,
    }

if __name__ == "__main__":
    run_all(SCENARIOS, Path(sys.argv[1]))
