"""The only rooms where a framework is imported: one folder each."""
