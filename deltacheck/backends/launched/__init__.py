"""Save and resume the trainings of a command that knows nothing of deltacheck.

``deltacheck run`` starts the command with ``startup/`` at the head of ``PYTHONPATH``. Python then
imports ``sitecustomize.py`` of that folder, which watches the imports of trainers. Once a trainer
begins to train, ``transformers_hook.py``, ``lightning_hook.py`` or ``accelerate_hook.py`` gives it
what a script would pass to it by itself. ``launch_options.py`` is what both sides share.
"""
