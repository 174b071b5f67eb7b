"""Bytes of a save in other layouts of a training state, beside the training of the demo itself."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks import layouts, prepared
from benchmarks.demo.methods import AUTO, EXACT, LAW
from benchmarks.schedules import Course, saved_under
from deltacheck import Policy

OTHER_LAYOUTS = ("float32 weights", "LoRA on frozen bfloat16 weights")
_POLICIES = {EXACT: Policy.exact(), AUTO: Policy.auto(), LAW: Policy.exact(law=True)}
_SAVES, _SAVES_QUICK = 12, 4


def measure(every: int, folder: Path, *, quick: bool) -> dict[str, dict[str, float]]:
    """Save a short fine-tuning in each of ``OTHER_LAYOUTS``.

    Args:
        every: Steps between two saves.
        folder: For the checkpoints.
        quick: Use a tiny model and few saves.

    Returns:
        By layout and key of the way: mean bytes of a save, the first included, of those of
        ``torch.save``.
    """
    size = prepared.SIZES["tiny" if quick else "small"]
    shares: dict[str, dict[str, float]] = {}
    for layout in layouts.LAYOUTS:
        if layout.name not in OTHER_LAYOUTS:
            continue
        recipe = prepared.recipe_of(layout.task, size)
        place = folder / layout.name.replace(" ", "-")
        place.mkdir()
        course = Course(
            layout.name,
            lambda _, layout=layout, recipe=recipe: layout.start(recipe),
            every,
            _SAVES_QUICK if quick else _SAVES,
        )
        training = layout.start(recipe)
        saved = saved_under(training, course, _POLICIES, place, peer=training.torch_save)
        shares[layout.name] = {key: mean(saves.shares) for key, saves in saved.items()}
    return shares
