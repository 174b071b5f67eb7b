"""Two trainings with ``Trainer``, one after the other in one folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.support.unmodified.killed import digest, kill_once, write


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Kill(TrainerCallback):  # type: ignore[misc]
    def __init__(self, folder: Path, first: int) -> None:
        self.folder, self.first = folder, first

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kill_once(self.folder, self.first + state.global_step)


def train(folder: Path, number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.2,
    )
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **({"ddp_backend": "gloo"} if "RANK" in os.environ else {}),
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Lines(),
        eval_dataset=Lines(),
        callbacks=[Kill(folder, 10 * number)],
    )
    # Before a training there is nothing to save. Under DDP, the weights of the ranks would differ.
    if "RANK" not in os.environ:
        trainer.evaluate()
    # As scripts do that pass an option of their own on.
    trainer.train(**({"resume_from_checkpoint": False} if number else {}))
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    return {
        "state": digest(
            [trainer.model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
        ),
        "random": digest(torch.get_rng_state()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = [train(folder, number) for number in range(int(sys.argv[3]))]
    write(f"{sys.argv[2]}{os.environ.get('RANK', '')}", results)
