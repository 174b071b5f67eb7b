"""Signals at random moments of saves, restores, optimizer steps and closes.

Each child trains and saves in a loop. The parent sends it SIGUSR1, SIGTERM or SIGINT, or sends them
to its process group, with and without workers of a ``DataLoader``. A child either ends by the
signal, or handles many: a handler that waits for the saves, one that saves by itself, and
``finish_on_signal`` with an earlier handler that lets the process live. A save is *lost* if its
call has returned and no step exists afterwards. A *hang* is a child that does not answer within
the limit, which decides nothing else.

The handler of torch's ``DataLoader`` for SIGCHLD raises wherever the training is when a worker has
died. If that is between taking a lock and the block that releases it, the lock stays taken, and the
loader's own end waits for it (seen in ``multiprocessing.Queue.put``). A child that hangs prints its
stacks; one whose main thread waits there, with no call of deltacheck, is counted as the loader's.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import deltacheck
from deltacheck import Keep, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.errors import DeltacheckError
from tests.support.waiting import wait_until

HANG_SECONDS = 240.0
GRACE_SECONDS = 60.0
SIGNALS_OF_CHILD = 25


@dataclass(frozen=True)
class Kind:
    """A way to be interrupted.

    Args:
        name: For the table.
        body: What the child does.
        signal: The signal.
        lives: The child handles the signal and goes on.
        share: Of the signals.
        workers: Workers of the ``DataLoader`` of some of the children.
    """

    name: str
    body: Callable[[Child], None]
    signal: int
    lives: bool
    share: int
    workers: tuple[int, ...] = (0,)


class Child:
    """The knowledge of a child, and its reports to the parent."""

    def __init__(
        self, kind: Kind, folder: Path, seed: int, workers: int, count: int, out: int
    ) -> None:
        self.kind, self.folder, self.workers, self.count = kind, folder, workers, count
        self.process = os.getpid()
        self.random = random.Random(seed)
        self.handled = 0
        self.begun = -1
        self._out = out

    @property
    def is_done(self) -> bool:
        """True if the child has handled as many signals as it gets."""
        return self.kind.lives and self.handled >= self.count

    def end_if_worker(self) -> None:
        """End a worker of the ``DataLoader``, which has inherited the handler of the child."""
        if os.getpid() != self.process:
            os._exit(1)

    def report_begun(self, step: int) -> None:
        self.begun = step
        os.write(self._out, f"begun {step}\n".encode())

    def report_handled(self, problem: str = "") -> None:
        self.handled += 1
        os.write(self._out, f"handled {problem}\n".encode())

    def report_engine_saves(self) -> None:
        """Report every save of an engine, whoever calls it."""
        original = Engine.save

        def save(engine: Engine, step: int, *args: Any, **kwargs: Any) -> Any:
            handle = original(engine, step, *args, **kwargs)
            self.report_begun(step)
            return handle

        Engine.save = save  # type: ignore[method-assign]


# --- children -------------------------------------------------------------------------------------


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), float(index % 7))


def batches(workers: int) -> Iterator[torch.Tensor]:
    """Yield batches; begin anew if a signal to the group has ended the workers."""
    while True:
        try:
            yield from torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=workers)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise


def engine_body(child: Child) -> None:
    """Train with an ``Engine``: mostly saves and steps, some restores and closes."""
    child.report_engine_saves()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    root = child.folder / "root"

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def opened() -> Engine:
        return Engine(root, keep=Keep(last=4), options=SaveOptions(durability="process"))

    engine = opened()

    def handle(number: int, frame: object) -> None:
        child.end_if_worker()
        problem = ""
        before = child.begun
        for _ in range(10):
            try:
                if child.handled % 2 and child.kind.signal == signal.SIGUSR1:
                    engine.save(10_000_000 + child.handled, state()).wait(timeout=HANG_SECONDS)
                else:
                    engine.wait(HANG_SECONDS)
                if before >= 0 and before not in engine.steps():
                    problem = f"step {before} is not among {engine.steps()}"
                break
            except DeltacheckError as error:
                # The call that the handler has interrupted has the turn, or has closed the engine.
                if not any(text in str(error) for text in ("handler of a signal", "is closed")):
                    problem = f"{type(error).__name__}: {error}"
                break
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    problem = f"{type(error).__name__}: {error}"
                    break
        child.report_handled(problem)

    if child.kind.lives:
        signal.signal(child.kind.signal, handle)
    if child.kind.signal == signal.SIGTERM:
        deltacheck.finish_on_signal(signal.SIGTERM, grace_seconds=GRACE_SECONDS)
    step = itertools.count()
    is_ready = False
    for batch in batches(child.workers):
        if child.is_done:
            break
        try:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            action = child.random.choices(
                ["save", "step", "restore", "overlap", "close"], [50, 30, 8, 6, 6]
            )[0]
            if action == "save" or not is_ready:
                engine.save(next(step), state())
                is_ready = True
            elif action == "restore":
                engine.restore(into=state())
            elif action == "overlap":
                into = {"model": model.state_dict(), "optimizer": optimizer}
                engine.restore(into=into, overlap=True)
            elif action == "close":
                engine.close()
                engine = opened()
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
    engine.close()


def trainer_body(child: Child) -> None:
    """Train with a Hugging Face ``Trainer``."""
    import transformers

    from deltacheck.backends.torch.trainer import DeltaCheckCallback

    child.report_engine_saves()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    class Rows(Samples):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    class Interruptible(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            deltacheck.finish_on_signal(signal.SIGTERM, grace_seconds=GRACE_SECONDS)

    arguments = transformers.TrainingArguments(
        output_dir=str(child.folder),
        max_steps=1_000_000,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=child.workers,
        save_total_limit=3,
        logging_steps=1_000_000,
    )
    callbacks = [DeltaCheckCallback(), Interruptible()]
    transformers.Trainer(Model(), arguments, train_dataset=Rows(), callbacks=callbacks).train()


def lightning_body(child: Child) -> None:
    """Train with Lightning, whose handler for SLURM saves by itself if the child lives."""
    import lightning.pytorch as lightning
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.trainer.connectors import signal_connector

    from deltacheck.backends.torch.lightning import DeltaCheckIO

    child.report_engine_saves()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if child.is_done:
                self.trainer.should_stop = True
            return self.layers(batch).square().mean()

        def on_train_start(self) -> None:
            if child.kind.signal == signal.SIGTERM:
                deltacheck.finish_on_signal(signal.SIGTERM, grace_seconds=GRACE_SECONDS)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    plugins: list[Any] = [
        DeltaCheckIO(child.folder / "root", options=SaveOptions(durability="process"))
    ]
    if child.kind.lives:
        os.environ |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "signals"}
        os.environ |= {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
        os.environ |= {"SLURM_NODELIST": "localhost"}
        plugins.append(SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1))

        def requeue(*args: Any, **kwargs: Any) -> int:
            child.report_handled()
            return 0

        signal_connector.call = requeue  # type: ignore[attr-defined]
    checkpoints = lightning.callbacks.ModelCheckpoint(
        child.folder / "files", save_top_k=2, monitor="step", mode="max", every_n_train_steps=2
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=-1,
        callbacks=[checkpoints],
        plugins=plugins,
        default_root_dir=child.folder / "files",
    )
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=child.workers)
    trainer.fit(Module(), loader)


def orbax_body(child: Child) -> None:
    """Save with a ``CheckpointManager``."""
    import jax.numpy as jnp
    from orbax import checkpoint as ocp

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    mngr = manager(child.folder / "root", options, save_options=SaveOptions(durability="process"))

    def handle(number: int, frame: object) -> None:
        child.end_if_worker()
        problem, before = "", child.begun
        try:
            mngr.wait_until_finished()
            if before >= 0 and before not in mngr.all_steps():
                problem = f"step {before} is not among {mngr.all_steps()}"
        except Exception as error:  # noqa: BLE001 - reported
            problem = f"{type(error).__name__}: {error}"
        child.report_handled(problem)

    if child.kind.lives:
        signal.signal(child.kind.signal, handle)
    if child.kind.signal == signal.SIGTERM:
        deltacheck.finish_on_signal(signal.SIGTERM, grace_seconds=GRACE_SECONDS)
    tree = {f"w{number}": jnp.zeros((64, 64)) for number in range(8)}
    for step in itertools.count():
        if child.is_done:
            break
        tree = {name: value + 1 for name, value in tree.items()}
        mngr.save(step, args=DeltaSaveArgs(tree))
        child.report_begun(step)
    mngr.close()


KINDS = [
    Kind("engine, handler", engine_body, signal.SIGUSR1, True, 30, (0, 2)),
    Kind("engine, finish, lives", engine_body, signal.SIGTERM, True, 25, (0, 2)),
    Kind("engine, finish, ends", engine_body, signal.SIGTERM, False, 8, (0, 2)),
    Kind("engine, Ctrl-C", engine_body, signal.SIGINT, False, 5, (0, 2)),
    Kind("trainer, finish, ends", trainer_body, signal.SIGTERM, False, 2, (0, 2)),
    Kind("lightning, SLURM", lightning_body, signal.SIGUSR1, True, 14),
    Kind("lightning, finish, ends", lightning_body, signal.SIGTERM, False, 2, (0, 2)),
    Kind("orbax, handler", orbax_body, signal.SIGUSR1, True, 10),
    Kind("orbax, finish, ends", orbax_body, signal.SIGTERM, False, 2),
    Kind("orbax, Ctrl-C", orbax_body, signal.SIGINT, False, 2),
]


# --- the parent -----------------------------------------------------------------------------------


class Lines:
    """The reports of a child."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""
        self.begun = -1

    def read(self) -> str | None:
        """Return the next line; "" at the end; ``None`` if the child hangs."""
        while b"\n" not in self._rest:
            if not select.select([self._descriptor], [], [], HANG_SECONDS)[0]:
                return None
            content = os.read(self._descriptor, 1 << 16)
            if not content:
                return ""
            self._rest += content
        line, self._rest = self._rest.split(b"\n", 1)
        text = line.decode()
        if text.startswith("begun "):
            self.begun = int(text[6:])
        return text

    def until(self, start: str) -> str | None:
        """Return the next line that begins so, as ``read``."""
        while (line := self.read()) and not line.startswith(start):
            pass
        return line


