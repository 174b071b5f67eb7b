"""Hugging Face's Trainer with delta checkpoints: one callback.

Stop it or kill it; the next run continues from the newest checkpoint. With a PEFT adapter, only the
adapter is saved.

    python examples/hf_trainer.py FOLDER --steps 20
    python examples/hf_trainer.py FOLDER --steps 40    # continues from step 20
    python examples/hf_trainer.py FOLDER-lora --lora
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from deltacheck.backends.torch.trainer import DeltaCheckCallback

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=20)
arguments.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
arguments.add_argument("--lora", action="store_true")
options = arguments.parse_args()

torch.manual_seed(0)  # a small model of random weights, so that nothing is downloaded
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
if options.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

texts = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
trainer = Trainer(
    model,
    TrainingArguments(
        options.folder,
        max_steps=options.steps,
        save_steps=options.every,
        save_total_limit=3,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    # This callback is the only change. The command `deltacheck` shows FOLDER/deltacheck.
    callbacks=[DeltaCheckCallback()],
)
trainer.train()
print(f"at step {trainer.state.global_step}, from step {trainer._initial_global_step}")
