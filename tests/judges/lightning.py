"""Compare Lightning's checkpoints with and without our plugin: python -m tests.judges.lightning.

Each case is a sequence of calls from Lightning's documentation of ``ModelCheckpoint`` and
``Trainer``. It runs once with Lightning's own checkpoint IO and once with ``DeltaCheckIO``. The
names of files, the attributes of ``ModelCheckpoint`` and the weights of every file must be equal.
Differences are printed as a table, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from deltacheck.backends.torch.lightning import DeltaCheckIO

STEPS, EPOCHS = 6, 3


class Net(pl.LightningModule):  # type: ignore[misc]
    """Logs a loss that goes up and down, so that the best checkpoints are not the newest."""

    def __init__(self, fails_at: int = -1, saves_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails_at, self.saves_at = fails_at, saves_at

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        step = self.trainer.global_step
        if step == self.fails_at:
            raise RuntimeError("a planned failure")
        if step == self.saves_at:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "manual.ckpt"))
        self.log("loss", float((step * 5) % 7))
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        rows = torch.randn(STEPS, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(list(rows), batch_size=1)


class Run:
    """One side of a comparison: a folder, and the plugin or Lightning's own checkpoint IO."""

    def __init__(self, folder: Path, is_ours: bool) -> None:
        self.folder, self.is_ours = folder, is_ours
        self.found: dict[str, Any] = {}

    def fit(
        self,
        *,
        ckpt_path: str | None = None,
        epochs: int = EPOCHS,
        net: dict[str, int] | None = None,
        own: bool = False,
        more: tuple[Any, ...] = (),
        **options: Any,
    ) -> pl.Trainer:
        """Train; ``own``: with Lightning's own checkpoint IO on both sides."""
        pl.seed_everything(0, verbose=False)
        self.callback = ModelCheckpoint(self.folder, **options)
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            callbacks=[self.callback, *more],
            plugins=[DeltaCheckIO()] if self.is_ours and not own else [],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
        )
        path = None if ckpt_path is None else ckpt_path
        if path is not None and path not in ("last", "best", "hpc"):
            path = str(self.folder / path)
        try:
            trainer.fit(Net(**(net or {})), ckpt_path=path)
        except RuntimeError as error:
            if "planned" not in str(error):
                raise
        self.note(trainer)
        return trainer

    def note(self, trainer: pl.Trainer) -> None:
        """Record the files, the attributes and the weights."""
        number = len(self.found)
        named = self.callback

        def name(path: object) -> str:
            return os.path.relpath(str(path), self.folder) if path else ""

        files = {}
        for path in sorted(self.folder.glob("*.ckpt*")):
            content = DeltaCheckIO().load_checkpoint(path)
            weights = content["state_dict"]["layer.weight"].tolist()
            link = os.readlink(path) if path.is_symlink() else None
            files[path.name] = (weights, content["global_step"], link)
        self.found[f"{number}"] = {
            "files": files,
            "best": name(named.best_model_path),
            "last": name(named.last_model_path),
            "best_k": {name(k): float(v) for k, v in named.best_k_models.items()},
            "weights": trainer.lightning_module.layer.weight.tolist(),
            "step": trainer.global_step,
        }


def options(**options: Any) -> Callable[[Run], object]:
    return lambda run: run.fit(**options)


def resumed(path: str, own: bool = False, **options: Any) -> Callable[[Run], object]:
    def case(run: Run) -> None:
        run.fit(epochs=2, own=own, **options)
        run.fit(epochs=4, ckpt_path=path, **options)

    return case


def outside(run: Run) -> None:
    trainer = run.fit(save_top_k=1)
    for name in ("after.ckpt", "after.ckpt", "again.ckpt"):
        trainer.save_checkpoint(run.folder / name)
    run.note(trainer)


def repeated(run: Run) -> None:
    for _ in range(2):
        run.fit(save_top_k=-1, save_last=True, filename="{epoch}")


def slurm(run: Run) -> None:
    trainer = run.fit(save_top_k=1)
    for _ in range(2):
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(run.folder)))
    run.note(trainer)
    run.fit(epochs=4, ckpt_path="hpc")


def by_every(**more: Any) -> dict[str, Any]:
    return {"every_n_train_steps": 2, "save_top_k": 3, "monitor": "loss", **more}