def run_child(kind: Kind, folder: Path, moments: random.Random, count: int) -> Counter[str]:
    """Fork a child and send it ``count`` signals; return the counts."""
    seed, workers = moments.getrandbits(32), moments.choice(kind.workers)
    to_group = moments.random() < 0.5
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        os.close(reading)
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGUSR2)
        raise _InChild(Child(kind, folder, seed, workers, count, writing))
    os.close(writing)
    lines, counts = Lines(reading), Counter[str]()
    send = os.killpg if to_group else os.kill
    problems: list[str] = []
    is_alive = all(lines.until("begun") for _ in range(3))
    for _ in range(count if is_alive else 0):
        # The random moment, which decides no verdict.
        time.sleep(moments.uniform(0.0, 0.03))
        with contextlib.suppress(ProcessLookupError):
            send(process, kind.signal)
        counts["signals"] += 1
        if kind.lives:
            line = lines.until("handled")
            if not line:
                problems.append("hang" if line is None else "the child has ended")
                break
            if line != "handled ":
                problems.append("lost: " + line[8:])
    # The child ends by itself: by the signal, or because it has handled as many as it gets. Its
    # workers have the pipe, too, and may live longer.
    end = time.monotonic() + HANG_SECONDS
    while not problems and (line := lines.read()) != "":
        if line is None or time.monotonic() > end:
            if os.waitpid(process, os.WNOHANG)[0]:
                process = 0
            else:
                problems.append("hang")
            break
    if "hang" in problems:
        if is_of_loader(stack_of(process, folder / "log")):
            problems[problems.index("hang")] = "hang of the loader"
        os.killpg(process, signal.SIGKILL)
    if process:
        os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # workers that have survived
    os.close(reading)
    root = folder / "deltacheck" if kind.body is trainer_body else folder / "root"
    steps = deltacheck.open(root).steps() if not problems or is_alive else []
    if lines.begun not in steps:
        problems.append(f"lost: step {lines.begun} is not among {steps}")
    names = {"hang": "hangs", "hang of the loader": "loader"}
    for problem in problems:
        counts[names.get(problem, "lost")] += 1
        to = "group" if to_group else "process"
        print(f"{kind.name}, {workers} workers, to the {to}, seed {seed}: {problem}")
        print((folder / "log").read_text(errors="replace")[-3000:], flush=True)
    return counts


