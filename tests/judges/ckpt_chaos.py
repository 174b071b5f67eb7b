"""Let ckpt-chaos kill trainings at each file event of their saves: `make chaos-judge`.

It is an independent tool (https://pypi.org/project/ckpt-chaos): it runs a training once to record
each file that is made, renamed or removed, then kills a new run at each of these events, or tears
the file, resumes it, and compares the result with that of the first run. A run that does not resume
from the newest complete checkpoint counts as lost work.

Its replacement for TensorStore's arrays is left out: its ``write`` returns nothing, where that of
TensorStore returns futures. ``make crash-test`` kills at the calls below Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SEED, STEPS = 0, 5
# The points at which a training is killed, of about 90 events.
POINTS = 40


def _train_with_engine(folder: Path) -> None:
    import torch

    from deltacheck.backends.torch import Engine

    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with Engine(folder / "run") as engine:
        engine.guard(optimizer)
        newest = engine.latest_step()
        if newest is not None:
            saved = engine.restore()
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        first = 0 if newest is None else newest + 1
        print(f"resumed from step {first}", flush=True)
        for step in range(first, STEPS):
            batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            engine.save(step, state)
    _write_result(folder, model)


def _train_with_trainer(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from deltacheck.backends.torch.trainer import DeltaCheckCallback

    torch.manual_seed(SEED)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))
    texts = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder / "run"),
            max_steps=STEPS,
            save_steps=1,
            per_device_train_batch_size=8,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[DeltaCheckCallback()],
    )
    trainer.train()
    print(f"resumed from step {trainer._initial_global_step}", flush=True)
    _write_result(folder, model)


def _write_result(folder: Path, model: object) -> None:
    import numpy as np
    import torch

    assert isinstance(model, torch.nn.Module)
    weights = [value.detach().numpy().reshape(-1) for value in model.parameters()]
    (folder / "weights").write_bytes(np.concatenate(weights).tobytes())


TRAININGS: dict[str, Callable[[Path], None]] = {
    "engine": _train_with_engine,
    "trainer": _train_with_trainer,
}


def _judge(name: str, folder: Path) -> int:
    """Let ckpt-chaos judge a training; return its exit status."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(folder / name)]
    command += ["--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/weights"]
    command += ["--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK"]
    command += ["--modes", "before,torn,term", "--max-points", str(POINTS), "--jobs", "2"]
    training = [sys.executable, str(Path(__file__).resolve()), "--train", name, "{out}"]
    return subprocess.run([*command, "--", *training], check=False).returncode


def main() -> int:
    """Judge each training, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", choices=sorted(TRAININGS))
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    if options.train:
        # After torch, whose writers the tool counts, and before TensorStore.
        import torch  # noqa: F401

        sys.meta_path[:] = [
            finder
            for finder in sys.meta_path
            if not type(finder).__module__.startswith("ckpt_chaos")
        ]
        TRAININGS[options.train](options.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return max(_judge(name, Path(folder)) for name in TRAININGS)


if __name__ == "__main__":
    sys.exit(main())
