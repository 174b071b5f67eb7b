"""The callback that saves a ``Trainer`` in the background and resumes it.

No ``checkpoint-N`` folder stays: its content is a step of one root.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.trainer import training_state
from deltacheck.backends.torch.trainer.checkpoint_files import (
    STATE_FILE,
    CheckpointFiles,
    Files,
    is_trainers_own,
    write_files,
)
from deltacheck.backends.torch.trainer.trainer_ranks import TrainerRanks
from deltacheck.backends.torch.trainer.wrapped_methods import (
    LAST_METHOD,
    install,
    refuse_unsupported,
    replaceable_methods,
    replaced,
)
from deltacheck.leaf.external_errors import typed
from deltacheck.policy import Keep
from deltacheck.save.exits import StopSignals, end_by
from deltacheck.save.job.save_log import SaveNumbers
from deltacheck.store.files import storage
from deltacheck.store.files.storage import Place

if TYPE_CHECKING:
    from deltacheck.backends.torch.trainer.zero_training import ZeroTraining

log = logging.getLogger("deltacheck")

# The entries of a step that every rank reads whole, also if the model is sharded.
_WHOLE = ("step", "scheduler", "scaler", "rng", "trainer_state", "files")


@typed
class DeltaCheckCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a training in the background, and resumes from its checkpoints.

    A checkpoint has model, optimizer, scheduler, gradient scaler, random states, trainer state and
    all files that the trainer, a subclass or a callback writes to ``checkpoint-N``. Of a PEFT model
    only the trained parameters are saved, as ``Trainer`` does. Frozen weights of any other model
    are read in the background, see ``Engine.guard``; pass ``options=SaveOptions(capture="eager")``
    if a callback writes to them past torch. The next save raises the error of a failed one.
    ``trainer.train`` returns after the last commit. What the trainer reports to (wandb,
    TensorBoard) also gets ``deltacheck/saves``, ``bytes``, ``blocking_seconds`` and
    ``durable_seconds``, with the log after a save. ``push_to_hub`` does not upload checkpoints,
    because no ``checkpoint-N`` folders stay.

    Several processes (DDP, FSDP2, DeepSpeed) save one step together, and every process must use the
    callback.

    ``trainer.train`` raises ``ValueError`` for FSDP1, tensor parallelism, a hyperparameter search,
    features of DeepSpeed that ``deltacheck.backends.torch.deepspeed.attach`` refuses, and a
    subclass that replaces a method of ``Trainer`` for checkpoints without calling it.

    Args:
        root: The root, a directory or the address of a prefix of an object store; ``None``:
            ``deltacheck`` in the trainer's ``output_dir``. With DeepSpeed, a directory.
        every: Save every so many steps, in addition to ``save_strategy``. Smaller: less work is
            lost in a crash; larger: less to write. ``None``: only by ``save_strategy``.
        resume: ``True``: ``trainer.train()`` continues from the newest step of the root, if there
            is one. ``False``: only with ``trainer.train(resume_from_checkpoint=True)``, which also
            takes ``"checkpoint-N"`` for step N.
        stop_on: Signals of a scheduler, such as ``(signal.SIGTERM, signal.SIGUSR1)``. On one, to
            any rank, the training saves at the end of its step, and the process ends by the signal
            once the save is committed. With several ranks, each step has one small exchange on the
            host. Empty: signals do what they do without the callback.
        file_limit_bytes: The most bytes of one file of ``checkpoint-N``. A larger file fails the
            save by name. Larger: callbacks may keep more there; smaller: files that grow the root
            are noticed. Weights that ``Trainer`` writes do not count.
        **engine: Arguments of ``Engine``. The default of ``Keep(last=...)`` is the trainer's
            ``save_total_limit``.

    Raises:
        ValueError: ``every`` is less than 1.
        ImportError: This version of transformers lacks a method that is wrapped.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        every: int | None = None,
        resume: bool = True,
        stop_on: Collection[int] = (),
        file_limit_bytes: int = 64 << 20,
        **engine: Any,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._folder = None if root is None else storage.of(root, engine.get("storage"))
        self._every = every
        self._resume = resume
        self._stop_on = tuple(stop_on)
        self._file_limit_bytes = file_limit_bytes
        self._options = engine
        self._run: _TrainCall | None = None  # for as long as train() runs
        # On the class, because a callback gets no reference to its trainer.
        install(DeltaCheckCallback)

    @property
    def _engine(self) -> Engine | None:
        return None if self._run is None else self._run.engine

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a trainer whose own ``train`` the callback cannot see. ``Trainer`` calls this.

        Args:
            args: Not used.
            state: The trainer's state.
            control: Not used.
            **kwargs: Not used.

        Raises:
            ValueError: ``Trainer.train`` is not running.
        """
        if self._run is None:
            raise ValueError(
                "DeltaCheckCallback cannot save this trainer, whose train() is not that of Trainer;"
                " leave the callback out, and save with an Engine"
            )
        self._run.name_best(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint if one is due. ``Trainer`` calls this.

        Args:
            args: Not used.
            state: The trainer's state.
            control: The trainer's control.
            **kwargs: Not used.
        """
        if self._run is not None:
            # The state is loaded by now. This releases its memory.
            self._run.resumed = None
            self._run.look_for_signal()
            if self._run.stop_signal:
                control.should_save = True
        if self._every is not None and state.global_step % self._every == 0:
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the cost of the saves since the last log. ``Trainer`` calls this.

        Args:
            args: Not used.
            state: Not used.
            control: Not used.
            logs: The numbers that the callbacks behind this one report.
            **kwargs: Not used.
        """
        # The log of the trainer's state, which is part of a step, has no times.
        if self._run is not None and logs is not None:
            logs.update(self._run.save_numbers.take())

    # --- replacements of the trainer's methods; ``original`` is the method ------------------------

    def _train(
        self,
        original: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        refuse_unsupported(trainer, args[0] if args else kwargs.get("trial"))
        if trainer.args.world_size > 1 and self._options.get("memory") is not None:
            raise ValueError(
                "the Trainer's callback has no memory tier on several ranks, because its files go"
                " to the disk: leave memory= out"
            )
        options = dict(self._options)
        limit = trainer.args.save_total_limit
        # The best step may be older than the newest ``limit`` steps, and is loaded at the end.
        keep = options.get("keep") or Keep()
        if limit and not trainer.args.load_best_model_at_end and keep.last is None:
            options["keep"] = replace(keep, last=limit)
        engine, zero = _opened(trainer, self._folder, options)
        with engine, tempfile.TemporaryDirectory() as folder:
            run = _TrainCall(engine, zero, trainer, self._file_limit_bytes, Path(folder))
            try:
                with run.joined(trainer), self._signals() as run.signals:
                    path = run.resume_from(resume_from_checkpoint, newest=self._resume)
                    result = original(trainer, path, *args, **kwargs)
                    # No step was trained, and what follows continues as if the training had just
                    # ended.
                    if run.resumed is not None:
                        training_state.restore_random_states(trainer, run.resumed)
                    return result
            except _Stopped:
                pass
            finally:
                run.left(trainer)
        # All is closed now. Only a signal leads here.
        end_by(run.stop_signal)

    def _signals(self) -> contextlib.AbstractContextManager[StopSignals | None]:
        # Python takes handlers in the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        has_signals = self._stop_on and is_main
        return StopSignals(*self._stop_on) if has_signals else contextlib.nullcontext()

    def _run_epoch(
        self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # A finished run that is started again would do one more step.
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            if self._run is not None and self._run.resumed is not None:
                self._run.warn_if_finished(trainer.state)
            return
        original(trainer, *args, **kwargs)

    def _save_checkpoint(
        self, original: Callable[..., Any], trainer: Any, model: Any, trial: Any
    ) -> None:
        if self._run is None:  # outside of train()
            original(trainer, model, trial)
        else:
            self._run.request(trainer)

    def _load_from_checkpoint(
        self, original: Callable[..., Any], trainer: Any, path: str, model: Any = None
    ) -> None:
        saved = self._resumed(path)
        # Another path is a checkpoint of ``Trainer`` itself.
        if saved is None:
            original(trainer, path, model)
        # Shards are filled with those of the optimizer.
        elif not trainer.is_fsdp_enabled:
            training_state.load_model(
                trainer.model if model is None else model, saved["model"], saved["step"]
            )

    def _load_optimizer_and_scheduler(
        self, original: Callable[..., Any], trainer: Any, path: str | None
    ) -> None:
        saved = self._resumed(path)
        if saved is None:
            original(trainer, path)
            return
        assert self._run is not None
        ranks = self._run.ranks
        if trainer.is_fsdp_enabled:
            shards = training_state.shards_of(trainer, optimizer="scheduler" in saved)
            saved = {**saved, **ranks.fill(saved["step"], shards)}
        training_state.load_optimizer(trainer, saved)
        ranks.continue_chains(lambda: training_state.state_of(trainer))

    def _load_scaler(self, original: Callable[..., Any], trainer: Any, path: str | None) -> None:
        saved = self._resumed(path)
        if saved is None:
            original(trainer, path)
        elif saved.get("scaler") is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(saved["scaler"])

    def _load_rng_state(self, original: Callable[..., Any], trainer: Any, path: str | None) -> None:
        saved = self._resumed(path)
        if saved is None:
            original(trainer, path)
        else:
            training_state.restore_random_states(trainer, saved)

    def _load_best_model(self, original: Callable[..., Any], trainer: Any) -> None:
        best = training_state.best_step(trainer)
        # The best step may have been saved by ``Trainer`` before the callback was added.
        if self._run is None or best is None or best not in self._run.ranks.steps():
            original(trainer)
        elif trainer.is_deepspeed_enabled:
            self._run.point_to_best(trainer, best)
            original(trainer)
        elif trainer.is_fsdp_enabled:
            self._run.ranks.fill(best, training_state.shards_of(trainer, optimizer=False))
        else:
            weights = self._run.ranks.read(best, ["model"])["model"]
            training_state.load_model(trainer.model, weights, best)

    def _resumed(self, path: object) -> Mapping[str, Any] | None:
        """Return the restored step that stands for a path, if it does."""
        run = self._run
        return None if run is None or path != run.resumed_path else run.resumed


class _Stopped(BaseException):
    """A signal has ended the training, and its step is saved."""


class _TrainCall:
    """One call of ``train``: its engine, its files, and the step that it resumes.

    Args:
        engine: The engine.
        zero: The DeepSpeed engine of the trainer, if it has one.
        trainer: The trainer.
        file_limit_bytes: As in ``DeltaCheckCallback``.
        temporary: A folder for the files of the resumed step.
    """

    def __init__(
        self,
        engine: Engine,
        zero: ZeroTraining | None,
        trainer: Any,
        file_limit_bytes: int,
        temporary: Path,
    ) -> None:
        self.engine = engine
        self._zero = zero
        self.ranks = TrainerRanks(engine)
        self.save_numbers = SaveNumbers()
        engine.on_commit(self.save_numbers.add)
        self._output_dir = Path(trainer.args.output_dir)
        self._files = CheckpointFiles(self._output_dir, file_limit_bytes)
        self._model_files: Files = {}
        self._is_described = False
        self._temporary = temporary
        self._is_sharded = bool(trainer.is_fsdp_enabled)
        self._is_first = trainer.args.process_index == 0
        # Kept until the first step, because the trainer reads it in several methods.
        self.resumed: Mapping[str, Any] | None = None
        self.resumed_path = ""
        self._steps: set[int] = set()  # those in the root, and those that were begun
        self._saved_step = -1
        self._is_requested = False
        self._defers = False
        self.signals: StopSignals | None = None
        self.stop_signal = 0  # on which the training ends after this step

    # --- while train() runs -----------------------------------------------------------------------

    @contextlib.contextmanager
    def joined(self, trainer: Any) -> Iterator[None]:
        """Return a context in which the trainer's saves end here, whichever class begins them.

        Args:
            trainer: The trainer.
        """
        for callback in _callbacks(trainer):
            callback._run = self
        # First, so that what reports to a logger sees the numbers of saves.
        trainer.callback_handler.callbacks.sort(
            key=lambda callback: not isinstance(callback, DeltaCheckCallback)
        )
        zero, hooks = self._zero, contextlib.ExitStack()
        if zero is not None:
            prepare = functools.partial(zero.prepare, trainer)
            hooks.enter_context(replaced(trainer.accelerator, {"prepare": prepare}))
        # Of the object, not of the class: subclasses and callbacks write files after the method of
        # ``Trainer`` has returned.
        methods = {"_save_checkpoint": self._save_checkpoint, LAST_METHOD: self._log_save_evaluate}
        bound: dict[str, Callable[..., Any]] = {
            name: lambda inner, *args, method=method, **kwargs: method(
                trainer, inner, *args, **kwargs
            )
            for name, method in methods.items()
        }
        # A subclass may read files of ``Trainer`` instead, which a step does not have.
        for name in replaceable_methods(type(trainer)):
            bound[name] = functools.partial(_replace, _callbacks(trainer)[0], trainer, name)
        with hooks, replaced(trainer, bound):
            yield

    def left(self, trainer: Any) -> None:
        """Forget the run after ``train`` has ended."""
        for callback in _callbacks(trainer):
            callback._run = None

    def name_best(self, state: Any) -> None:
        """Name the best checkpoint again, which the trainer forgets if it is no folder."""
        if state.best_global_step in self._steps and state.best_model_checkpoint is None:
            state.best_model_checkpoint = str(self._files.path(state.best_global_step))

    # --- resuming ---------------------------------------------------------------------------------

    def resume_from(self, request: object, *, newest: bool) -> object:
        """Restore the requested step, and return the argument for the trainer instead.

        Args:
            request: The argument ``resume_from_checkpoint``.
            newest: ``None`` requests the newest step.
        """
        # Rank 0 decides, because another rank may see new names later.
        steps, step = self.ranks.decide(
            lambda: (self.engine.steps(), self._requested(request, newest))
        )
        self._steps = set(steps)
        if step is None:
            # There is nothing to resume from here, so ``Trainer`` decides as it does without the
            # callback.
            return request
        path = self._temporary / f"checkpoint-{step}"
        path.mkdir()
        # Shards are filled later, once the trainer has made them.
        if self._zero is not None:
            self._zero.write_pointers(self.ranks.manifest(step), path)
            saved = self.ranks.read(step, [self._zero.key])[self._zero.key]
        elif self._is_sharded:
            saved = self.ranks.read(step, _WHOLE)
        else:
            saved = self.ranks.restore(step)
        write_files(path, {**saved.get("files", {}), STATE_FILE: saved["trainer_state"]})
        self.resumed, self.resumed_path, self._saved_step = saved, str(path), step
        if self._is_first:
            # ``Trainer`` starts anew if no checkpoint is asked for, so its users must see this.
            level = logging.WARNING if request is None else logging.INFO
            log.log(level, "training continues from step %d of %s", saved["step"], self.engine.root)
        return str(path)

    def look_for_signal(self) -> None:
        """Ask the ranks whether the training is to end after this step."""
        if self.signals is not None:
            self.stop_signal = self.engine.signal_to_stop(self.signals)

    def warn_if_finished(self, state: Any) -> None:
        """Warn that nothing is left to train after the resumed step.

        Args:
            state: The trainer's state.
        """
        if self._is_first:
            log.warning(
                "nothing is trained: step %d of %s is the last of this training (max_steps %d). To"
                " continue, raise max_steps or num_train_epochs; to start anew, use another"
                " output_dir, or resume_from_checkpoint=False (not under deltacheck run)",
                state.global_step,
                self.engine.root,
                state.max_steps,
            )

    def _requested(self, request: object, newest: bool) -> int | None:
        steps = self.engine.steps()
        if not isinstance(request, str | Path):
            is_newest = request is True or (request is None and newest)
            return steps[-1] if steps and is_newest else None
        match = re.fullmatch(r"checkpoint-(\d+)", Path(request).name)
        # ``Trainer`` loads a folder of its own without this callback.
        if match is None or int(match[1]) not in steps or is_trainers_own(Path(request)):
            return None
        return int(match[1])

    def point_to_best(self, trainer: Any, step: int) -> None:
        """Let DeepSpeed find the best step, in the place of the best checkpoint of the trainer."""
        assert self._zero is not None
        folder = self._temporary / "best" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        self._zero.write_pointers(self.ranks.manifest(step), folder)
        trainer.state.best_model_checkpoint = str(folder)

    # --- saving -----------------------------------------------------------------------------------

    def _log_save_evaluate(
        self, trainer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the trainer's method, and save after the last callback has written its files."""
        self._defers = True
        try:
            result = inner(*args, **kwargs)
        finally:
            self._defers = False
            self._save_requested(trainer)
        if self.stop_signal:
            self.engine.wait()
            if self._is_first:
                name = signal.Signals(self.stop_signal).name
                log.warning("%s: the training ends, step %d is saved", name, self._saved_step)
            raise _Stopped
        return result

    def _save_checkpoint(
        self, trainer: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Run the trainer's method, which requests the save, and save unless files may follow."""
        inner(*args, **kwargs)
        if not self._is_requested:
            # Silence would lose the step: the subclass has saved in a way of its own.
            raise ValueError(
                f"{type(trainer).__qualname__}._save_checkpoint has not called"
                f" Trainer._save_checkpoint, so step {trainer.state.global_step} is not saved. Call"
                " it there, or leave DeltaCheckCallback out and let an Engine save in that method"
            )
        if not self._defers:
            self._save_requested(trainer)

    def request(self, trainer: Any) -> None:
        """Request a save, in the place of ``Trainer._save_checkpoint``.

        The files that ``Trainer`` writes beside the weights are in the folder afterwards, so that
        subclasses and callbacks may add to it.
        """
        state = trainer.state
        # From here to the end: what ``Trainer`` itself does before it writes its state.
        trainer.store_flos()
        self._files.folder(state.global_step)
        self._is_requested = True
        # ``every`` and ``save_strategy`` may request the same step, and a resumed step exists
        # already.
        if state.global_step == self._saved_step:
            return
        self._describe(trainer)
        if state.best_global_step and state.best_global_step in {state.global_step, *self._steps}:
            state.best_model_checkpoint = str(self._files.path(state.best_global_step))
        if trainer.args.should_save:
            training_state.export_callbacks(trainer)

    def _describe(self, trainer: Any) -> None:
        """Write the files that describe the model: configuration, tokenizer and so on.

        They are taken once if they are those of ``Trainer``, because tokenizers take long to write.
        """
        step, kind = trainer.state.global_step, type(trainer)
        is_overridden = kind._save is not Trainer._save or kind.save_model is not Trainer.save_model
        if self._is_described and not is_overridden:
            return
        folder, before = str(self._files.folder(step)), self._files.names(step)
        # Without weights, which are leaves of the step. A subclass may write files of its own here.
        with replaced(trainer, {"_save": _save_without_weights}):
            if kind.save_model is Trainer.save_model:
                trainer._save(folder)
            else:
                trainer.save_model(folder, _internal_call=True)
        self._files.remove_weights(step)
        if trainer.args.should_save:
            self._model_files = self._files.read(step, set(self._files.names(step)) - set(before))
        self._is_described = True

    def _save_requested(self, trainer: Any) -> None:
        """Save if a save was requested, with all files that were written since."""
        if not self._is_requested:
            return
        self._is_requested = False
        step = trainer.state.global_step
        files = self.ranks.gather(
            self._files.names(step), lambda names: self._files.take(step, names)
        )
        if step == self._saved_step:
            return
        state = training_state.state_of(trainer)
        if trainer.args.process_index == 0:
            state["files"] = {**self._model_files, **files}
        numbers = training_state.last_numbers(trainer.state.log_history)
        if self._zero is not None:
            self._zero.save(trainer, state, numbers, self._files.path(step))
            if trainer.args.process_index == 0:
                self._files.remove(step)
        else:
            # At every save, because a callback may replace the model. A second call has no effect.
            self.engine.guard(trainer.model)
            self.engine.save(step, state, metrics=numbers)
        self._steps.add(step)
        self._saved_step = step


def _opened(
    trainer: Any, folder: Place | None, options: dict[str, Any]
) -> tuple[Engine, ZeroTraining | None]:
    """Open the engine of a training: of one process, of ranks, or of ranks under DeepSpeed."""
    default = Path(trainer.args.output_dir, "deltacheck")
    if not trainer.is_deepspeed_enabled:
        if trainer.args.world_size > 1:
            options["process_group"] = dist.group.WORLD
        return Engine(folder or default, **options), None
    # DeepSpeed takes long to import, and most trainings do without it.
    from deltacheck.backends.torch.trainer.zero_training import ZeroTraining

    return ZeroTraining.opened(trainer, folder, default, options)


def _save_without_weights(
    inner: Callable[..., Any], output_dir: str | None = None, state_dict: object = None
) -> None:
    inner(output_dir, state_dict={})


def _replace(
    callback: DeltaCheckCallback, trainer: Any, name: str, inner: Callable[..., Any], *args: Any
) -> Any:
    """Call a method of the callback in the place of one of a trainer's class."""
    return getattr(callback, name)(lambda _, *args: inner(*args), trainer, *args)


def _callbacks(trainer: Any) -> list[DeltaCheckCallback]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, DeltaCheckCallback)]