def stack_of(process: int, log: Path) -> list[str]:
    """Let a child print its stacks.

    Returns:
        The files of the main thread's frames, innermost first.
    """

    def main_thread() -> list[str]:
        for thread in log.read_text(errors="replace").split("\n\n"):
            files: list[str] = re.findall(r'  File "([^"]+)", line \d+ in ', thread)
            if files and files[-1] == "<frozen runpy>":
                return files
        return []

    os.kill(process, signal.SIGUSR2)
    return wait_until(main_thread)


def is_of_loader(files: list[str]) -> bool:
    """Return True if the main thread waits in torch's ``DataLoader``, not in a call of ours."""
    library = os.path.dirname(deltacheck.__file__)
    return any(file.endswith("data/dataloader.py") for file in files) and not any(
        file.startswith(library) for file in files
    )


class _InChild(BaseException):
    """Unwinds the parent's frames in a child, whose interpreter must end as usual."""

    def __init__(self, child: Child) -> None:
        self.child = child


def campaign(signals: int, seed: int, only: str) -> int:
    """Send the signals, print the counts and return the exit status."""
    begin, moments, total = time.perf_counter(), random.Random(seed), Counter[str]()
    kinds = [kind for kind in KINDS if only in kind.name]
    shares = sum(kind.share for kind in kinds)
    for kind in kinds:
        left = max(1, round(signals * kind.share / shares))
        kind_begin, of_kind = time.perf_counter(), Counter[str]()
        while left > 0:
            count = min(left, SIGNALS_OF_CHILD) if kind.lives else 1
            left -= count
            # Not as a context, which the child would leave, too.
            folder = tempfile.mkdtemp(prefix="deltacheck-signals-")
            of_kind += run_child(kind, Path(folder), moments, count)
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.perf_counter() - kind_begin
        print(f"{kind.name:<26}{of_kind['signals']:>5} signals {seconds:>5.0f} s", flush=True)
        total += of_kind
    print(
        f"{total['signals']} signals, {total['lost']} saves lost, {total['hangs']} hangs"
        f" ({total['loader']} more of torch's DataLoader), seed {seed},"
        f" {time.perf_counter() - begin:.0f} s"
    )
    return int(bool(total["lost"] or total["hangs"] or not total["signals"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        return campaign(arguments.signals, arguments.seed, arguments.kind)
    except _InChild as entry:
        child = entry.child
    child.kind.body(child)
    return 0


if __name__ == "__main__":
    sys.exit(main())
