"""The twin of an optimizer: the same class and numbers over tensors of its own, to do its updates a
second time.
"""

from __future__ import annotations

import platform
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.optim import Optimizer

from deltacheck.backends.torch.state import leaves
from deltacheck.codec.base import U8
from deltacheck.errors import ReplayDiffers, TreeMismatch, UnsupportedLeaf
from deltacheck.leaf import tree
from deltacheck.leaf.digest import digest_of
from deltacheck.leaf.spec import LeafSpec
from deltacheck.leaf.tree import ArrayLeaf, Flat, Node
from deltacheck.restore import replay
from deltacheck.restore.content import Loaded
from deltacheck.store.manifest import Manifest, Replay
from deltacheck.store.root import Root

_HASH_THREADS = 4
_DEVICE = "device"  # tag of what does not lie on the host
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def memory_of(optimizer: Optimizer) -> Flat:
    """All that an update reads and writes but for the gradients: weights and their state in the
    order
    of the groups, and the groups' options.

    Raises ``UnsupportedLeaf`` where something of it cannot be kept exactly.
    """
    weights = parameters(optimizer)
    memory = {
        "weights": weights,
        "state": [dict(optimizer.state.get(weight, {})) for weight in weights],
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "options": _options(optimizer),
    }
    return tree.flatten(memory, _describe)


def options_of(optimizer: Optimizer) -> Node:
    """The options of the groups as they are now. Raises ``UnsupportedLeaf`` where one is a tensor
    or cannot be kept exactly.
    """
    flat = tree.flatten(_options(optimizer), leaves.describe)
    if flat.arrays:
        raise UnsupportedLeaf(
            f"option {next(iter(flat.arrays))!r} of the optimizer's groups is an array, which may"
            " change outside its steps"
        )
    return flat.skeleton


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_of(optimizer: Optimizer) -> str:
    """What computes an update, as far as it has a name: whoever looks for the reason of other bits
    looks here first.
    """
    kind = type(optimizer)
    devices = sorted({parameter.device.type for parameter in parameters(optimizer)})
    capability = (
        torch.backends.cpu.get_cpu_capability() if devices == ["cpu"] else "/".join(devices)
    )
    return (
        f"{kind.__module__}.{kind.__qualname__} (torch {torch.__version__}, {platform.machine()}"
        f" {capability})"
    )


class Replica:
    """Made from the optimizer ``like`` and the content of a memory.

    ``place(path, device)`` gives the tensor at a path of the memory, for the replica's own;
    ``device`` is where it belongs. Raises ``TreeMismatch`` where the memory is of other groups than
    ``like`` has.
    """

    def __init__(
        self, like: Optimizer, memory: Node, place: Callable[[str, torch.device], torch.Tensor]
    ) -> None:
        theirs = parameters(like)
        found = len([path for path in tree.array_paths(memory) if path.startswith("weights/")])
        if found != len(theirs):
            raise TreeMismatch(
                f"the step was logged with {found} parameters, the optimizer has {len(theirs)}"
            )

        def put(path: str, owner: str, tag: str | None) -> torch.Tensor:
            device = (
                theirs[int(path.split("/")[1])].device if tag == _DEVICE else torch.device("cpu")
            )
            return place(path, device)

        content: Any = tree.unflatten(memory, put)
        if content["sizes"] != [len(group["params"]) for group in like.param_groups]:
            raise TreeMismatch(
                f"the step was logged with parameter groups of {content['sizes']} parameters, the"
                " optimizer has others"
            )
        for number, (weight, their) in enumerate(zip(content["weights"], theirs, strict=True)):
            if (weight.shape, weight.dtype) != (their.shape, their.dtype):
                raise TreeMismatch(
                    f"parameter {number} is {weight.dtype}{list(weight.shape)} in the log,"
                    f" {their.dtype}{list(their.shape)} in the optimizer"
                )
            weight.requires_grad_(their.requires_grad)
        self.optimizer = _twin(like, content)
        self._step = _plain_step(type(like))

    def update(self, options: Node, inputs: Mapping[str, torch.Tensor]) -> None:
        """One step. ``inputs``: gradients by the parameter's number; those of the others are
        ``None``.
        """
        restored: Any = tree.unflatten(options, _no_array)
        for group, own in zip(self.optimizer.param_groups, restored, strict=True):
            group.update(own)
        for number, weight in enumerate(parameters(self.optimizer)):
            gradient = inputs.get(str(number))
            # A copy: an optimizer may change the gradients that it is given.
            weight.grad = (
                None
                if gradient is None
                else gradient.to(weight.device, copy=True).reshape(weight.shape)
            )
        self._step(self.optimizer)
        for weight in parameters(self.optimizer):
            weight.grad = None

    def memory(self) -> Flat:
        return memory_of(self.optimizer)


