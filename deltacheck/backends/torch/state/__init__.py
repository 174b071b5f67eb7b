"""Turn PyTorch states into leaves, and restored leaves into PyTorch states."""
