"""Read tensors for a save, and encode them where they are."""
