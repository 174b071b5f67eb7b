"""A training with Lightning and its default checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.unmodified.killed import digest, kill_once, write

FOLDER, RANK = Path(sys.argv[1]), os.environ.get("RANK", "")


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        kill_once(FOLDER, self.global_step)
        if RANK and self.global_step == 0:
            torch.manual_seed(int(RANK))  # other dropout on each rank
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        lines = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(list(lines), batch_size=4, shuffle=True)


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    module = Net()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        **({"devices": 2, "strategy": "ddp"} if RANK else {}),
        callbacks=[ModelCheckpoint(FOLDER, "last", save_weights_only="WEIGHTS_ONLY" in os.environ)],
    )
    trainer.fit(module)
    # The files of a checkpoint, as scripts read them.
    for loaded in (
        torch.load(FOLDER / "last.ckpt"),
        Net.load_from_checkpoint(FOLDER / "last.ckpt"),
    ):
        weights = loaded["state_dict"] if isinstance(loaded, dict) else loaded.state_dict()
        assert digest(weights) == digest(module.state_dict())
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), torch.get_rng_state()]
    write(f"{sys.argv[2]}{RANK}", {"state": digest(state), "step": trainer.global_step})
