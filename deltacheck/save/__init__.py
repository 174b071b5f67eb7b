"""Save a step: capture, encode, write, and commit, behind the training loop."""
