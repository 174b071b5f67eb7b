"""The best step of a trainer, compared with the model that the training ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deltacheck

EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
}


def best_of(one: Any, folder: Path) -> dict[str, Any]:
    """Train, and compare the model with the best step of the root in ``folder``."""
    one.train()
    step = one.state.best_global_step
    saved = deltacheck.open(folder / "deltacheck").restore(step)["model"]
    equal = all(
        bool((saved[name] == value.numpy()).all()) for name, value in one.model.state_dict().items()
    )
    return {"best": step, "equal": equal}
