"""A root whose names try to become markup, scripts, paths or another direction of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deltacheck.backends.torch import Engine

NAMES = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</td></table><h1>owned</h1>",
    "&lt;b&gt;&amp;",
    "javascript:document.title='owned'",
    "right\u202eot tfel",
    "isolate\u2066d\u2069",
    "line\nbreak",
    "paragraph\u2029end",
    "zero\u200bwidth",
    "../../../etc/passwd",
    "\x1b[31mred",
    "constructor",
    "__proto__",
)
STEPS = (0, 1)


def save_hostile(root: Path) -> None:
    """Save two steps whose keys, texts and metrics are ``NAMES``."""
    with Engine(root) as engine:
        for step in STEPS:
            state = {
                "arrays": {name: np.full(4, step, np.float32) for name in NAMES},
                "texts": [f"{name}{step}" for name in NAMES],
            }
            engine.save(step, state, metrics=dict.fromkeys(NAMES, float(step))).wait()
