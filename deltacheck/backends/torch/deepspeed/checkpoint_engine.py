"""Let DeepSpeed save and load through deltacheck.

Call ``install()`` before ``deepspeed.initialize``, and change nothing else. All ranks' files of a
tag are one step of one root. In the folder of the tag, each file that DeepSpeed looks for is a
small pointer. ``save_checkpoint`` returns while the step is written. Pointers and ``latest`` appear
after its commit, so that DeepSpeed never finds a step that is not whole.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deltacheck.backends.torch.deepspeed import zero
from deltacheck.backends.torch.deepspeed.configuration import (
    engine_options,
    is_bounded,
    refuse_unsupported,
)
from deltacheck.backends.torch.deepspeed.loading import add_pointers, full_weights, load_file
from deltacheck.backends.torch.deepspeed.publishing import PublishingEngine
from deltacheck.backends.torch.deepspeed.reading import CheckpointReading
from deltacheck.backends.torch.deepspeed.saved_state import (
    TRAINER,
    PendingSave,
    TrainerPart,
    own_elements,
    state_of,
)
from deltacheck.backends.torch.files.load import MapLocation
from deltacheck.leaf.external_errors import typed
from deltacheck.restore.values import StepReader
from deltacheck.store.files import storage

log = logging.getLogger("deltacheck")

# Objects in DeepSpeed's own files. A save keeps, and a load makes, those of named classes alone.
torch.serialization.add_safe_globals(
    [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
)
_ROOT = "deltacheck"
# A trainer removes old folders of this name, so the root must not lie in one of them.
_TRAINERS_FOLDER = re.compile(r"checkpoint-[0-9]+\Z")


def install(**options: Any) -> None:
    """Let every DeepSpeed engine created from now on save and load through deltacheck.

    Args:
        **options: As in ``attach``.
    """
    runtime = deepspeed.runtime.engine
    # Unwrapped, so that a second call replaces the options of the first instead of adding to them.
    configure = inspect.unwrap(runtime.DeepSpeedEngine._configure_checkpointing)

    @functools.wraps(configure)
    def configured(self: Any) -> None:
        configure(self)
        attach(self, **options)

    # DeepSpeed creates its checkpoint engine there, and has no option to choose another class.
    runtime.DeepSpeedEngine._configure_checkpointing = configured
    runtime.create_checkpoint_engine = lambda config_params, **_: DeltaCheckpointEngine(
        config_params
    )


def attach(engine: Any, **options: Any) -> DeltaCheckpointEngine:
    """Let one DeepSpeed engine save and load through deltacheck.

    Every rank must call it.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        **options: Options of ``Engine``, and ``root``, the folder of the content. The default of
            ``root`` is ``deltacheck`` in the folder that is saved to. For folders
            ``checkpoint-N``, which a trainer creates and removes, it is ``checkpoint.deltacheck``
            beside them. Each of these, as a whole, takes precedence over that of the section
            ``"deltacheck"`` of DeepSpeed's configuration, and the options of that section over
            ``"datastates_ckpt": {"host_cache_size": GiB}``.

    Returns:
        The checkpoint engine, to wait for a save or to close it.

    Raises:
        ValueError: An option is unknown, or the engine uses a feature that is not supported:
            pipelines, tensor parallelism, MoE, states on NVMe or in storage of the nodes,
            ``elastic_checkpoint`` (any number of ranks loads a checkpoint without it).
    """
    checkpoint_engine = engine.checkpoint_engine
    if not isinstance(checkpoint_engine, DeltaCheckpointEngine):
        checkpoint_engine = DeltaCheckpointEngine(engine._config)
        engine.checkpoint_engine = checkpoint_engine
    checkpoint_engine.bind(engine, options)
    return checkpoint_engine


@typed
class DeltaCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine that DeepSpeed calls; made by ``install`` or ``attach``.

    Args:
        config_params: DeepSpeed's configuration. It is not read here: ``attach`` does.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "DeltaCheckpointEngine"
        self._deepspeed: Any = None
        self._options: dict[str, Any] = {}
        self._is_exact = True  # no leaf may be bounded or reused
        self._root: Path | None = None
        self._engine: PublishingEngine | None = None
        self._saving: PendingSave | None = None  # while save_checkpoint runs
        self._reading: CheckpointReading | None = None  # while load_checkpoint runs
        self._read: StepReader | None = None  # what the next save continues from
        self._must_agree = False  # the ranks must agree on that before the next save
        self.trainer_part: TrainerPart | None = None  # what a trainer adds to the next save

    def bind(self, engine: Any, options: Mapping[str, Any]) -> None:
        """Bind this checkpoint engine to a DeepSpeed engine. ``attach`` calls it.

        Args:
            engine: The DeepSpeed engine.
            options: As in ``attach``.

        Raises:
            ValueError: As ``attach`` raises it.
        """
        self._options = engine_options(engine._config._param_dict, options)
        policy = self._options.get("policy")
        refuse_unsupported(engine, policy)
        self._is_exact = not is_bounded(policy)
        root = self._options.pop("root", None)
        self._root = None if root is None else _local(root)
        self._deepspeed = engine
        # The methods of the class: those of the instance may be wrapped by an earlier call.
        engine.save_checkpoint = functools.partial(
            self._save_checkpoint, type(engine).save_checkpoint
        )
        engine.load_checkpoint = functools.partial(
            self._load_checkpoint, type(engine).load_checkpoint
        )

    def use(self, engine: PublishingEngine) -> None:
        """Save through an engine that the caller has opened.

        Args:
            engine: The engine. The caller closes it.
        """
        self._engine, self._root, self._must_agree = engine, engine.folder, True

    # --- what DeepSpeed calls ---------------------------------------------------------------------

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save.

        Args:
            info: The folder and tag of the save, and if ``latest`` is to name the tag.
        """
        # ``save_16bit_model`` calls this too, outside of ``save_checkpoint``.
        if self._saving is not None:
            self._saving = PendingSave(_local(info.save_dir), info.tag, info.save_latest)

    def save(self, state_dict: Any, path: str) -> None:
        """Take the content of one file.

        It is written after DeepSpeed has passed all files of the save. Outside of
        ``save_checkpoint`` it is written with ``torch.save``: it is then the weights alone, for
        other programs (``save_16bit_model``).

        Args:
            state_dict: The content.
            path: The file that DeepSpeed would write.
        """
        if self._saving is None:
            torch.save(state_dict, path)
        else:
            self._saving.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: MapLocation | None = None) -> Any:
        """Return the content of a file of DeepSpeed's, for the present ranks. No pickle is read.

        Args:
            path: The file.
            map_location: The device of the tensors, as for ``torch.load``; ``None``: the host.

        Returns:
            The content, as DeepSpeed would have written it with these ranks.

        Raises:
            StepNotFound: The step has no such file.
            TreeMismatch: Another kind of engine has saved it; the message names the difference.
            Damaged, ChainBroken: The step is not whole; the message names step, leaf and file.
        """
        reading = self._reading or CheckpointReading()
        name = str(_local(path))
        if name not in reading.files:  # DeepSpeed reads the model's file twice
            reading.files[name] = load_file(self._deepspeed, Path(name), reading, map_location)
        return reading.files[name]

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return ``True``: a save is committed in the background, and then publishes its tag.

        Args:
            info: Not used.

        Returns:
            ``True``.
        """
        return True

    def is_decoupled(self) -> bool:
        """Return ``True``, so that DeepSpeed leaves ``latest`` to this engine.

        DeepSpeed itself would write ``latest`` before the step exists.

        Returns:
            ``True``.
        """
        return True

    def get_commit_info(self) -> None:
        """Return ``None``: DeepSpeed has nothing to commit."""
        return None

    def preserves_storage_sharing(self) -> bool:
        """Return ``False``: each tensor is stored alone, so DeepSpeed need not clone views.

        Returns:
            ``False``.
        """
        return False

    def cleanup(self) -> None:
        """Finish the running save and release the root.

        Raises:
            DeltacheckError: The save failed.
            StorageFailed: An earlier step was committed, but its pointers could not be written.
        """
        # Cleared first, so that a second call does nothing even if this one fails.
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            engine.raise_unpublished()

    def wait(self) -> None:
        """Wait until the running save is committed and published.

        Raises:
            DeltacheckError: The save failed.
            StorageFailed: The step was committed, but its pointers could not be written.
        """
        if self._engine is not None:
            self._engine.wait()
            self._engine.raise_unpublished()

    # --- saving -----------------------------------------------------------------------------------

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's ``save_checkpoint``, which passes its files to ``save``."""
        self._saving = PendingSave(Path(), "", False)
        try:
            result = original(self._deepspeed, *args, **kwargs)
            self._begin_save(self._saving)
        finally:
            self._saving = None
        return result

    def _begin_save(self, save: PendingSave) -> None:
        engine = self._opened(self._root_of(save.folder))
        with engine.group.sharing_failure():
            # Only rank 0 publishes. Raised in here, its failure reaches every rank.
            engine.raise_unpublished()
            if hasattr(self._deepspeed.optimizer, "optimizer"):
                # torch calls its hooks for the inner optimizer, which ZeRO's own wraps.
                engine.guard(self._deepspeed.optimizer.optimizer)
            state = state_of(self._deepspeed, save, engine.folder, is_exact=self._is_exact)
            metrics = {} if self._is_exact else self._metrics()
            if not self._is_exact:
                # DeepSpeed changes weights only after the step of the inner optimizer.
                engine.guard_weights(state[zero.MODULE].values())
        step = self._deepspeed.global_steps
        if self.trainer_part is not None:
            step, metrics = self.trainer_part.step, {**self.trainer_part.metrics, **metrics}
            state[TRAINER] = self.trainer_part.state
        if self._must_agree:
            # The saver continues from a loaded step only if no save is under way.
            engine.wait()
            self._continue_chains(engine, state)
        handle = engine.save(step, state, metrics=metrics)
        if handle.state == "skipped":
            log.warning(
                "%s of %s was skipped, since the save before it is still under way",
                save.tag,
                save.folder,
            )

    def _metrics(self) -> dict[str, float]:
        """Return what DeepSpeed knows of the run and a policy decides by."""
        norm = self._deepspeed.get_global_grad_norm()
        # None before the first step, and in stages without it.
        return {} if norm is None else {"gradient_norm": float(norm)}

    def _root_of(self, folder: Path) -> Path:
        if self._root is not None:
            return self._root
        return (
            folder.parent / "checkpoint.deltacheck"
            if _TRAINERS_FOLDER.match(folder.name)
            else folder / _ROOT
        )

    def _opened(self, root: Path) -> PublishingEngine:
        if self._engine is None or self._engine.root != root:
            self.cleanup()
            self._engine = PublishingEngine(root, process_group=dist.group.WORLD, **self._options)
            self._must_agree = True
        return self._engine

    def _continue_chains(self, engine: PublishingEngine, state: Any) -> None:
        """Continue the chains of the loaded step if every rank has loaded it from this root."""
        ranks, read = engine.group, self._read
        self._must_agree, self._read = False, None
        digest = (
            None
            if read is None or read.root.path != engine.root
            else read.root.digest_of(read.manifest)
        )
        # All ranks or none: ``resume`` plans the tiles of all of them from one step.
        if ranks.joint.agree(
            digest,
            lambda digests: digests[0] is not None and all(d == digests[0] for d in digests),
            "saves",
        ):
            assert read is not None
            ranks.resume(engine._saver, read, ranks.flatten(state))

    # --- loading ----------------------------------------------------------------------------------

    def _load_checkpoint(
        self,
        original: Callable[..., Any],
        load_dir: str,
        tag: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run DeepSpeed's ``load_checkpoint``, which reads its files with ``load``."""
        self.wait()
        folder = _local(load_dir)
        add_pointers(self._deepspeed, folder, tag)
        self._reading = reading = CheckpointReading()
        runtime = deepspeed.runtime.engine
        # DeepSpeed calls this if only weights are loaded. It unpickles the files of all ranks.
        consolidate = runtime.get_fp32_state_dict_from_zero_checkpoint
        runtime.get_fp32_state_dict_from_zero_checkpoint = lambda *_, **__: full_weights(
            self._deepspeed, reading
        )
        try:
            result = original(self._deepspeed, str(folder), tag, *args, **kwargs)
        finally:
            self._reading = None
            runtime.get_fp32_state_dict_from_zero_checkpoint = consolidate
        # A load of the weights alone leaves another state than that of the step, which is no base.
        self._must_agree, self._read = True, None
        if kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False):
            reading.keep(
                own_elements(self._deepspeed, is_exact=self._is_exact),
                bool(self._deepspeed.save_non_zero_checkpoint),
            )
            self._read = reading.reader
        return result


def _local(path: str | os.PathLike[str]) -> Path:
    return storage.local(path, "DeepSpeed").absolute()
