"""Turn JAX trees into leaves, and restored leaves into JAX trees."""