def replayed(
    root: Root, manifest: Manifest, plan: Replay, stored: Mapping[str, Loaded], optimizer: Optimizer
) -> dict[str, Loaded]:
    """The leaves of a step that a replay gives, proven by their digests; ``stored`` is left as it
    is.

    Raises ``ReplayDiffers``, ``TreeMismatch``.
    """

    def place(path: str, device: torch.device) -> torch.Tensor:
        return leaves.tensor_of(stored[plan.places[path]]).to(device, copy=True)

    twin = Replica(optimizer, plan.memory, place)
    try:
        for step in plan.steps:
            inputs = {name: leaves.tensor_of(stored[path]) for name, path in step.inputs.items()}
            twin.update(step.options, inputs)
        memory = twin.memory()
    except Exception as error:
        raise ReplayDiffers(
            f"step {manifest.step}: {len(plan.steps)} updates of {plan.update} cannot be replayed"
            f" with {name_of(optimizer)}: {type(error).__name__}: {error}."
            f" {replay.way_out(root, manifest)}"
        ) from error
    found = {plan.places.get(path, path): digest for path, digest in digests(memory).items()}
    replay.check(root, manifest, found, name_of(optimizer))
    return {
        plan.places[path]: stored[plan.places[path]]._replace(data=leaves.bytes_of(value))
        for path, value in memory.arrays.items()
        if path in plan.places
    }


def digests(flat: Flat) -> dict[str, str]:
    """The leaf digest of every array. What lies on a device is copied to the host one by one, in
    the order of this thread's stream.
    """

    def one(path: str, host: U8) -> str:
        leaf = flat.leaves[path]
        spec = LeafSpec.of(path, leaf.shape, leaf.dtype)
        return digest_of(spec, host)

    here = [path for path, value in flat.arrays.items() if not _is_on_device(value)]
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        found = dict(
            zip(
                here,
                pool.map(one, here, [leaves.bytes_of(flat.arrays[path]) for path in here]),
                strict=True,
            )
        )
        return {
            path: found.get(path) or one(path, leaves.bytes_of(value))
            for path, value in flat.arrays.items()
        }


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _describe(value: object) -> ArrayLeaf | None:
    described = leaves.describe(value)
    return (
        described._replace(tag=_DEVICE)
        if described is not None and _is_on_device(value)
        else described
    )


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _twin(like: Optimizer, content: Mapping[str, Any]) -> Optimizer:
    """An optimizer of the same class whose tensors are those of ``content``; nobody's hooks are
    called by it.
    """
    twin = object.__new__(type(like))
    # ``step`` is there where a scheduler has wrapped the bound method.
    own = {
        name: value
        for name, value in vars(like).items()
        if name not in ("step", "state", "param_groups")
    }
    vars(twin).update(own | {name: OrderedDict() for name in _HOOKS})
    weights: Sequence[torch.Tensor] = content["weights"]
    twin.state = defaultdict(
        dict,
        {weight: state for weight, state in zip(weights, content["state"], strict=True) if state},
    )
    at = 0
    twin.param_groups = []
    for size, options in zip(content["sizes"], content["options"], strict=True):
        twin.param_groups.append({"params": list(weights[at : at + size]), **options})
        at += size
    return twin


def _plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], object]:
    """``step`` without torch's wrapper that calls the hooks: this update is nobody's business."""
    step: Any = kind.step
    plain: Callable[[Optimizer], object] = (
        step.__wrapped__ if getattr(step, "hooked", False) else step
    )
    return plain


def _no_array(path: str, owner: str, tag: str | None) -> object:
    raise UnsupportedLeaf(f"option {path!r} of an optimizer's groups is an array")
