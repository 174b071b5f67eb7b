"""DeepSpeed saves and loads through deltacheck: call ``install()`` before ``deepspeed.initialize``,
and change nothing else.

All ranks' files of a tag are one step of one root: what ZeRO has flattened by parameter
(``zero.py``), the rest as plain values (``plain.py``). In the folder of the tag each file that
DeepSpeed looks for is a small pointer. ``save_checkpoint`` returns while the step is written;
pointers and ``latest`` appear after its commit, so that nothing ever leads to a step that is not
whole.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)

from deltacheck.backends.torch import plain
from deltacheck.backends.torch.datastates import SECTION, datastates_options
from deltacheck.backends.torch.deepspeed import zero
from deltacheck.backends.torch.deepspeed.reading import Reading, child, keys_of
from deltacheck.backends.torch.engine import Engine
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.files.load import MapLocation, moved
from deltacheck.errors import Damaged, StepNotFound, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.restore import damage
from deltacheck.restore.export import new_file
from deltacheck.restore.fill import StepReader
from deltacheck.store.manifest import Manifest
from deltacheck.store.root import Written

log = logging.getLogger("deltacheck")

_SECTION = "deltacheck"
_ROOT = "deltacheck"
_ABOUT, _FILES, _TIED = "deepspeed", "files", "deltacheck.tied"  # keys of the saved tree, permanent
_TRAINERS_FOLDER = re.compile(r"checkpoint-[0-9]+\Z")
_RANK_IN_NAME = re.compile(r"zero_pp_rank_[0-9]+")
_OPTIMIZER, _FROZEN = "optimizer_state_dict", "frozen_param_fragments"
# What a load takes from the engine that loads, since it says how that one's ranks share the
# parameters: key of a file -> attributes.
_OF_THE_RUN = {
    "group_paddings": ("groups_padding", "group_paddings"),
    "param_alignment_paddings": ("round_robin_bit16_padding",),
    "partition_count": ("partition_count",),
    "param_slice_mappings": ("_param_slice_mappings",),
}


def install(**options: Any) -> None:
    """Let every DeepSpeed engine that is made from now on save and load through deltacheck.

    ``options``: as of ``attach``.
    """
    runtime = deepspeed.runtime.engine
    configure = inspect.unwrap(runtime.DeepSpeedEngine._configure_checkpointing)

    @functools.wraps(configure)
    def configured(self: Any) -> None:
        configure(self)
        attach(self, **options)

    runtime.DeepSpeedEngine._configure_checkpointing = configured
    runtime.create_checkpoint_engine = lambda config_params, **about: DeltaCheckpointEngine(
        config_params
    )


def attach(engine: Any, **options: Any) -> DeltaCheckpointEngine:
    """Let a DeepSpeed engine save and load through deltacheck, and return its checkpoint engine.
    Every
    rank must call it.

    ``options``: those of ``Engine``, and ``root``, the folder of the content (default:
    ``deltacheck`` in the folder that is saved to; for folders ``checkpoint-N``, which a trainer
    makes and removes, ``checkpoint.deltacheck`` beside them). They go before those of the section
    ``"deltacheck"`` of DeepSpeed's configuration, and these before ``"datastates_ckpt":
    {"host_cache_size": GiB}``.

    Raises ``ValueError`` for an option that is none, and for what is not supported: pipelines,
    tensor parallelism, MoE, states on NVMe or in storage of the nodes, ``elastic_checkpoint``
    (which is not needed: any number of ranks loads what any other has saved).
    """
    found = engine.checkpoint_engine
    if not isinstance(found, DeltaCheckpointEngine):
        found = DeltaCheckpointEngine(engine._config)
        engine.checkpoint_engine = found
    found.bind(engine, options)
    return found


class DeltaCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What DeepSpeed calls to save and load; made by ``install`` or ``attach``."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "DeltaCheckpointEngine"
        self._deepspeed: Any = None
        self._options: dict[str, Any] = {}
        self._root: Path | None = None
        self._engine: _Publishing | None = None
        self._saving: _Save | None = None  # while save_checkpoint runs
        self._reading: Reading | None = None  # while load_checkpoint runs
        self._read: StepReader | None = None  # what the next save continues from
        self._is_fresh = False  # whether the ranks have to agree on that

    def bind(self, engine: Any, options: Mapping[str, Any]) -> None:
        """Belong to a DeepSpeed engine: ``attach`` does it."""
        _refuse(engine)
        self._options = _options(engine._config._param_dict, options)
        root = self._options.pop("root", None)
        self._root = None if root is None else Path(root).absolute()
        self._deepspeed = engine
        engine.save_checkpoint = functools.partial(
            self._save_checkpoint, type(engine).save_checkpoint
        )
        engine.load_checkpoint = functools.partial(
            self._load_checkpoint, type(engine).load_checkpoint
        )

    # What DeepSpeed calls.

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a save: into which folder, under which tag, and whether ``latest`` is to name
        it.
        """
        if self._saving is not None:
            self._saving = _Save(Path(info.save_dir).absolute(), info.tag, info.save_latest)

    def save(self, state_dict: Any, path: str) -> None:
        """Take one file's content, which is written after all of the save are there; outside of a
        save, ``torch.save`` it.
        """
        if self._saving is None:  # the weights alone, a file for other programs: save_16bit_model
            torch.save(state_dict, path)
        else:
            self._saving.files[Path(path).name] = state_dict

    def load(self, path: str, map_location: MapLocation | None = None) -> Any:
        """What a file of DeepSpeed's would hold, for the ranks that there are now; no pickle is
        read.

        Raises ``StepNotFound`` where the step has no such file, ``TreeMismatch`` naming what
        differs where another kind of engine saved it, ``Damaged`` or ``ChainBroken`` naming step,
        leaf and file.
        """
        reading = self._reading or Reading()
        name = os.path.abspath(path)
        if name not in reading.files:  # DeepSpeed reads the model's file twice
            reading.files[name] = self._load(Path(name), reading, map_location)
        return reading.files[name]

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """True: a save commits behind the training, and then publishes its tag by itself."""
        return True

    def is_decoupled(self) -> bool:
        """True: DeepSpeed leaves ``latest`` to this engine."""
        return True  # else DeepSpeed would publish ``latest`` before there is anything

    def get_commit_info(self) -> None:
        """None: there is nothing that DeepSpeed would have to commit."""
        return None

    def preserves_storage_sharing(self) -> bool:
        """False: views of one storage need not be copied apart, each tensor is kept as it is."""
        return False

    def cleanup(self) -> None:
        """Finish the save under way and give the root back. Raises its failure."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            engine.raise_unpublished()

    def wait(self) -> None:
        """Wait until the save under way is committed and published. Raises its failure."""
        if self._engine is not None:
            self._engine.wait()
            self._engine.raise_unpublished()

    # Saving.

    def _save_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._saving = _Save(Path(), "", False)
        try:
            done = original(self._deepspeed, *args, **kwargs)
            self._keep(self._saving)
        finally:
            self._saving = None
        return done

    def _keep(self, save: _Save) -> None:
        engine = self._opened(self._root_of(save.folder))
        together = engine._together
        assert together is not None
        with together.telling():
            engine.raise_unpublished()
            if hasattr(self._deepspeed.optimizer, "optimizer"):
                engine.guard(self._deepspeed.optimizer.optimizer)
            state = self._state(save, engine.folder)
        if self._is_fresh:
            engine.wait()
            self._go_on(engine, state)
        handle = engine.save(self._deepspeed.global_steps, state)
        if handle.state == "skipped":
            log.warning(
                "%s of %s was skipped, since the save before it is still under way",
                save.tag,
                save.folder,
            )

    def _root_of(self, folder: Path) -> Path:
        if self._root is not None:
            return self._root
        return (
            folder.parent / "checkpoint.deltacheck"
            if _TRAINERS_FOLDER.match(folder.name)
            else folder / _ROOT
        )

    def _opened(self, root: Path) -> _Publishing:
        if self._engine is None or self._engine.root != root:
            self.cleanup()
            self._engine = _Publishing(root, process_group=dist.group.WORLD, **self._options)
            self._is_fresh = True
        return self._engine

    def _go_on(self, engine: Engine, state: Any) -> None:
        """Continue the chains of the step that every rank has loaded from this root, if they
        have.
        """
        together, read = engine._together, self._read
        assert together is not None
        self._is_fresh, self._read = False, None
        mine = (
            None
            if read is None or read.root.path != engine.root
            else read.root.digest_of(read.manifest)
        )
        if together.joint.agree(
            mine, lambda every: every[0] is not None and all(one == every[0] for one in every)
        ):
            assert read is not None
            together.resume(engine._saver, read, together.flatten(state))

    def _state(self, save: _Save, root: Path) -> dict[str, Any]:
        """The tree of this rank."""
        partitions = zero.partitions(self._deepspeed)
        flats = {
            _place(flat): [key, number]
            for number, partition in enumerate(partitions)
            for key, flat in {zero.MASTER: partition.master, **partition.states}.items()
        }

        def place_of(tensor: torch.Tensor) -> list[Any] | None:
            return flats.get(_place(tensor)) if tensor.dim() == 1 else None

        about = {
            "zero_stage": int(self._deepspeed.zero_optimization_stage()),
            "groups": len(partitions),
            "ranks": dist.get_world_size(),
            "folder": os.path.relpath(save.folder, root),
            "tag": save.tag,
            "latest": bool(save.save_latest),
        }
        state: dict[str, Any] = {
            _ABOUT: about,
            **zero.fragments(self._deepspeed, partitions),
            _FILES: {},
        }
        for name, content in save.files.items():
            kept = self._without_what_is_known(dict(content), state)
            state[_FILES][name] = plain.encoded(kept, (_FILES, name), place_of)
        return state

    def _without_what_is_known(
        self, content: dict[str, Any], state: dict[str, Any]
    ) -> dict[str, Any]:
        """A file without what ``fragments`` has, and what the engine that loads knows itself."""
        if _OPTIMIZER in content:
            known = [key for key in _OF_THE_RUN if key in content[_OPTIMIZER]]
            content[_OPTIMIZER] = {
                key: value for key, value in content[_OPTIMIZER].items() if key not in known
            }
            content["deltacheck.of_the_run"] = known
            content.pop("ds_config", None)  # the model's file has it
        if "module" in content and isinstance(content["module"], dict):
            trained, module = state[zero.MASTER], state[zero.MODULE]
            names = {alias: self._deepspeed.param_names.get(p, alias) for alias, p in self._named()}
            tied = {
                key: names[key]
                for key in content["module"]
                if names.get(key, key) != key and names[key] in trained
            }
            rest = {
                key: value
                for key, value in content["module"].items()
                if names.get(key, key) not in trained and names.get(key, key) not in module
            }
            content[_TIED] = tied
            content["module"] = {}
            if self._deepspeed.zero_optimization_stage() < 3:
                module.update(plain.encoded(rest, (zero.MODULE,)))
            else:  # buffers, of which each rank has its own
                content["module"] = rest
            content["param_shapes"] = None
            if content.get(_FROZEN) is not None:
                content[_FROZEN] = list(content[_FROZEN])
        return content

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self._deepspeed.module.named_parameters(remove_duplicate=False))

    # Loading.

    def _load_checkpoint(
        self,
        original: Callable[..., Any],
        load_dir: str,
        tag: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.wait()
        self._add_pointers(Path(load_dir), tag)
        self._reading = reading = Reading()
        runtime = deepspeed.runtime.engine
        consolidate = (
            runtime.get_fp32_state_dict_from_zero_checkpoint
        )  # unpickles the ranks' files: called where only weights are loaded
        runtime.get_fp32_state_dict_from_zero_checkpoint = lambda *_, **__: self._weights(reading)
        try:
            found = original(self._deepspeed, load_dir, tag, *args, **kwargs)
        finally:
            self._reading = None
            runtime.get_fp32_state_dict_from_zero_checkpoint = consolidate
        reading.files.clear()
        self._is_fresh, self._read = True, None
        if kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False):
            self._read = reading.reader
            reading.keep(self._own(), bool(self._deepspeed.save_non_zero_checkpoint))
        return found

    def _weights(self, reading: Reading) -> dict[str, torch.Tensor]:
        """The whole model in the precision that the optimizer keeps, as ZeRO 3 loads it where it
        takes no optimizer states.
        """
        (model,) = reading.files.values()
        found = reading.tree({zero.MASTER: None, zero.MODULE: None}, lambda tensor: tensor)
        weights = (
            {name: value for name, value in model["module"].items() if value.numel()}
            | found[zero.MODULE]
            | found[zero.MASTER]
        )
        owners = {
            alias: self._deepspeed.param_names.get(parameter, alias)
            for alias, parameter in self._named()
        }
        return {
            name: weights[owners.get(name, name)]
            for name in model["module"]
            if owners.get(name, name) in weights
        }

    def _own(self) -> dict[str, range]:
        """Which elements of the leaves that are stored flat this rank has, by path."""
        partitions = zero.partitions(self._deepspeed)
        found = zero.fragments(self._deepspeed, partitions)
        below = {zero.MASTER: found[zero.MASTER], zero.MODULE: found[zero.MODULE]} | found[
            zero.OPTIMIZER
        ]
        return {
            zero.prefix(key) + tree.escape_key(name): range(
                one.global_offset[0], one.global_offset[0] + one.data.numel()
            )
            for key, of in below.items()
            for name, one in of.items()
        }

    def _add_pointers(self, folder: Path, tag: str | None) -> None:
        """Give this rank the files that DeepSpeed looks for, where fewer ranks have saved."""
        latest = folder / "latest"
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        if tag is None or not self._deepspeed.zero_optimization():
            return
        for name_of in (self._deepspeed._get_ckpt_name, self._deepspeed._get_zero_ckpt_name):
            path = Path(name_of(str(folder), tag))
            first = path.with_name(_RANK_IN_NAME.sub("zero_pp_rank_0", path.name))
            if not path.exists() and first.exists() and pointer.is_pointer(first):
                pointer.write(path, pointer.read(first))

    def _load(self, path: Path, reading: Reading, map_location: MapLocation | None) -> Any:
        reader = reading.open(path)
        root, manifest = reader.root, reader.manifest
        about = self._about(path, manifest)
        files = child(manifest.tree, _FILES)
        name = path.name
        if name not in keys_of(files):
            name = _RANK_IN_NAME.sub("zero_pp_rank_0", name)  # saved by fewer ranks
        if name not in keys_of(files):
            raise StepNotFound(
                f"step {manifest.step} of {root.path} has no file {path.name!r}; it has"
                f" {', '.join(keys_of(files))}"
            )
        wanted: dict[str, Any] = {_FILES: {name: None}}
        is_model = _OPTIMIZER not in keys_of(child(files, name))
        if is_model and about["zero_stage"] < 3:
            wanted[zero.MODULE] = None
        with damage.named(root, manifest):
            content = reading.tree(wanted, lambda tensor: moved(tensor, map_location))
            holes: dict[tuple[str, int], torch.Tensor] = {}
            partitions = zero.partitions(self._deepspeed)

            def fill(place: list[Any]) -> torch.Tensor:
                key, number = place
                if (
                    type(number) is not int
                    or not 0 <= number < len(partitions)
                    or not isinstance(key, str)
                ):
                    raise Damaged(f"{path}: step {manifest.step} has no flat group {number!r}")
                if (key, number) not in holes:
                    holes[key, number] = torch.zeros_like(
                        partitions[number].master,
                        dtype=reading.dtype(zero.prefix(key)),
                        device="cpu",
                        requires_grad=False,
                    )
                return holes[key, number]

            if is_model:
                found = plain.decoded(content[_FILES][name])
                self._complete_model(found, content.get(zero.MODULE), manifest, reading)
            else:
                saved = content[_FILES][name]
                if about["zero_stage"] == 3:
                    saved[_OPTIMIZER] = self._regrouped(saved[_OPTIMIZER])
                found = plain.decoded(saved, fill)
                reading.put(
                    (zero.prefix(key) + tree.escape_key(part.name), flat, part)
                    for (key, number), flat in holes.items()
                    for part in partitions[number].parts
                )
                self._complete_optimizer(found)
        return found

    def _regrouped(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state with a flat group for each that this engine has: ZeRO 3 makes them
        by ``sub_group_size`` and the number of ranks.
        """
        group_of = self._deepspeed.optimizer.sub_group_to_group_id
        inner = saved["optimizer_state_dict"]
        groups = inner["param_groups"]
        state: dict[int, dict[str, Any]] = {}
        if len(groups) != 1 + max(group_of.values()):
            raise TreeMismatch(
                f"the optimizer was saved with {len(groups)} parameter groups, this engine has"
                f" {1 + max(group_of.values())}; load it with the groups that it was saved with"
            )
        for number, group in sorted(group_of.items()):
            for key, value in inner["state"].get(groups[group]["params"][0], {}).items():
                place = plain.place_in(value)
                state.setdefault(number, {})[key] = (
                    copy.deepcopy(value) if place is None else plain.hole([place[0], number])
                )
        params = [
            [number for number, of in sorted(group_of.items()) if of == group]
            for group in range(len(groups))
        ]
        inner = {
            "state": state,
            "param_groups": [
                {**group, "params": numbers} for group, numbers in zip(groups, params, strict=True)
            ],
        }
        flat = [plain.hole([zero.MASTER, number]) for number in sorted(group_of)]
        return {**saved, "optimizer_state_dict": inner, "fp32_flat_groups": flat}

    def _about(self, path: Path, manifest: Manifest) -> dict[str, Any]:
        """What a step was saved from. Raises ``TreeMismatch`` where that is no DeepSpeed engine, or
        one of another kind.
        """
        if _ABOUT not in keys_of(manifest.tree):
            raise TreeMismatch(
                f"{path} is step {manifest.step} of a root that no DeepSpeed engine has saved to;"
                " read it with load()"
            )
        about = tree.scalars(child(manifest.tree, _ABOUT))
        partitions = zero.partitions(self._deepspeed)
        stage = int(self._deepspeed.zero_optimization_stage())
        if about["zero_stage"] != stage:
            raise TreeMismatch(
                f"{path} was saved under ZeRO {about['zero_stage']}, this engine has ZeRO {stage};"
                f" load it under ZeRO {about['zero_stage']}, or take the parameters alone:"
                " deltacheck.open(root).restore(leaves=['master/<name>', ...])"
            )
        if stage < 3 and about["groups"] != len(partitions):
            raise TreeMismatch(
                f"{path} was saved with {about['groups']} parameter groups, this engine has"
                f" {len(partitions)}; load it with the groups that it was saved with"
            )
        saved = set(keys_of(child(manifest.tree, zero.MASTER)))
        mine = {part.name for partition in partitions for part in partition.parts}
        if alone := sorted(saved ^ mine):
            holder = f"step {manifest.step}" if alone[0] in saved else "this engine"
            raise TreeMismatch(
                f"{path}: parameter {alone[0]!r} is trained in {holder} alone; load it into the"
                " model that was saved"
            )
        return about

    def _complete_model(
        self, found: dict[str, Any], module: Any, manifest: Manifest, reading: Reading
    ) -> None:
        found["dp_world_size"] = (
            self._deepspeed.seq_dp_world_size
        )  # any number of ranks may load it
        tied = found.pop(_TIED, {})
        frozen = found.get(_FROZEN)
        if module is not None:
            found["module"] = OrderedDict(plain.decoded(module))
            if frozen is not None:
                found[_FROZEN] = OrderedDict((name, found["module"][name]) for name in frozen)
        else:
            parts = zero.frozen(self._deepspeed, zero.partitions(self._deepspeed))
            names = [
                *keys_of(child(manifest.tree, zero.MASTER)),
                *keys_of(child(manifest.tree, zero.MODULE)),
            ]
            found["module"] = OrderedDict(found["module"]) | {
                name: torch.empty(0) for name in names
            }
            if frozen is not None:
                flats = {
                    name: torch.zeros_like(part.parameter.ds_tensor, device="cpu")
                    for name, part in parts.items()
                }
                reading.put(
                    (f"{zero.MODULE}/{tree.escape_key(name)}", flats[name], part)
                    for name, part in parts.items()
                )
                found[_FROZEN] = OrderedDict(flats)
        for name, owner in tied.items():
            found["module"][name] = found["module"][owner]
        if self._deepspeed.optimizer and self._deepspeed.zero_optimization():
            found["param_shapes"] = self._deepspeed._get_zero_param_shapes()

    def _complete_optimizer(self, found: dict[str, Any]) -> None:
        for key in found.pop("deltacheck.of_the_run"):
            names = [name for name in _OF_THE_RUN[key] if hasattr(self._deepspeed.optimizer, name)]
            if names:
                found[_OPTIMIZER][key] = getattr(self._deepspeed.optimizer, names[0])
        found["ds_config"] = self._deepspeed.config


