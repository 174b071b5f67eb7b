"""The GPU kit: everything that needs a GPU, in one folder, for a machine without network.

``build.py`` makes the folder. ``run.py`` becomes its command. Each part is a module with ``STEPS``.
"""
