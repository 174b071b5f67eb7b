"""The demo: an evaluation whose killed run is saved in six ways, and resumed from each.

``demonstration.py`` has the plan of ``deltacheck.evaluate`` and shows the result, ``results.py``
its judgement and tables, ``demo_figures.py`` and ``evaluation_figures.py`` its figures.
``methods.py`` lists the ways of saving, ``savers.py`` performs them. Nothing here imports torch
before the demo runs.
"""
