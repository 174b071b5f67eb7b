"""Small but real training runs, shared by benchmarks, the demo, examples and tests.

There are three tasks, in PyTorch and in JAX: supervised fine-tuning, LoRA and reinforcement
learning. The model is a decoder-only transformer over bytes. It is pre-trained briefly so that
post-training does not start from noise. Weights are bfloat16, with a float32 master copy and
AdamW's two moments: 14 bytes per trained parameter. The same recipe gives the same run, bit for
bit, on the same machine.
"""
