"""Read the tensors of a state for a save, and encode them in place."""
