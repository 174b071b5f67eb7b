"""TRL's SFTTrainer with a PEFT adapter and delta checkpoints.

The next run continues from the newest checkpoint. It needs trl, peft and datasets.

    python examples/hf_sft_lora.py FOLDER --steps 20
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from deltacheck.backends.torch.trainer import DeltaCheckCallback

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder")
arguments.add_argument("--steps", type=int, default=20)
options = arguments.parse_args()

# A vocabulary of numbers to count with, so that nothing is downloaded.
words = ["<pad>", "<eos>", *(str(number) for number in range(30))]
tokenizer = Tokenizer(
    models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
)
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

trainer = SFTTrainer(
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
    SFTConfig(
        options.folder,
        max_steps=options.steps,
        save_steps=5,
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(
        [{"text": " ".join(map(str, range(first, first + 10)))} for first in range(20)]
    ),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    callbacks=[DeltaCheckCallback()],
)
trainer.train()
print(f"at step {trainer.state.global_step}, from step {trainer._initial_global_step}")
