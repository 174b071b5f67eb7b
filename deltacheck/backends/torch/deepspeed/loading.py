"""Rebuild the files that DeepSpeed loads, for the ranks of the loading engine."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from deltacheck.backends.torch import holes
from deltacheck.backends.torch.deepspeed import zero
from deltacheck.backends.torch.deepspeed.reading import CheckpointReading, child, keys_of
from deltacheck.backends.torch.deepspeed.saved_state import (
    ABOUT,
    ENGINE_ATTRIBUTES,
    FILES,
    FROZEN,
    OPTIMIZER,
    RUN_VALUES,
    TIED,
    owner_names,
)
from deltacheck.backends.torch.files import pointer
from deltacheck.backends.torch.files.load import MapLocation, moved
from deltacheck.errors import Damaged, StepNotFound, TreeMismatch
from deltacheck.leaf import tree
from deltacheck.restore import damage
from deltacheck.store.manifest import Manifest

# The part of a file name that names the rank, in files of DeepSpeed with ZeRO.
_RANK_IN_NAME = re.compile(r"zero_pp_rank_[0-9]+")


def add_pointers(engine: Any, folder: Path, tag: str | None) -> None:
    """Create the pointers that this rank looks for, if fewer ranks have saved the tag."""
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is None or not engine.zero_optimization():
        return
    for name_of in (engine._get_ckpt_name, engine._get_zero_ckpt_name):
        path = Path(name_of(str(folder), tag))
        first = path.with_name(_first_rank(path.name))
        # The content of all ranks is in one step, so the pointer of rank 0 serves for each of them.
        if not path.exists() and first.exists() and pointer.is_pointer(first):
            pointer.write(path, pointer.read(first))


def load_file(
    engine: Any, path: Path, reading: CheckpointReading, map_location: MapLocation | None
) -> Any:
    """Return what DeepSpeed's file at ``path`` would hold for this rank.

    Args:
        engine: The DeepSpeed engine.
        path: A pointer.
        reading: The load that the file belongs to.
        map_location: The device of the tensors, as for ``torch.load``.

    Raises:
        StepNotFound: The step has no such file.
        TreeMismatch: Another kind of engine has saved it.
        Damaged, ChainBroken: The step is not whole.
    """
    reader = reading.open(path)
    root, manifest = reader.root, reader.manifest
    stage = _matching_stage(engine, path, manifest)
    files = child(manifest.tree, FILES)
    # More ranks than have saved: they rebuild their files from that of rank 0.
    name = path.name if path.name in keys_of(files) else _first_rank(path.name)
    if name not in keys_of(files):
        raise StepNotFound(
            f"step {manifest.step} of {root.path} has no file {path.name!r}; it has"
            f" {', '.join(keys_of(files))}"
        )
    branches: dict[str, Any] = {FILES: {name: None}}
    is_model = OPTIMIZER not in keys_of(child(files, name))
    # Under ZeRO 3 the weights of the model follow from the partitions.
    if is_model and stage < 3:
        branches[zero.MODULE] = None
    with damage.named(root, manifest):
        content = reading.tree(branches, lambda tensor: moved(tensor, map_location))
        saved = content[FILES][name]
        if is_model:
            return _model_file(engine, saved, content.get(zero.MODULE), reading)
        if stage == 3:
            saved[OPTIMIZER] = _regrouped(engine, saved[OPTIMIZER])
        return _optimizer_file(engine, path, saved, reading)


def full_weights(engine: Any, reading: CheckpointReading) -> dict[str, torch.Tensor]:
    """Return the whole model in the precision of the optimizer.

    ZeRO 3 loads it like this if it does not load the optimizer's state.
    """
    # DeepSpeed has loaded the model's file just before, and no other.
    (model,) = reading.files.values()
    saved = reading.tree({zero.MASTER: None, zero.MODULE: None}, lambda tensor: tensor)
    buffers = {name: value for name, value in model["module"].items() if value.numel()}
    weights = buffers | saved[zero.MODULE] | saved[zero.MASTER]
    owners = owner_names(engine)
    return {
        name: weights[owners.get(name, name)]
        for name in model["module"]
        if owners.get(name, name) in weights
    }


def _first_rank(name: str) -> str:
    return _RANK_IN_NAME.sub("zero_pp_rank_0", name)


def _matching_stage(engine: Any, path: Path, manifest: Manifest) -> int:
    """Return the ZeRO stage of a step, after checking that the engine can load it.

    Raises:
        TreeMismatch: No DeepSpeed engine, or one of another kind, has saved the step.
    """
    if ABOUT not in keys_of(manifest.tree):
        raise TreeMismatch(
            f"{path} is step {manifest.step} of a root that no DeepSpeed engine has saved to;"
            " read it with load()"
        )
    header = tree.scalars(child(manifest.tree, ABOUT))
    partitions = zero.partitions(engine)
    stage = int(engine.zero_optimization_stage())
    # The stages keep different content, for example weights of the model only below ZeRO 3.
    if header["zero_stage"] != stage:
        raise TreeMismatch(
            f"{path} was saved under ZeRO {header['zero_stage']}, this engine has ZeRO {stage};"
            f" load it under ZeRO {header['zero_stage']}, or take the parameters alone:"
            " deltacheck.open(root).restore(leaves=['master/<name>', ...])"
        )
    # ZeRO 3 makes its groups from the number of ranks, so they may differ: see _regrouped.
    if stage < 3 and header["groups"] != len(partitions):
        raise TreeMismatch(
            f"{path} was saved with {header['groups']} parameter groups, this engine has"
            f" {len(partitions)}; load it with the groups that it was saved with"
        )
    saved = set(keys_of(child(manifest.tree, zero.MASTER)))
    trained = {part.name for partition in partitions for part in partition.parts}
    if unshared := sorted(saved ^ trained):
        holder = f"step {manifest.step}" if unshared[0] in saved else "this engine"
        raise TreeMismatch(
            f"{path}: parameter {unshared[0]!r} is trained in {holder} alone; load it into the"
            " model that was saved"
        )
    return stage


def _optimizer_file(
    engine: Any, path: Path, saved: Any, reading: CheckpointReading
) -> dict[str, Any]:
    """Return an optimizer's file, with flat tensors that hold the parts of this rank."""
    partitions = zero.partitions(engine)
    flats: dict[tuple[str, int], torch.Tensor] = {}

    def flat_at(place: list[Any]) -> torch.Tensor:
        key, number = place
        # The place comes from the checkpoint, so it is checked before it is used as an index.
        is_group = type(number) is int and 0 <= number < len(partitions)
        if not is_group or not isinstance(key, str):
            raise Damaged(
                f"{path}: step {reading.open(path).manifest.step} has no flat group {number!r}"
            )
        if (key, number) not in flats:
            # Zeros, because the padding of a partition is not stored.
            flats[key, number] = torch.zeros_like(
                partitions[number].master,
                dtype=reading.dtype(zero.prefix(key)),
                device="cpu",
                requires_grad=False,
            )
        return flats[key, number]

    content: dict[str, Any] = holes.filled(saved, flat_at)
    reading.put(
        (zero.leaf_path(key, part.name), flat, part)
        for (key, number), flat in flats.items()
        for part in partitions[number].parts
    )
    for key in content.pop(RUN_VALUES):
        names = [name for name in ENGINE_ATTRIBUTES[key] if hasattr(engine.optimizer, name)]
        if names:
            content[OPTIMIZER][key] = getattr(engine.optimizer, names[0])
    # Taken from this engine, because the optimizer's file was saved without it.
    content["ds_config"] = engine.config
    return content


