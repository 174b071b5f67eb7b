"""Replicas of optimizers: the same class and options over tensors of their own.

A replica repeats the updates of an optimizer, at a save to prove that they can be replayed, and at
a restore to compute the state.
"""

from __future__ import annotations

import platform
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deltacheck.backends.torch.state import leaves
from deltacheck.backends.torch.state.classes import build
from deltacheck.codec.base import U8
from deltacheck.errors import TreeMismatch, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.content import Loaded
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.roots.root import Root

_DEVICE = "device"  # permanent: the tag of tensors that are not on the host
# Hooks of the live optimizer, such as the log's own, must not run for a replica.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def memory_of(optimizer: Optimizer) -> Flat:
    """Return everything that an update reads and writes, except the gradients.

    These are the weights and their state in the order of the groups, and the options of the groups.

    Raises:
        UnsupportedLeaf: A value cannot be kept exactly.
    """
    weights = parameters(optimizer)
    # The keys are permanent: the manifest of a replayed step holds this skeleton.
    memory = {
        "weights": weights,
        "state": [dict(optimizer.state.get(weight, {})) for weight in weights],
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "options": _options(optimizer),
    }
    return leaves.flatten(memory, _describe)


def options_of(optimizer: Optimizer) -> Node:
    """Return the present options of the groups.

    Raises:
        UnsupportedLeaf: An option is a tensor or cannot be kept exactly.
    """
    flat = leaves.flatten(_options(optimizer))
    if flat.arrays:
        raise UnsupportedLeaf(
            f"option {next(iter(flat.arrays))!r} of the optimizer's groups is an array, which may"
            " change outside its steps"
        )
    return flat.skeleton


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_of(optimizer: Optimizer) -> str:
    """Return the name of the code that computes an update.

    It appears in errors, because other code is the first reason to suspect for other bits.
    """
    kind = type(optimizer)
    devices = sorted({parameter.device.type for parameter in parameters(optimizer)})
    capability = (
        # Kernels for other vector instructions may round an update in another way.
        torch.backends.cpu.get_cpu_capability() if devices == ["cpu"] else "/".join(devices)
    )
    return (
        f"{kind.__module__}.{kind.__qualname__} (torch {torch.__version__}, {platform.machine()}"
        f" {capability})"
    )


class OptimizerReplica:
    """A second instance of an optimizer, over tensors of its own.

    Args:
        like: The optimizer.
        memory: The skeleton of the content, as ``memory_of`` returns it.
        place: Returns the tensor at a path of the memory, on a device. The replica changes it.

    Raises:
        TreeMismatch: The memory has other groups or parameters than the optimizer.
    """

    def __init__(
        self, like: Optimizer, memory: Node, place: Callable[[str, torch.device], torch.Tensor]
    ) -> None:
        originals = parameters(like)
        count = len([path for path in tree.array_paths(memory) if path.startswith("weights/")])
        if count != len(originals):
            raise TreeMismatch(
                f"the step was logged with {count} parameters, the optimizer has {len(originals)}"
            )

        def put(path: str, owner: str, tag: str | None) -> torch.Tensor:
            # Adam's step counters, for example, are on the host beside weights on a device. The
            # second key of a path is the number of the parameter, for weights and for their state.
            device = (
                originals[int(path.split("/")[1])].device if tag == _DEVICE else torch.device("cpu")
            )
            return place(path, device)

        content: Any = tree.unflatten(memory, put, build)
        if content["sizes"] != [len(group["params"]) for group in like.param_groups]:
            raise TreeMismatch(
                f"the step was logged with parameter groups of {content['sizes']} parameters, the"
                " optimizer has others"
            )
        for number, (weight, original) in enumerate(
            zip(content["weights"], originals, strict=True)
        ):
            if (weight.shape, weight.dtype) != (original.shape, original.dtype):
                raise TreeMismatch(
                    f"parameter {number} is {weight.dtype}{list(weight.shape)} in the log,"
                    f" {original.dtype}{list(original.shape)} in the optimizer"
                )
            weight.requires_grad_(original.requires_grad)
        self.optimizer = _twin(like, content)
        self._step = _plain_step(type(like))

    def update(self, options: Node, inputs: Mapping[str, torch.Tensor]) -> None:
        """Do one step of the optimizer.

        Args:
            options: The options of the groups, as ``options_of`` returned them.
            inputs: Gradients by the parameter's number. Other parameters have no gradient.
        """
        restored: Any = tree.unflatten(options, _no_array, build)
        for group, group_options in zip(self.optimizer.param_groups, restored, strict=True):
            # A scheduler changes the options between updates, so each update has its own.
            group.update(group_options)
        for number, weight in enumerate(parameters(self.optimizer)):
            gradient = inputs.get(str(number))
            # A copy, because an optimizer may change its gradients.
            weight.grad = (
                None
                if gradient is None
                else gradient.to(weight.device, copy=True).reshape(weight.shape)
            )
        self._step(self.optimizer)
        for weight in parameters(self.optimizer):
            weight.grad = None

    def memory(self) -> Flat:
        """Return the content after the updates so far."""
        return memory_of(self.optimizer)


