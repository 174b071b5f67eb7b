"""Trainings with TRL for tests/backends/torch/test_trl.py: python -m tests.support.trl_child
FOLDER.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import deltacheck
from tests.ranks.trainer_jobs import ranks
from tests.support import trainer_child  # before trl: it sets the environment
from tests.support.forked import example, forked, run_all
from tests.support.trainer_child import Kill, killed_and_resumed

OPTIONS = {
    "max_steps": trainer_child.STEPS,
    "save_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def options() -> dict[str, Any]:
    # Accelerate takes a process that names a backend for one of several.
    return OPTIONS | ({"ddp_backend": "gloo"} if "RANK" in os.environ else {})


def words() -> PreTrainedTokenizerFast:
    """The numbers below 32, so that nothing is fetched."""
    tokens = Tokenizer(
        models.WordLevel({str(number): number for number in range(32)}, unk_token="0")
    )
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="0", eos_token="1")


def counting(first: int, length: int) -> str:
    return " ".join(str(2 + (first + number) % 30) for number in range(length))


def supervised(folder: Path, *callbacks: TrainerCallback, **trainer: Any) -> Trainer:
    texts = [
        {"text": counting(first, 3 + first % 5)} for first in range(20)
    ]  # of several lengths: batches are padded
    config = SFTConfig(str(folder), **options())
    return SFTTrainer(
        trainer_child.model(),
        config,
        train_dataset=Dataset.from_list(texts),
        processing_class=words(),
        callbacks=list(callbacks),
        **trainer,
    )


def preferred(folder: Path, *callbacks: TrainerCallback) -> Trainer:
    pairs = [
        {
            "prompt": counting(first, 3),
            "chosen": " " + counting(first + 3, 2),
            "rejected": " " + counting(first, 2),
        }
        for first in range(20)
    ]
    config = DPOConfig(str(folder), **options())
    return DPOTrainer(
        trainer_child.model(),
        trainer_child.model(),
        config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=words(),
        callbacks=list(callbacks),
    )


def rewarded(folder: Path, *callbacks: TrainerCallback) -> Trainer:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    prompts = [{"prompt": counting(first, 3)} for first in range(20)]
    config = GRPOConfig(str(folder), **options(), num_generations=4, max_completion_length=4)
    return GRPOTrainer(
        trainer_child.model(),
        reward,
        config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=words(),
        callbacks=list(callbacks),
    )


adapted = partial(
    supervised,
    peft_config=LoraConfig(
        r=2, target_modules=["q_proj"], lora_dropout=0.1, init_lora_weights=False
    ),
)


def by_itself(folder: Path) -> Any:
    """TRL without the callback, killed at the same moment."""

    def run(*callbacks: TrainerCallback, resume: bool | None = None) -> Any:
        one = supervised(folder, *callbacks)
        one.train(resume_from_checkpoint=resume)
        return trainer_child.outcome(one)

    return {"killed": forked(lambda: run(Kill())), "resumed": forked(lambda: run(resume=True))}


def adapter_leaves(folder: Path) -> Any:
    found = killed_and_resumed(adapted, folder)
    return found | {
        "leaves": list(deltacheck.open(folder / "parts" / "deltacheck").manifest().specs)
    }


def on_two_ranks(start: Any, folder: Path) -> dict[str, Any]:
    """The same as ``killed_and_resumed``, of two ranks."""

    def run(name: str, *callbacks: TrainerCallback) -> list[Any]:
        return ranks(lambda: trainer_child.train(folder / name, *callbacks, start=start))

    return {"whole": run("whole"), "killed": run("parts", Kill()), "resumed": run("parts")}


def rewarded_on_two_ranks(folder: Path) -> dict[str, Any]:
    """The same with GRPO, whose own resume on two ranks draws other completions: it is expected."""
    found = on_two_ranks(rewarded, folder)

    def by_trl(*callbacks: TrainerCallback, resume: str | None = None) -> list[Any]:
        def run() -> Any:
            one = rewarded(folder / "by_trl", *callbacks)
            one.train(resume_from_checkpoint=resume)
            return trainer_child.outcome(one)

        return ranks(run)

    by_trl(Kill())
    checkpoint = f"checkpoint-{found['resumed'][0]['began_at']}"
    return found | {"whole": by_trl(resume=str(folder / "by_trl" / checkpoint))}


def examples(folder: Path) -> Any:
    return [
        forked(lambda steps=steps: example("hf_sft_lora.py", folder / "run", "--steps", steps))
        for steps in (6, 8)
    ]


SCENARIOS: dict[str, Any] = {
    "sft": partial(killed_and_resumed, supervised),
    "sft_by_itself": by_itself,
    "lora": adapter_leaves,
    "dpo": partial(killed_and_resumed, preferred),
    "grpo": partial(killed_and_resumed, rewarded),
    "sft_ranks": partial(on_two_ranks, adapted),
    "dpo_ranks": partial(on_two_ranks, preferred),
    "grpo_ranks": rewarded_on_two_ranks,
    "examples": examples,
}

if __name__ == "__main__":
    wanted = sys.argv[2:] or list(SCENARIOS)
    run_all({name: SCENARIOS[name] for name in wanted}, Path(sys.argv[1]))
