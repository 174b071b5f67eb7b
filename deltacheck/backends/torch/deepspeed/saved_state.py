"""Build the tree that one rank saves from the files that DeepSpeed would write.

Flat partitions are stored by parameter (``zero.py``), everything else as it is. The tree has no
value that the loading engine knows itself, because such values describe the ranks of one run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deltacheck.backends.torch import holes
from deltacheck.backends.torch.deepspeed import zero

ABOUT, FILES, TIED = "deepspeed", "files", "deltacheck.tied"  # keys of the saved tree, permanent
TRAINER = "trainer"  # the key of ``TrainerPart.state``, permanent
RUN_VALUES = "deltacheck.of_the_run"  # permanent: names the keys of ENGINE_ATTRIBUTES left out
OPTIMIZER, FROZEN = "optimizer_state_dict", "frozen_param_fragments"  # keys of DeepSpeed's files
# Values that a load takes from the loading engine, since they depend on how its ranks share the
# parameters: key of a file -> attributes of the optimizer.
ENGINE_ATTRIBUTES = {
    "group_paddings": ("groups_padding", "group_paddings"),
    "param_alignment_paddings": ("round_robin_bit16_padding",),
    "partition_count": ("partition_count",),
    "param_slice_mappings": ("_param_slice_mappings",),
}


@dataclass(slots=True)
class PendingSave:
    """The files that ``save_checkpoint`` has passed so far on this rank: state dict by name."""

    folder: Path
    tag: str
    save_latest: bool
    files: dict[str, Any] = field(default_factory=dict)


class TrainerPart(NamedTuple):
    """The state of this rank that a trainer saves in one step with that of DeepSpeed."""

    step: int
    state: Mapping[str, Any]
    metrics: Mapping[str, float]


def state_of(
    engine: Any, save: PendingSave, root: Path, *, is_exact: bool = True
) -> dict[str, Any]:
    """Return the tree that this rank saves.

    Args:
        engine: The DeepSpeed engine.
        save: The files of the save.
        root: The root that is saved to.
        is_exact: As in ``zero.fragments``.
    """
    partitions = zero.partitions(engine)
    flats = {
        # DeepSpeed's optimizer file refers to these very tensors, so their memory identifies them.
        _start_of(flat): [key, number]
        for number, partition in enumerate(partitions)
        for key, flat in {zero.MASTER: partition.master, **partition.states}.items()
    }

    def place_of(tensor: torch.Tensor) -> list[Any] | None:
        # Partitions are flat. Any other tensor is stored as it is.
        return flats.get(_start_of(tensor)) if tensor.dim() == 1 else None

    header = {
        "zero_stage": int(engine.zero_optimization_stage()),
        "groups": len(partitions),
        "ranks": dist.get_world_size(),
        # Relative, so that the folder and the root can be moved together.
        "folder": os.path.relpath(save.folder, root),
        "tag": save.tag,
        "latest": bool(save.save_latest),
        # Read by the policy (``policy/optimizer_state.py``).
        "param_groups": zero.parameter_groups(engine, partitions),
    }
    fragments = zero.fragments(engine, partitions, is_exact=is_exact)
    state: dict[str, Any] = {ABOUT: header, **fragments, FILES: {}}
    for name, content in save.files.items():
        # A copy, because DeepSpeed may still use its dict.
        reduced = _reduced(engine, dict(content), state)
        state[FILES][name] = holes.with_holes(reduced, place_of)
    return state


def owner_names(engine: Any) -> Mapping[str, str]:
    """Return, for each parameter name of the module, the name that DeepSpeed has for it.

    Names of tied parameters map to one name.
    """
    parameters = engine.module.named_parameters(remove_duplicate=False)
    return {alias: engine.param_names.get(parameter, alias) for alias, parameter in parameters}


def own_elements(engine: Any, *, is_exact: bool = True) -> dict[str, range]:
    """Return, by leaf path, the elements of this rank in leaves that are stored flat.

    ``is_exact``: as in ``zero.fragments``.
    """
    fragments = zero.fragments(engine, zero.partitions(engine), is_exact=is_exact)
    by_key = {key: fragments[key] for key in (zero.MASTER, zero.MODULE)}
    by_key |= fragments[zero.OPTIMIZER]
    return {
        zero.leaf_path(key, name): range(
            fragment.global_offset[0], fragment.global_offset[0] + fragment.data.numel()
        )
        for key, by_name in by_key.items()
        for name, fragment in by_name.items()
    }


def _reduced(engine: Any, content: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Remove from a file the tensors in ``state`` and the values that the loading engine knows."""
    if OPTIMIZER in content:
        run_keys = [key for key in ENGINE_ATTRIBUTES if key in content[OPTIMIZER]]
        content[OPTIMIZER] = {
            key: value for key, value in content[OPTIMIZER].items() if key not in run_keys
        }
        content[RUN_VALUES] = run_keys
        content.pop("ds_config", None)  # the model's file has it
    if "module" in content and isinstance(content["module"], dict):
        trained, module = state[zero.MASTER], state[zero.MODULE]
        names = owner_names(engine)
        content[TIED] = {
            key: names[key]
            for key in content["module"]
            # Only names that differ from the stored one need an entry.
            if names.get(key, key) != key and names[key] in trained
        }
        rest = {
            key: value
            for key, value in content["module"].items()
            if names.get(key, key) not in trained and names.get(key, key) not in module
        }
        content["module"] = {}
        if engine.zero_optimization_stage() < 3:
            module.update(rest)
        else:  # buffers, which may differ between the ranks
            content["module"] = rest
        # The loading engine computes the shapes itself.
        content["param_shapes"] = None
        if content.get(FROZEN) is not None:
            content[FROZEN] = list(content[FROZEN])
    return content


def _start_of(flat: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """Identify a flat tensor by its start.

    A slice without the padding begins at the same place, even if it is empty.
    """
    return flat.untyped_storage().data_ptr(), int(flat.storage_offset()), flat.dtype
