"""Part 6: a device whose memory others use, too."""

from __future__ import annotations

from tests.gpu_kit.memory_saver import save_between_pauses
from tests.gpu_kit.steps import Step
from tests.gpu_kit.two_processes import save_together

STEPS = (
    Step("saves between pauses of torch_memory_saver", save_between_pauses, ("torch",), 30),
    Step("two processes on one device", save_together, ("torch",), 30),
)
