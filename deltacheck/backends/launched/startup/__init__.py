"""The folder that ``deltacheck run`` puts at the head of ``PYTHONPATH``.

It holds ``sitecustomize.py`` and nothing else that a program could import by mistake.
"""
