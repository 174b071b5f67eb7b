"""The plan of one demo: every size, rate and seed, in one record that each child process reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo does. The defaults fit two slow cores in well under four minutes."""

    seed: int
    threads: int = 2  # fixed, so that training repeats bit for bit

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 256  # bytes that the model sees
    dropout: float = (
        0.1  # in fine-tuning: makes the state of torch's generator a part of a correct resume
    )

    batch: int = 8
    pretrain_steps: int = 100
    pretrain_rate: float = 1e-3
    steps: int = 40  # of fine-tuning
    # At its peak; post-training rates lie between 1e-6 and 1e-5, where few bf16 weights move in a
    # step
    rate: float = 5e-6
    every: int = 4  # steps between two checkpoints

    def checkpoints(self) -> list[int]:
        """The steps that are saved: every `every`-th, and the last."""
        return sorted({*range(self.every, self.steps + 1, self.every), self.steps})

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / "plan.json").read_text()))


def tiny(seed: int) -> Plan:
    """The same story in a fraction of the time, with a model too small to say anything about sizes
    or speed.
    """
    return Plan(
        seed=seed,
        threads=1,
        width=128,
        layers=2,
        heads=2,
        context=192,
        batch=4,
        pretrain_steps=10,
        steps=18,
        every=3,
    )
