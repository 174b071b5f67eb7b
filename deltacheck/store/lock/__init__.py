"""Keep writers and readers of a root apart: the lease of the writer, and the pins of readers."""