def _regrouped(engine: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state with one flat group for each group of this engine.

    ZeRO 3 makes the groups from ``sub_group_size`` and the number of ranks.
    """
    group_of = engine.optimizer.sub_group_to_group_id
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
            place = holes.place_in(value)
            # A copy for each group, because the optimizer changes values such as step counters in
            # place.
            state.setdefault(number, {})[key] = (
                copy.deepcopy(value) if place is None else holes.hole([place[0], number])
            )
    params = [
        [number for number, owner in sorted(group_of.items()) if owner == group]
        for group in range(len(groups))
    ]
    inner = {
        "state": state,
        "param_groups": [
            {**group, "params": numbers} for group, numbers in zip(groups, params, strict=True)
        ],
    }
    flat = [holes.hole([zero.MASTER, number]) for number in sorted(group_of)]
    return {**saved, "optimizer_state_dict": inner, "fp32_flat_groups": flat}


def _model_file(
    engine: Any, content: dict[str, Any], module: Any, reading: CheckpointReading
) -> dict[str, Any]:
    """Return a model's file, with the module's tensors and the values of this engine.

    Args:
        engine: The DeepSpeed engine.
        content: The file as it was saved.
        module: The saved module; ``None`` under ZeRO 3, which rebuilds it from the partitions.
        reading: The load that the file belongs to.
    """
    content["dp_world_size"] = engine.seq_dp_world_size  # any number of ranks may load it
    tied = content.pop(TIED, {})
    frozen = content.get(FROZEN)
    if module is not None:
        content["module"] = OrderedDict(module)
        if frozen is not None:
            content[FROZEN] = OrderedDict((name, content["module"][name]) for name in frozen)
    else:
        names = reading.names((zero.MASTER, zero.MODULE))
        content["module"] = OrderedDict(content["module"]) | {
            # DeepSpeed needs only the names. ZeRO 3 takes the weights from the partitions.
            name: torch.empty(0)
            for name in names
        }
        if frozen is not None:
            content[FROZEN] = _frozen_fragments(engine, reading)
    # Tied parameters were saved under one name, which may be in the file only by now.
    for name, owner in tied.items():
        content["module"][name] = content["module"][owner]
    if engine.optimizer and engine.zero_optimization():
        content["param_shapes"] = engine._get_zero_param_shapes()
    return content


def _frozen_fragments(engine: Any, reading: CheckpointReading) -> OrderedDict[str, torch.Tensor]:
    parts = zero.frozen(engine, zero.partitions(engine))
    flats = {
        name: torch.zeros_like(part.parameter.ds_tensor, device="cpu")
        for name, part in parts.items()
    }
    reading.put(
        (zero.leaf_path(zero.MODULE, name), flats[name], part) for name, part in parts.items()
    )
    return OrderedDict(flats)
