"""Small but real post-training runs, the same three in PyTorch and in JAX: supervised fine-tuning,
LoRA, reinforcement learning.

The model is a decoder-only transformer over bytes, pre-trained for a moment so that post-training
does not start from noise. Weights are bfloat16, with a float32 master copy and AdamW's two moments:
14 bytes a trained parameter. The same recipe gives the same run, bit for bit, on the same machine.
"""
