"""Read JAX arrays for a save, and encode them where they are."""
