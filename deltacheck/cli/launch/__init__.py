"""The ``run`` command: start a training command that saves and resumes without an edit.

``launcher.py`` checks the root, starts the command and reports, ``command_probe.py`` finds out
before the start whether the command can be reached, and ``attempts.py`` runs it.
"""