CASES: dict[str, Callable[[Run], object]] = {
    "default": options(),
    "top 3, colliding {epoch}": options(filename="{epoch}", **by_every()),
    "top 2 max, colliding": options(filename="{epoch}", **by_every(save_top_k=2, mode="max")),
    "top 2, one name": options(filename="test", **by_every(save_top_k=2)),
    "all, one name": options(filename="test", save_top_k=-1),
    "all, one name, every 2": options(filename="test", save_top_k=-1, every_n_train_steps=2),
    "all monitored, one name": options(filename="test", **by_every(save_top_k=-1)),
    "metric in name": options(filename="{epoch:02d}-{step}-{loss:.2f}", **by_every()),
    "no metric names": options(
        filename="e{epoch}-l{loss:.1f}", auto_insert_metric_name=False, **by_every()
    ),
    "no version counter": options(
        filename="test", save_top_k=-1, every_n_train_steps=2, enable_version_counter=False
    ),
    "top 0, last": options(save_top_k=0, save_last=True),
    "top 1, every step": options(every_n_train_steps=1),
    "top 1 monitored, every step": options(monitor="loss", every_n_train_steps=1, filename="x"),
    "last": options(save_last=True, **by_every()),
    "last as link": options(save_last="link", **by_every()),
    "last as link, all": options(save_last="link", save_top_k=-1, filename="{epoch}"),
    "weights only": options(save_weights_only=True, filename="test", **by_every()),
    "epochs": options(every_n_epochs=2, save_top_k=-1),
    "save_on_exception": options(save_on_exception=True, net={"fails_at": 9}, save_last=True),
    "in training_step": options(net={"saves_at": 7}),
    "outside of fit": outside,
    "twice in one folder": repeated,
    "slurm": slurm,
    "resume from last": resumed("last", save_last=True, filename="{epoch}", **by_every()),
    "resume from a link": resumed("last", save_last="link", filename="{epoch}", **by_every()),
    "resume from a name": resumed("epoch=0.ckpt", filename="{epoch}", save_top_k=-1),
    "resume of Lightning's own": resumed("last", own=True, save_last=True, **by_every()),
    "on exception": lambda run: run.fit(
        net={"fails_at": 8}, more=(OnExceptionCheckpoint(run.folder),)
    ),
}


def killed(folder: Path, is_ours: bool, name: str) -> dict[str, Any]:
    """Kill a process right after ``trainer.save_checkpoint``, within and outside of a training."""
    command = [sys.executable, "-m", "tests.judges.lightning", "--kill", name, str(folder)]
    subprocess.run([*command, *(["--ours"] if is_ours else [])], check=False)
    return {
        path.name: DeltaCheckIO().load_checkpoint(path)["global_step"]
        for path in sorted(folder.glob("*.ckpt"))
    }


def kill_after(folder: Path, is_ours: bool, name: str) -> None:
    run = Run(folder, is_ours)

    class Killing(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(folder / name)
                os.kill(os.getpid(), 9)

    run.fit(more=(Killing(),))


def differences(ours: Any, stock: Any, place: str = "") -> list[tuple[str, str, str]]:
    if isinstance(ours, dict) and isinstance(stock, dict):
        return [
            row
            for key in sorted({*ours, *stock})
            for row in differences(ours.get(key), stock.get(key), f"{place}/{key}")
        ]
    return [] if ours == stock else [(place, str(stock)[:60], str(ours)[:60])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kill", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", default=[""], help="parts of names of cases")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    if arguments.kill:
        name, folder = arguments.kill
        kill_after(Path(folder), arguments.ours, name)
        return 0
    rows: list[tuple[str, str, str, str]] = []
    count = 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary).resolve()

        def both(name: str, run: Callable[[Path, bool], Any]) -> None:
            nonlocal count
            if not any(part in name for part in arguments.cases):
                return
            count += 1
            found = []
            for is_ours in (False, True):
                folder = base / f"{count}-{is_ours}"
                folder.mkdir()
                try:
                    found.append(run(folder, is_ours))
                except Exception:  # noqa: BLE001 - a row of the table
                    found.append({"error": traceback.format_exc()[-300:]})
            rows.extend((name, *row) for row in differences(found[1], found[0]))

        def recorded(folder: Path, is_ours: bool, case: Callable[[Run], object]) -> Any:
            run = Run(folder, is_ours)
            case(run)
            return run.found

        for name, case in CASES.items():
            both(name, lambda folder, ours, case=case: recorded(folder, ours, case))
        for file in ("manual.ckpt", "hpc_ckpt_1.ckpt"):
            both(f"killed after {file}", lambda f, ours, file=file: killed(f, ours, file))
    for row in rows:
        print(" | ".join(row))
    print(f"{count} cases, {len({row[0] for row in rows})} with differences")
    return bool(rows)


if __name__ == "__main__":
    sys.exit(main())
