"""Stand-ins for vLLM 0.33.0 and verl 0.9.1, which take gigabytes and a GPU to install.

They have the names and signatures of the public source that the adapters use, and check what the
originals check. ``install`` puts them in the place of the packages.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch


@dataclass
class InitInfo:
    pass


@dataclass
class UpdateInfo:
    pass


class WeightTransferEngine(ABC):
    init_info_cls: type[Any]
    update_info_cls: type[Any]
    supports_draft_weight_update = True

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        self.config, self.vllm_config = config, vllm_config
        self.model_config = vllm_config.model_config
        self.device, self.model = device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(str(error)) from error

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(str(error)) from error

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class WeightTransferEngineFactory:
    _registry: ClassVar[dict[str, Callable[[], type[WeightTransferEngine]]]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: str | type[Any], class_name: str | None = None
    ) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered")
        assert isinstance(module_path_or_cls, str)
        assert class_name is not None
        path, attribute = module_path_or_cls, class_name
        cls._registry[name] = lambda: getattr(importlib.import_module(path), attribute)

    @classmethod
    def create_engine(
        cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> WeightTransferEngine:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


@torch.no_grad()
def load_checkpoint_weight_patches(
    model: Any,
    patches: Iterable[CheckpointWeightPatch],
    *,
    max_chunk_bytes: int = 512 << 20,
    validate_unique_indices: bool = True,
) -> set[str]:
    loaded = set()
    for patch in patches:
        assert patch.indices is not None, "dense and sparse patches cannot be mixed"
        if not patch.dtype.is_floating_point or bool(torch.isnan(patch.values).any()):
            raise ValueError("NaN marks unchanged elements")
        assert (patch.values.ndim, patch.indices.ndim) == (1, 1)
        assert patch.indices.dtype in (torch.int32, torch.int64)
        assert patch.values.dtype == patch.dtype
        full = torch.full((torch.Size(patch.shape).numel(),), float("nan"), dtype=patch.dtype)
        full[patch.indices] = patch.values
        # The original replaces ``Tensor.copy_`` for the time of the call.
        model.keeps_at_nan = True
        try:
            loaded |= model.load_weights([(patch.name, full.view(patch.shape))])
        finally:
            model.keeps_at_nan = False
    return loaded


class Model(torch.nn.Module):
    """A worker's model with packed parameters: each has two tensors of a checkpoint.

    ``calls`` has the parts of each load of a checkpoint. ``fails`` makes a load fail after its
    first write.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        names = sorted(weights)
        self.places = {name: (number // 2, number % 2) for number, name in enumerate(names)}
        self.packed = [
            torch.stack([torch.zeros_like(weights[name]) for name in names[first : first + 2]])
            for first in range(0, len(names), 2)
        ]
        self.calls: list[str] = []
        self.keeps_at_nan = False
        self.fails = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, value in weights:
            row, part = self.places[name]
            target = self.packed[row][part]
            assert target.dtype == value.dtype
            if self.keeps_at_nan:
                value = torch.where(torch.isnan(value), target, value)
            target.copy_(value)
            if self.fails:
                raise RuntimeError("no memory")
            loaded.add(name)
        return loaded

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint."""
        return {name: self.packed[row][part] for name, (row, part) in self.places.items()}


def initialize_layerwise_reload(model: Any) -> None:
    model.calls.append("reload")


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    assert model_config == "model config"
    model.calls.append("done")


class CheckpointEngineRegistry:
    _registry: ClassVar[dict[str, type[Any]]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type[Any]], type[Any]]:
        def wrapper(cls: type[Any]) -> type[Any]:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None: ...

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> Any: ...


_MODULES: dict[str, dict[str, object]] = {
    "vllm": {},
    "vllm.distributed": {},
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine": WeightTransferEngine,
        "WeightTransferInitInfo": InitInfo,
        "WeightTransferUpdateInfo": UpdateInfo,
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory": WeightTransferEngineFactory
    },
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.checkpoint_weight_patch": {
        "CheckpointWeightPatch": CheckpointWeightPatch,
        "load_checkpoint_weight_patches": load_checkpoint_weight_patches,
    },
    "vllm.model_executor.model_loader.reload": {
        "initialize_layerwise_reload": initialize_layerwise_reload,
        "finalize_layerwise_reload": finalize_layerwise_reload,
    },
    "verl": {},
    "verl.checkpoint_engine": {},
    "verl.checkpoint_engine.base": {
        "CheckpointEngine": CheckpointEngine,
        "CheckpointEngineRegistry": CheckpointEngineRegistry,
    },
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in the place of the packages for one test."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {})
    for name, attributes in _MODULES.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    # The adapters are imported anew, so that they register with these registries.
    for adapter in ("vllm_engine", "verl_engine"):
        monkeypatch.delitem(
            sys.modules, f"deltacheck.backends.torch.weight_transfer.{adapter}", raising=False
        )
