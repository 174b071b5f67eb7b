"""Lightning with delta checkpoints: one plugin.

Stop it or kill it; the next run continues from the newest checkpoint.

    python examples/lightning_trainer.py FOLDER --epochs 2
    python examples/lightning_trainer.py FOLDER --epochs 4    # continues
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from deltacheck.backends.torch.lightning import DeltaCheckIO

arguments = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
arguments.add_argument("folder", type=Path)
arguments.add_argument("--epochs", type=int, default=2)
options = arguments.parse_args()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        return torch.utils.data.DataLoader(list(torch.randn(40, 32)), batch_size=8, shuffle=True)


pl.seed_everything(0)
last = options.folder / "last.ckpt"
trainer = pl.Trainer(
    max_epochs=options.epochs,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(options.folder, filename="{epoch}", save_top_k=-1, save_last=True)],
    # This plugin is the only change. The command `deltacheck` shows FOLDER/deltacheck.
    plugins=[DeltaCheckIO(rng=True)],
)
resuming = last.exists()
trainer.fit(Net(), ckpt_path=last if resuming else None)
print(f"at epoch {trainer.current_epoch}, {'resumed' if resuming else 'from the beginning'}")
