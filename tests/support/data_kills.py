"""Kill trainings at random moments, and compare the samples that were trained on.

The numbers of the samples are part of the state, as weights are: a step is what was trained on up
to it. ``python -m tests.support.data_kills FOLDER --kills 100`` prints the result for each kind of
loader, and ends with 1 if a sample was skipped or repeated.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch.utils.data import DataLoader, DistributedSampler

import deltacheck
from deltacheck import Keep, SaveOptions
from deltacheck.backends.torch import Engine, ResumableLoader
from examples.rollout_queue import RolloutQueue

SAMPLES = 23  # the last batch is smaller
BATCH = 4
MOMENTS = ("before the save", "during the save", "after the save")
# Nothing is synced: a process that is killed loses no write.
OPTIONS = SaveOptions(durability="process", shadow="host")
ENGINE: dict[str, Any] = {"keep": Keep(last=2), "options": OPTIONS}


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Kill:
    """Kills this process at a moment of a batch. ``batches`` of 0: never, and nothing is saved."""

    def __init__(self, batches: int = 0, moment: str = "") -> None:
        self.batches = batches
        self.moment = moment
        self._done = 0

    def begin(self) -> None:
        """A batch was trained on, and is not saved yet."""
        self._done += 1
        self._at(MOMENTS[0])

    def saving(self, wait: Callable[[], object]) -> None:
        """The save of the batch was begun."""
        self._at(MOMENTS[1])
        if self._done == self.batches:
            wait()
        self._at(MOMENTS[2])

    @property
    def has_begun(self) -> bool:
        """Return true after the first batch."""
        return self._done > 0

    def _at(self, moment: str) -> None:
        if (self._done, self.moment) == (self.batches, moment):
            os.kill(os.getpid(), signal.SIGKILL)


class Trained:
    """The samples that were trained on, and random numbers as of dropout."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.drawn: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        self.samples += batch.tolist()
        self.drawn.append(torch.rand(()).item())

    def state_dict(self) -> dict[str, Any]:
        return {"samples": torch.tensor(self.samples), "drawn": torch.tensor(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.drawn = state["samples"].tolist(), state["drawn"].tolist()

    def result(self) -> dict[str, Any]:
        return {"samples": self.samples, "drawn": self.drawn}


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), BATCH, shuffle=True, **options)


def plain(**options: Any) -> Any:
    return ResumableLoader(DataLoader(Numbers(), BATCH, shuffle=True, **options))


def sampler() -> Any:
    halves = DistributedSampler(Numbers(), num_replicas=2, rank=1)
    return ResumableLoader(DataLoader(Numbers(), BATCH, sampler=halves))


def accelerate_plain() -> Any:
    from accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(DataLoader(Numbers(), BATCH, shuffle=True))
    return ResumableLoader(prepared)


def loop(make: Callable[[], Any], folder: Path, samples: int, kill: Kill) -> dict[str, Any]:
    """Train until ``samples`` samples at least, with a save after each batch."""
    torch.manual_seed(7)
    loader, trained, step = make(), Trained(), 0
    with Engine(folder, **ENGINE) as engine:
        batches = None
        if engine.steps():
            step = engine.steps()[-1]
            saved = engine.restore()
            trained.load_state_dict(saved["trained"])
            loader.load_state_dict(saved["data"])
            # A StatefulDataLoader draws from torch's generator when an iteration begins.
            batches = iter(loader)
            torch.set_rng_state(saved["rng"])
        while len(trained.samples) < samples:
            for batch in iter(loader) if batches is None else batches:
                trained.step(batch)
                kill.begin()
                step += 1
                if kill.batches:
                    state = {
                        "trained": trained.state_dict(),
                        "data": loader.state_dict(),
                        "rng": torch.get_rng_state(),
                    }
                    kill.saving(engine.save(step, state).result)
                if len(trained.samples) >= samples:
                    break
            batches = None
    return trained.result()


