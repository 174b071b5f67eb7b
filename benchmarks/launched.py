"""Time from a kill to the next optimizer step: `deltacheck run`, and the Trainer's own resume.

The same unmodified training with ``Trainer`` runs twice: under `deltacheck run --restarts`, and in
a loop that starts it again with ``resume_from_checkpoint``. Kills of the two alternate. A training
waits for its kill, so that it takes no processor time while the other one is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit

QUICK_KILLS = 1
# The issue of this figure.
LIMIT = 1.2
SAVE_EVERY, STEPS_PER_LIFE = 5, 12  # two saves, of which the second waits for the first
_SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}


def run(settings: Settings) -> Result:
    """Kill the trainings in turn."""
    kills = QUICK_KILLS if settings.quick else settings.kills
    trainings = {
        "deltacheck run": _Training(settings.folder / "launched", restarts=kills),
        "the trainer's own resume": _Training(settings.folder / "own", restarts=None),
    }
    for _ in range(kills):
        for training in trainings.values():
            training.kill()
    for training in trainings.values():
        training.end()
    launched, own = trainings.values()
    columns: dict[str, Unit] = {
        "kill to next step": "text",
        "times": "count",
        "median": "seconds",
        "least": "seconds",
        "most": "seconds",
        "processor time of the process, median": "seconds",
    }
    rows: list[list[Cell]] = [
        [name, kills, median(times), min(times), max(times), median(training.processor)]
        for name, training in trainings.items()
        for times in (training.seconds,)
    ]
    figures = [
        Figure(
            "run over the trainer's own resume, medians",
            median(launched.seconds) / median(own.seconds),
            LIMIT,
            "number",
        ),
        Figure(
            "the same of processor time",
            median(launched.processor) / median(own.processor),
            LIMIT,
            "number",
        ),
        Figure("restarts from the first step", launched.anew + own.anew, 0, "number"),
    ]
    about = "Trainer, a Llama of 5.3 M parameters in float32 with AdamW, one process, one thread"
    return Result("launched", about, [Table("kills of a training", columns, rows)], figures)


class _Training:
    """A training that is killed and goes on.

    ``restarts``: it runs under `deltacheck run`, which starts it so often again; ``None``: it is
    started again here. ``anew``: the restarts that began with the first step.
    """

    def __init__(self, folder: Path, restarts: int | None) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.anew = 0
        self._own = restarts is None
        self._command = [sys.executable, "-m", "benchmarks.launched", str(folder)]
        if restarts is not None:
            launcher = [sys.executable, "-m", "deltacheck", "run", "--restarts", str(restarts)]
            self._command = [*launcher, "--", *self._command]
        self._start()
        self._until_waiting(self._next())

    def kill(self) -> None:
        """Kill the training, and measure until its next step."""
        begin = time.monotonic()
        os.kill(self._waiting["process"], signal.SIGKILL)
        if self._own:
            self.end(killed=True)
            self._start("own")
        report = self._next()
        self.seconds.append(report["time"] - begin)
        self.processor.append(report["processor"])
        self.anew += report["step"] == 1
        self._until_waiting(report)

    def end(self, *, killed: bool = False) -> None:
        """End the training, of which no restart is left."""
        if not killed:
            os.kill(self._waiting["process"], signal.SIGKILL)
        self._process.communicate()

    def _start(self, *more: str) -> None:
        self._process = subprocess.Popen(
            [*self._command, *more],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"process"'):
                report: dict[str, Any] = json.loads(line)
                return report
        raise RuntimeError(f"the training ended with {self._process.wait()}")

    def _until_waiting(self, report: dict[str, Any]) -> None:
        while not report["waits"]:
            report = self._next()
        self._waiting = report


def work(folder: Path, *, resume: bool) -> None:
    """Train, report each step, and wait for the kill after some."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, _SIZES["vocab_size"], (32,), generator=generator)
            return {"input_ids": tokens, "labels": tokens}

    class Report(TrainerCallback):  # type: ignore[misc]
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1
            waits = self.steps >= STEPS_PER_LIFE
            report = {
                "process": os.getpid(),
                "step": state.global_step,
                "time": time.monotonic(),
                "processor": time.process_time(),
                "waits": waits,
            }
            print(json.dumps(report), flush=True)
            if waits:
                sys.stdin.read()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **_SIZES))
    arguments = TrainingArguments(
        str(folder),
        max_steps=1 << 20,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=Lines(), callbacks=[Report()])
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    work(Path(sys.argv[1]), resume="own" in sys.argv)
