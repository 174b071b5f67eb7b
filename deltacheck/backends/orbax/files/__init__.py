"""Import plain Orbax checkpoints, and the parts of ``deltacheck eval`` that need JAX."""
