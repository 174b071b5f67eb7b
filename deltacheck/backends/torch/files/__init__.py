"""Read and write single files as ``torch.save`` does: import, export, drop-in functions."""
