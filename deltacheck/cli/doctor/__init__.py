"""The command ``doctor``: what this machine and a root lack.

``inventory.py`` collects facts, ``environment.py`` has their records, and ``diagnosis.py`` judges
them, as pure functions.
"""
