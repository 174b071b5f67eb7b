"""Trainings with Lightning for tests/backends/torch/test_lightning.py: python -m
tests.support.lightning_child FOLDER.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

if importlib.util.find_spec("lightning"):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.callbacks import StochasticWeightAveraging as averaging
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.callbacks import StochasticWeightAveraging as averaging
import torch

import deltacheck
from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine, load
from deltacheck.backends.torch.lightning import DeltaCheckIO
from deltacheck.save.job.save_job import SaveJob
from deltacheck.save.saver import Saver
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
    folder: Path,
    *,
    resume: bool = False,
    files: dict[str, Any] | None = None,
    logger: Any = False,
    **net: Any,
) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = Net(**net)
    kept = ModelCheckpoint(
        folder, filename="{epoch}", **({"save_top_k": -1, "save_last": True} | (files or {}))
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=logger,
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


def reported(folder: Path) -> Any:
    """Return what a logger gets about saves, and the number of saves."""
    seen: list[Any] = []
    saves: list[int] = []

    class Memory(pl.loggers.logger.Logger):  # type: ignore[misc]
        name = version = "memory"

        def log_hyperparams(self, params: Any) -> None:
            pass

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.append({key: value for key, value in metrics.items() if "deltacheck" in key})

    save = Engine.save

    def counted(engine: Engine, step: int, state: object, **options: Any) -> Any:
        saves.append(step)
        return save(engine, step, state, **options)

    Engine.save = counted  # type: ignore[method-assign, assignment]
    fit(folder, logger=Memory())
    return {"seen": [numbers for numbers in seen if numbers], "saves": len(saves)}


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
        return {"message": str(error), "left": os.listdir(folder)}
    return None


def averaged(folder: Path) -> Any:
    """The weights are replaced by their average while the last save still reads them."""
    released, last = threading.Event(), 12
    capture, settle, average = SaveJob.capture, Saver.settle_reads, averaging.transfer_weights

    def capture_late(job: SaveJob, *sources: Any) -> None:
        if job.request.step == last:
            assert released.wait(240)
        capture(job, *sources)

    def settle_and_release(saver: Saver) -> bool:
        released.set()
        return settle(saver)

    def average_and_release(source: Any, target: Any) -> None:
        average(source, target)
        released.set()

    class Begun(DeltaCheckIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], *more: Any, **options: Any) -> None:
            if checkpoint["global_step"] == last:
                released.clear()
            super().save_checkpoint(checkpoint, *more, **options)

    SaveJob.capture = capture_late  # type: ignore[method-assign, assignment]
    Saver.settle_reads = settle_and_release  # type: ignore[method-assign]
    averaging.transfer_weights = staticmethod(average_and_release)
    trained(folder, [Begun()], averaging(0.01, 2), ModelCheckpoint(folder, filename="{step}"))
    return deltacheck.open(folder / "deltacheck").steps()


def foreign(folder: Path) -> Any:
    """A file of Lightning itself is read, replaced and removed; one with code is refused."""
    io = DeltaCheckIO()
    file = folder / "foreign.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}}, file)
    found = {"read": io.load_checkpoint(file)["state_dict"]["w"].tolist()}
    io.save_checkpoint({"global_step": 1, "w": torch.zeros(2)}, file)
    found["replaced"] = load(file)["w"].tolist()
    torch.save({}, folder / "removed.ckpt")
    io.remove_checkpoint(folder / "removed.ckpt")
    io.teardown()
    found["removed"] = not (folder / "removed.ckpt").exists()
    torch.save({"run": Opened()}, file)
    try:
        DeltaCheckIO().load_checkpoint(file)
    except deltacheck.errors.Damaged as error:
        found["refused"] = str(error)
    found["unpickled"] = Path("unpickled").exists()
    return found


class Opened:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def failing(folder: Path) -> Any:
    """A save that fails behind the training is raised by the next call, and the file that was there
    stays.
    """
    io = DeltaCheckIO()
    io.save_checkpoint({"global_step": 1, "w": torch.ones(4)}, folder / "a.ckpt")
    assert io._engine is not None
    io._engine._writer.commit = broken  # type: ignore[method-assign, assignment]
    with io._saving_in_background(folder / "a.ckpt"):
        io.save_checkpoint({"global_step": 2, "w": torch.zeros(4)}, folder / "a.ckpt")
    for task in io._under_way:
        assert task.work.wait(240)
    raised = ""
    try:
        io.save_checkpoint({"global_step": 3, "w": torch.zeros(4)}, folder / "a.ckpt")
    except deltacheck.errors.SaveFailed as error:
        raised = str(error)
    io.teardown()
    return {"raised": raised, "kept": load(folder / "a.ckpt")["w"].tolist()}


def logged(folder: Path) -> Any:
    """With ``on_error="log"`` a failed save leaves no file, and too many in a row are raised."""
    io = DeltaCheckIO(options=SaveOptions(on_error="log", max_failures=2))

    def save(step: int, is_broken: bool = False) -> None:
        commit = None if io._engine is None else io._engine._writer.commit
        if io._engine is not None and is_broken:
            io._engine._writer.commit = broken  # type: ignore[method-assign, assignment]
        io.save_checkpoint({"global_step": step, "w": torch.ones(4)}, folder / f"{step}.ckpt")
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


def same_names(folder: Path) -> Any:
    """The files of Lightning's own checkpoint IO and of ours, by case."""
    every = {"every_n_train_steps": 1, "monitor": "loss"}
    cases: dict[str, dict[str, Any]] = {
        "top 3": {"filename": "{epoch}", "save_top_k": 3, **every},
        "top 2, one name": {"filename": "test", "save_top_k": 2, "mode": "max", **every},
        "all, one name": {"filename": "test", "save_top_k": -1, "every_n_train_steps": 1},
        "last as link": {"filename": "{epoch}", "save_top_k": 3, "save_last": "link", **every},
    }
    return {
        case: [named(folder / f"{case}-{number}", plugins, options) for number, plugins in both]
        for case, options in cases.items()
        for both in [((0, []), (1, [DeltaCheckIO()]))]
    }


