"""Bytes of a save in other layouts of a training state, beside the training of the demo itself."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks import prepared
from benchmarks.demo.methods import AUTO, EXACT, LAW
from benchmarks.layouts import LAYOUTS, Layout
from benchmarks.schedules import Course, saved_under
from benchmarks.workloads.recipe import Recipe
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
    pace = every, _SAVES_QUICK if quick else _SAVES
    return {
        layout.name: _shares(layout, prepared.recipe_of(layout.task, size), pace, folder)
        for layout in LAYOUTS
        if layout.name in OTHER_LAYOUTS
    }


def _shares(
    layout: Layout, recipe: Recipe, pace: tuple[int, int], folder: Path
) -> dict[str, float]:
    place = folder / layout.name.replace(" ", "-")
    place.mkdir()
    course = Course(layout.name, lambda folder: layout.start(recipe), *pace)
    training = layout.start(recipe)
    saved = saved_under(training, course, _POLICIES, place, peer=training.torch_save)
    return {key: mean(saves.shares) for key, saves in saved.items()}
