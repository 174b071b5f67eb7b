"""Scripts that know nothing of deltacheck, for ``deltacheck run``.

Each takes a folder and a file for its result. If ``KILL_AT`` is set, it gets the signal ``KILL_BY``
(SIGKILL) in that step, once: the folder remembers it.
"""
