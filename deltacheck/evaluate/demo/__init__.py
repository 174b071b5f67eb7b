"""`deltacheck demo`: a fine-tuning run that is killed, resumes, and is compared bit for bit with
one
that was not.

Read `run.py` first: it is the story. Each child process (`child.py`) plays one part of it;
`text.py`, `model.py`, `optimizer.py` and `train.py` are the training recipe, `checks.py` the
proofs, `report.py` what is printed. `pairs.py` reads data of the user's, for the experiments in
`examples/`, which use most of this. Nothing here imports torch before it is run.
"""