@dataclass(slots=True)
class _Save:
    """What ``save_checkpoint`` gives, on one rank. ``files``: state dict by file name."""

    folder: Path
    tag: str
    save_latest: bool
    files: dict[str, Any] = field(default_factory=dict)


class _Publishing(Engine):
    """An engine whose rank 0 lets a committed step be found: the pointers first, then
    ``latest``.
    """

    _unpublished: Exception | None = None

    def _commit(self, manifest: Manifest) -> Written:
        written = super()._commit(manifest)
        try:
            publish(self.folder, manifest)
        except Exception as error:  # the step is there, and later ones may stand on it
            log.exception("step %d is committed, but DeepSpeed cannot find it", manifest.step)
            self._unpublished = error
        return written

    @property
    def folder(self) -> Path:
        assert isinstance(self.root, Path)  # options may name a folder only
        return self.root

    def raise_unpublished(self) -> None:
        """Raise why an earlier step could not be published, once."""
        error, self._unpublished = self._unpublished, None
        if error is not None:
            raise error


def publish(root: Path, manifest: Manifest) -> None:
    """Write the pointers, and ``latest`` where it was asked for, of a step that a DeepSpeed engine
    has saved: again, if they were lost.
    """
    about: dict[str, Any] = {**tree.scalars(child(manifest.tree, _ABOUT))}
    folder = Path(os.path.normpath(root / about["folder"]))
    for name in keys_of(child(manifest.tree, _FILES)):
        path = folder / about["tag"] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pointer.write(path, pointer.Pointer(root, manifest.step, manifest.seq))
    if about["latest"]:
        with new_file(folder / "latest", overwrite=True) as file:
            file.write(about["tag"].encode())