def named(folder: Path, plugins: list[Any], options: dict[str, Any]) -> Any:
    trainer = trained(folder, plugins, ModelCheckpoint(folder, **options))
    callback = trainer.checkpoint_callback
    io = DeltaCheckIO()
    return {
        "files": {p.name: digest(io.load_checkpoint(p)["state_dict"]) for p in ckpts(folder)},
        "best": sorted((Path(k).name, float(v)) for k, v in callback.best_k_models.items()),
        "last": Path(callback.last_model_path).name,
    }


def trained(folder: Path, plugins: list[Any], *callbacks: Any) -> Any:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        plugins=plugins,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        default_root_dir=folder,
    )
    trainer.fit(Net())
    return trainer


def ckpts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ckpt"))


def links(folder: Path) -> Any:
    io = DeltaCheckIO()
    io.save_checkpoint({"global_step": 0, "w": torch.zeros(1)}, folder / "best.ckpt")
    for link in ("last.ckpt", "gone.ckpt"):
        (folder / link).symlink_to("best.ckpt")
    io.save_checkpoint({"global_step": 1, "w": torch.ones(1)}, folder / "last.ckpt")
    io.remove_checkpoint(folder / "gone.ckpt")
    io.teardown()
    return {path.name: load(path)["w"].tolist() for path in ckpts(folder)}


class Killing(pl.Callback):  # type: ignore[misc]
    """Ends the process right after it has saved."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            for name in ("hpc_ckpt_1.ckpt", "mine.ckpt"):
                trainer.save_checkpoint(Path(trainer.default_root_dir, name))
            os.kill(os.getpid(), signal.SIGKILL)


def killed_after_a_save(folder: Path) -> Any:
    process = forked(lambda: trained(folder, [DeltaCheckIO()], Killing()) and None)
    steps = {path.name: load(path)["global_step"] for path in ckpts(folder)}
    return {"process": process, "steps": steps}


def outside(folder: Path) -> Any:
    trainer = trained(folder, [DeltaCheckIO()])
    trainer.save_checkpoint(folder / "after.ckpt")
    own = [t.name for t in threading.enumerate() if t.name.startswith("deltacheck-")]
    # The process-wide reader serves every root.
    own = [name for name in own if name not in ("deltacheck-reader", "deltacheck-grace")]
    copied = pickle.loads(pickle.dumps(trainer.strategy.checkpoint_io))  # noqa: S301 - its own bytes
    equal = digest(copied.load_checkpoint(folder / "after.ckpt")["state_dict"]) == digest(
        trainer.model.state_dict()
    )
    with Engine(folder / "deltacheck") as engine:
        return {"threads": own, "steps": engine.steps(), "copy is equal": equal}


def continued(folder: Path) -> Any:
    weights = torch.randn(40_000)
    for step in (1, 2):
        io = DeltaCheckIO()
        path = folder / f"{step}.ckpt"
        content = {"global_step": step, "w": weights, "b": torch.full((4,), float(step))}
        if step == 2:
            content = {**io.load_checkpoint(folder / "1.ckpt"), **content}
        before = stored_bytes(folder)
        io.save_checkpoint(content, path)
        io.teardown()
        written = stored_bytes(folder) - before
        if step == 1:
            whole = written
    return {
        "whole": whole,
        "written": written,
        "equal": torch.equal(load(folder / "2.ckpt")["w"], weights),
    }


def stored_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


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
        "reported",
        "removed",
        "content",
        "refused",
        "averaged",
        "foreign",
        "failing",
        "logged",
        "same_names",
        "links",
        "killed_after_a_save",
        "outside",
        "continued",
    )
    run_all({name: globals()[name] for name in names}, Path(sys.argv[1]))
