"""Trainings with Lightning for tests/backends/torch/test_lightning.py: python -m
tests.support.lightning_child FOLDER.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

if importlib.util.find_spec("lightning"):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
import torch

import deltacheck
from deltacheck.backends.torch import load
from deltacheck.backends.torch.lightning import DeltaCheckIO
from tests.support import data_kills
from tests.support.forked import digest, example, forked, run_all

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EPOCHS = 4


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int = 8, extra: Any = None, kill_in: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("width", "extra")
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        self.kill_in = kill_in

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if self.current_epoch == self.kill_in and number == 1:
            while not Path(
                self.trainer.default_root_dir, "last.ckpt"
            ).exists():  # of an epoch before; it appears by itself
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> Any:
        lines = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(list(lines), batch_size=4, shuffle=True)


def fit(
    folder: Path, *, resume: bool = False, files: dict[str, Any] | None = None, **net: Any
) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = Net(**net)
    kept = ModelCheckpoint(
        folder, filename="{epoch}", **({"save_top_k": -1, "save_last": True} | (files or {}))
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=[kept],
        plugins=[DeltaCheckIO(rng=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, ckpt_path=folder / "last.ckpt" if resume else None)
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "state": digest([module.state_dict(), optimizer, torch.get_rng_state()]),
        "step": trainer.global_step,
        "files": sorted(os.listdir(folder)),
        "steps": deltacheck.open(folder / "deltacheck").steps(),
    }


def killed_and_resumed(folder: Path) -> Any:
    for name in ("whole", "parts"):
        (folder / name).mkdir()
    return {
        "whole": forked(lambda: fit(folder / "whole")),
        "killed": forked(lambda: fit(folder / "parts", kill_in=2)),
        "resumed": forked(lambda: fit(folder / "parts", resume=True)),
    }


def removed(folder: Path) -> Any:
    """Lightning keeps the best two; the others and their steps are gone."""
    return fit(
        folder, files={"save_top_k": 2, "monitor": "loss", "mode": "max", "save_last": False}
    )


def content(folder: Path) -> Any:
    fit(folder, extra={"list": [1, 2.5, None], "text": "a"})
    found = load(folder / "last.ckpt", map_location="cpu")
    again = DeltaCheckIO().load_checkpoint(folder / "last.ckpt")
    return {
        "parameters": found["hyper_parameters"],
        "keys": sorted(found),
        "own": sorted(again.keys() ^ found.keys()),
        "weights": digest(found["state_dict"]) == digest(again["state_dict"]),
    }


def refused(folder: Path) -> Any:
    try:
        fit(folder, extra={"folder": Path("somewhere")})
    except TypeError as error:
        return str(error)
    return None


def foreign(folder: Path) -> Any:
    torch.save({"state_dict": {}}, folder / "foreign.ckpt")
    try:
        DeltaCheckIO().load_checkpoint(folder / "foreign.ckpt")
    except deltacheck.errors.NotACheckpointRoot as error:
        return str(error)
    return None


def failing(folder: Path) -> Any:
    """A save that fails behind the training is raised by the next call, and the file that was there
    stays.
    """
    io = DeltaCheckIO()
    io.save_checkpoint({"global_step": 1, "w": torch.ones(4)}, folder / "a.ckpt")
    io._settle()
    assert io._engine is not None
    io._engine._writer.commit = broken  # type: ignore[method-assign, assignment]
    io.save_checkpoint({"global_step": 2, "w": torch.zeros(4)}, folder / "a.ckpt")
    concurrent.futures.wait(io._under_way)
    raised = ""
    try:
        io.save_checkpoint({"global_step": 3, "w": torch.zeros(4)}, folder / "a.ckpt")
    except deltacheck.errors.SaveFailed as error:
        raised = str(error)
    io.teardown()
    return {"raised": raised, "kept": load(folder / "a.ckpt")["w"].tolist()}


def logged(folder: Path) -> Any:
    """With ``on_error="log"`` a failed save leaves no file, and too many in a row are raised."""
    io = DeltaCheckIO(on_error="log", max_failures=2)

    def save(step: int, is_broken: bool = False) -> None:
        commit = None if io._engine is None else io._engine._writer.commit
        if io._engine is not None and is_broken:
            io._engine._writer.commit = broken  # type: ignore[method-assign, assignment]
        io.save_checkpoint({"global_step": step, "w": torch.ones(4)}, folder / f"{step}.ckpt")
        io._settle()
        if io._engine is not None and commit is not None:
            io._engine._writer.commit = commit  # type: ignore[method-assign]

    save(0)
    save(1, is_broken=True)
    save(2)
    files = sorted(path.name for path in folder.glob("*.ckpt"))
    save(3, is_broken=True)
    save(4, is_broken=True)
    raised = ""
    try:
        save(5)
    except deltacheck.errors.SaveFailed as error:
        raised = str(error)
    io.teardown()
    return {"raised": raised, "files": files}


def broken(manifest: object) -> int:
    raise OSError(28, "No space left on device")


def data_position(folder: Path) -> Any:
    """Kills at any batch: the loaders of Lightning continue where they were."""
    kinds = [kind for kind in data_kills.present() if "Lightning" in kind]
    return {kind: data_kills.killed(kind, folder / kind, 3, 1) for kind in kinds}


def examples(folder: Path) -> Any:
    if not importlib.util.find_spec("lightning"):
        return None
    return [
        forked(lambda epochs=epochs: example("lightning_trainer.py", folder, "--epochs", epochs))
        for epochs in (1, 2)
    ]  # type: ignore[misc]


if __name__ == "__main__":
    names = (
        "examples",
        "data_position",
        "killed_and_resumed",
        "removed",
        "content",
        "refused",
        "foreign",
        "failing",
        "logged",
    )
    run_all({name: globals()[name] for name in names}, Path(sys.argv[1]))