def accelerate_stateful(folder: Path, samples: int, kill: Kill) -> dict[str, Any]:
    """The same with an ``Accelerator``, whose stateful loaders are part of ``state_of``."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from deltacheck.backends.torch.accelerate import load_state, state_of

    torch.manual_seed(7)
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    trained, step = Trained(), 0
    loader = accelerator.prepare(DataLoader(Numbers(), BATCH, shuffle=True))
    accelerator.register_for_checkpointing(trained)
    with Engine(folder, **ENGINE) as engine:
        if engine.steps():
            step = engine.steps()[-1]
            load_state(accelerator, engine.restore())
        while len(trained.samples) < samples:
            for batch in loader:
                trained.step(batch)
                kill.begin()
                step += 1
                if kill.batches:
                    kill.saving(engine.save(step, state_of(accelerator)).result)
                if len(trained.samples) >= samples:
                    break
    return trained.result()


def lightning(make: Callable[[], Any], folder: Path, samples: int, kill: Kill) -> dict[str, Any]:
    """The same with Lightning's ``Trainer``."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from deltacheck.backends.torch.lightning import DeltaCheckIO

    plugin = DeltaCheckIO(rng=True, options=OPTIONS)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.trained = Trained()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def on_train_batch_start(self, batch: torch.Tensor, number: int) -> None:
            # ModelCheckpoint saves after all other callbacks of a batch.
            if kill.batches and kill.has_begun:
                kill.saving(plugin._settle)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            self.trained.step(batch)
            return self.weight.square()

        def on_train_batch_end(self, *unused: object) -> None:
            kill.begin()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["trained"] = self.trained.state_dict()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.trained.load_state_dict(checkpoint["trained"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return make()

    class EachStep(ModelCheckpoint):  # type: ignore[misc]
        """Saves after each batch; after the last one at the end of the epoch.

        Lightning 2.6.6 loses samples after a resume from a save at the end of an epoch's last
        batch, with its own files, too.
        """

        def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
            if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                super().on_train_batch_end(trainer, *more)

    torch.manual_seed(7)
    module = Module()
    trainer = pl.Trainer(
        # -1, for any number, loses epochs after a resume (Lightning 2.6.6).
        max_epochs=1 << 20 if kill.batches else samples // SAMPLES,
        accelerator="cpu",
        logger=False,
        callbacks=[
            EachStep(
                folder,
                filename="{step}",
                every_n_train_steps=1 if kill.batches else 1 << 30,
                save_on_train_epoch_end=True,
            )
        ],
        plugins=[plugin],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    files = sorted(folder.glob("*.ckpt"), key=lambda file: int(file.stem.partition("=")[2]))
    trainer.fit(module, ckpt_path=files[-1] if files else None)
    return module.trained.result()


def rollouts(folder: Path, samples: int, kill: Kill) -> dict[str, Any]:
    """Two workers generate; the training takes four rollouts at a time."""
    torch.manual_seed(7)
    prompts = ResumableLoader(DataLoader(Numbers(), batch_size=None, shuffle=True))
    queue, numbers, trained, step = RolloutQueue(prompts, capacity=9), [], Trained(), 0
    weights = torch.zeros(1)
    with Engine(folder, **ENGINE) as engine:
        if engine.steps():
            step = engine.steps()[-1]
            saved = engine.restore()
            trained.load_state_dict(saved["trained"])
            queue.load_state_dict(saved["rollouts"])
            numbers = saved["numbers"].tolist()
        workers = [threading.Thread(target=_generate, args=(queue, weights)) for _ in range(2)]
        for worker in workers:
            worker.start()
        while len(trained.samples) < samples:
            taken = queue.take(BATCH, timeout=240)
            trained.step(torch.stack([rollout["prompt"] for rollout in taken]))
            numbers += [rollout["number"] for rollout in taken]
            weights += 1
            kill.begin()
            step += 1
            if kill.batches:
                state = {
                    "trained": trained.state_dict(),
                    "rollouts": queue.state_dict(),
                    "numbers": torch.tensor(numbers),
                }
                kill.saving(engine.save(step, state).result)
        queue.close()
        for worker in workers:
            worker.join()
    left = queue.state_dict()
    open_numbers = [int(number) for key in ("in_hand", "waiting") for number in left[key]]
    return {
        "numbers": numbers,
        # Each prompt that was drawn was trained on, is in hand, or has a rollout that waits.
        "complete": sorted(numbers + open_numbers) == list(range(left["next"])),
        "samples": trained.samples,
    }


def _generate(queue: RolloutQueue, weights: torch.Tensor) -> None:
    """A stub of a worker: rollouts are of random length, and finished in another order."""
    own = random.Random(threading.get_ident())
    for number, prompt in queue:
        if own.random() < 0.1:  # as after a failure: another worker gets it
            queue.give_back(number)
            continue
        time.sleep(own.random() / 1000)
        tokens = torch.arange(own.randrange(1, 20)) + prompt
        queue.finish(
            number,
            {"number": number, "prompt": prompt, "tokens": tokens, "version": weights.clone()},
        )


def in_order() -> Iterator[int]:
    """The prompts of ``rollouts``, without a queue."""
    prompts = ResumableLoader(DataLoader(Numbers(), batch_size=None, shuffle=True))
    while True:
        yield from (int(prompt) for prompt in prompts)


KINDS: dict[str, Callable[[Path, int, Kill], dict[str, Any]]] = {
    "StatefulDataLoader": lambda *a: loop(stateful, *a),
    "StatefulDataLoader, 2 workers": lambda *a: loop(lambda: stateful(num_workers=2), *a),
    "DataLoader": lambda *a: loop(plain, *a),
    "DataLoader, 2 workers": lambda *a: loop(lambda: plain(num_workers=2), *a),
    "a sampler": lambda *a: loop(sampler, *a),
    "rollouts": rollouts,
    "Accelerate, StatefulDataLoader": accelerate_stateful,
    "Accelerate, DataLoader": lambda *a: loop(accelerate_plain, *a),
    "Lightning, StatefulDataLoader": lambda *a: lightning(stateful, *a),
    "Lightning, DataLoader": lambda *a: lightning(plain, *a),
}
# A StatefulDataLoader draws a number at a resume, after these have restored the random states.
DRAWN = {kind: {"drawn"} for kind in KINDS if kind.endswith("StatefulDataLoader") and "," in kind}
PACKAGES = {
    "StatefulDataLoader": "torchdata.stateful_dataloader",
    "Accelerate": "accelerate",
    "Lightning": "lightning.pytorch",
}


def present() -> list[str]:
    """Return the kinds whose packages are installed."""
    return [
        kind
        for kind in KINDS
        if all(
            importlib.util.find_spec(package.partition(".")[0])
            for word, package in PACKAGES.items()
            if word in kind
        )
    ]


def killed(kind: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a training a number of times, let it end, and compare it with one that was not killed.

    Returns the number of kills and samples, and what differs: epochs in which samples were skipped
    or repeated, the order, random numbers of the training.
    """
    run, choice = KINDS[kind], random.Random(f"{seed} {kind}")
    for name in ("killed", "whole"):
        (folder / name).mkdir(parents=True)
    for _ in range(kills):
        kill = Kill(choice.randrange(1, 6), choice.choice(MOMENTS))
        ended = forked(partial(run, folder / "killed", 1 << 30, kill), folder / "told")
        if ended != {"killed": signal.SIGKILL}:
            return {"error": ended}
    return {"kills": kills, **compared(kind, folder)}


def compared(kind: str, folder: Path) -> dict[str, Any]:
    """Let the killed training end its epoch, and return what differs from one without a kill."""
    run = KINDS[kind]
    per_epoch = SAMPLES if kind != "a sampler" else (SAMPLES + 1) // 2
    roots = [folder / "killed" / "deltacheck", folder / "killed"]
    root = next((root for root in roots if (root / "segments").exists()), None)
    specs = deltacheck.open(root).manifest().specs if root else {}
    trained = max(
        (spec.shape[0] for path, spec in specs.items() if path.endswith("samples")), default=0
    )
    most = (trained // per_epoch + 1) * per_epoch
    after = forked(partial(run, folder / "killed", most, Kill()), folder / "told")
    if "samples" not in after:
        return {"error": after}
    samples = after["samples"]
    if kind == "rollouts":
        order = list(itertools.islice(in_order(), max(after["numbers"]) + 1))
        expected = [order[number] for number in after["numbers"]]
        wrong = [] if after["complete"] else ["complete"]
        return {
            "samples": len(samples),
            "differs": wrong + (["samples"] if samples != expected else []),
        }
    whole = forked(partial(run, folder / "whole", most, Kill()), folder / "told")
    epochs = [samples[at : at + per_epoch] for at in range(0, len(samples), per_epoch)]
    wrong = [f"epoch {at}" for at, epoch in enumerate(epochs) if len(set(epoch)) != per_epoch]
    return {
        "samples": len(samples),
        "differs": wrong
        + [key for key in whole.keys() - DRAWN.get(kind, set()) if whole[key] != after[key]],
    }


def forked(do: Callable[[], dict[str, Any]], told: Path) -> dict[str, Any]:
    """Run a function in a forked process, and return its result.

    By a file: worker processes of a loader outlive a killed parent by seconds, with its pipes.
    """
    child = os.fork()
    if child == 0:
        try:
            result = do()
        except BaseException:  # noqa: BLE001 - told to the parent
            result = {"error": traceback.format_exc()[-3000:]}
        told.write_text(json.dumps(result))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    result = json.loads(told.read_text())
    return result


def figures(folder: Path) -> None:
    """Print the cost of a position and of a replay buffer."""
    data = DataLoader(range(4000), 4, shuffle=True)
    seconds: dict[str, list[float]] = {"DataLoader": [], "ResumableLoader": []}
    for _ in range(7):
        for name, loader in (("DataLoader", data), ("ResumableLoader", ResumableLoader(data))):
            begin = time.process_time()
            for _batch in loader:
                pass
            seconds[name].append(time.process_time() - begin)
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times) / len(data) * 1e6:.0f} us of processor per batch")
    rows = 16384
    buffer = torch.randn(rows, 1024)
    with Engine(
        folder / "buffer", options=SaveOptions(durability="process", shadow="host")
    ) as engine:
        for step, share in enumerate((1.0, 0.0, 0.01, 0.1)):
            changed = int(rows * share)
            buffer[:changed] = torch.randn(changed, 1024)
            begin = time.thread_time()
            handle = engine.save(step, {"rows": buffer, "next": changed})
            blocked = time.thread_time() - begin
            report = handle.result()
            print(
                f"replay buffer of {buffer.nbytes >> 20} MiB, {share:.0%} new: save"
                f" {report.stored_bytes / 1e6:.2f} MB, {blocked * 1e3:.0f} ms of its thread"
            )


def main(arguments: list[str]) -> int:
    """Print the result for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--figures", action="store_true", help="print costs, kill nothing")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=present())
    options = parser.parse_args(arguments)
    if options.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            return main([folder, *arguments])
    if options.figures:
        figures(options.folder)
        return 0
    for word, package in PACKAGES.items():
        if any(word in kind for kind in options.kinds):
            importlib.import_module(package)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = {}
    for kind in options.kinds:
        begin = time.monotonic()
        folder = options.folder / kind.replace(" ", "-").replace(",", "")
        results[kind] = killed(kind, folder, options.kills, options.seed)
        shutil.rmtree(folder)
        print(f"{kind}: {results[kind]} ({time.monotonic() - begin:.1f} s)", file=sys.stderr)
    print(json.dumps(results))
    return any(result.get("differs", True) for result in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
