"""Save and restore with several JAX processes."""