def _place(flat: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """Where a flat tensor begins: a part of it without its padding, even an empty one, does at the
    same place.
    """
    return flat.untyped_storage().data_ptr(), int(flat.storage_offset()), flat.dtype


def _options(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Engine`` takes, from DeepSpeed's configuration and the caller."""
    section = config.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{_SECTION} must be a section with options, not {section!r}")
    datastates = (
        datastates_options(config[SECTION]) if isinstance(config.get(SECTION), Mapping) else {}
    )
    found = {**datastates, **section, **options}
    known = {"root", *inspect.signature(Engine).parameters} - {
        "process_group",
        "max_pending",
        "compact_after",
        "storage",
    }
    for name in found:
        if name not in known:
            raise ValueError(
                f"{_SECTION} has the option {name!r}, which is not one of"
                f" {', '.join(sorted(known))}; leave it out"
            )
    return found


def _refuse(engine: Any) -> None:
    """Raise ``ValueError`` for an engine whose state is not what ``zero.py`` describes."""
    reasons = {
        "a pipeline": engine.pipeline_parallelism,
        "tensor or model parallelism": engine.mp_world_size > 1,
        "MoE layers": engine.has_moe_layers,
        "storage of the nodes (use_node_local_storage)": engine.use_node_local_storage(),
        "an optimizer on NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "elastic_checkpoint (any number of ranks loads without it)": (
            engine.zero_optimization() and engine.zero_elastic_checkpoint()
        ),
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(
                f"deltacheck does not save a DeepSpeed engine with {reason}; leave deltacheck out,"
                " or that"
            )
