"""Save and restore with a ``torch.distributed`` process group."""
