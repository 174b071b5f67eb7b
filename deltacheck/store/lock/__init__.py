"""Keep the processes of a root apart: the lease of the writer, the pins of readers, the ranks."""