def replayed(
    root: Root, manifest: Manifest, plan: Replay, stored: Mapping[str, Loaded], optimizer: Optimizer
) -> dict[str, Loaded]:
    """Return the leaves that a replay gives, proven by their digests.

    Args:
        root: The root.
        manifest: The step.
        plan: The updates of the step.
        stored: The leaves and inputs that are stored. They are not changed.
        optimizer: An optimizer made as at the save. Its own tensors are not changed.

    Raises:
        ReplayDiffers: The replay gives other bits than were saved.
        TreeMismatch: The step was logged with other parameter groups.
    """

    def place(path: str, device: torch.device) -> torch.Tensor:
        return leaves.tensor_of(stored[plan.places[path]]).to(device, copy=True)

    memory = replay.replay_updates(
        root,
        manifest,
        plan,
        OptimizerReplica(optimizer, plan.memory, place),
        lambda path: leaves.tensor_of(stored[path]),
        lambda memory: (memory, digests(memory)),
        name_of(optimizer),
    )
    return {
        plan.places[path]: stored[plan.places[path]]._replace(data=leaves.bytes_of(value))
        for path, value in memory.arrays.items()
        if path in plan.places
    }


def digests(flat: Flat) -> dict[str, str]:
    """Return the leaf digest of every array.

    Arrays on a device are copied to the host one at a time, to limit the memory, and on this
    thread, to follow the order of its stream.
    """

    def leaf(path: str) -> tuple[LeafSpec, U8]:
        description = flat.leaves[path]
        spec = LeafSpec.of(path, description.shape, description.dtype)
        return spec, leaves.bytes_of(flat.arrays[path])

    on_host = [path for path, value in flat.arrays.items() if not _is_on_device(value)]
    # Host arrays are hashed by several threads.
    by_path = dict(zip(on_host, replay.leaf_digests(map(leaf, on_host)), strict=True))
    return {path: by_path.get(path) or digest_of(*leaf(path)) for path in flat.arrays}


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _describe(value: object) -> ArrayLeaf | None:
    description = leaves.describe(value)
    return (
        description._replace(tag=_DEVICE)
        if description is not None and _is_on_device(value)
        else description
    )


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _twin(like: Optimizer, content: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of the same class over the tensors of ``content``, without hooks."""
    # Not through the constructor, whose arguments are not known.
    twin = object.__new__(type(like))
    # A scheduler wraps the bound method and stores it as the attribute ``step``.
    attributes = {
        name: value
        for name, value in vars(like).items()
        if name not in ("step", "state", "param_groups")
    }
    vars(twin).update(attributes | {name: OrderedDict() for name in _HOOKS})
    weights: Sequence[torch.Tensor] = content["weights"]
    twin.state = defaultdict(
        dict,
        # In torch, too, a parameter has no entry before its first update.
        {weight: state for weight, state in zip(weights, content["state"], strict=True) if state},
    )
    first = 0
    twin.param_groups = []
    for size, options in zip(content["sizes"], content["options"], strict=True):
        twin.param_groups.append({"params": list(weights[first : first + size]), **options})
        first += size
    return twin


def _plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """Return ``step`` without torch's wrapper, which calls hooks that expect the training."""
    step: Any = kind.step
    plain: Callable[[Optimizer], object] = (
        step.__wrapped__ if getattr(step, "hooked", False) else step
    )
    return plain


def _no_array(path: str, owner: str, tag: str | None) -> object:
    raise UnsupportedLeaf(f"option {path!r} of an optimizer's groups is an array")
