"""Check the DeepSpeed engine and turn its configuration into options of ``Engine``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deltacheck.backends.torch.engine import Engine
from deltacheck.policy import Keep, KeepBest, Policy
from deltacheck.save.save_options import SaveOptions

_SECTION = "deltacheck"
# The section of DataStates-LLM's checkpoint engine. Its other two options have no counterpart: the
# encoder takes idle processors, and copies from a device always go to pinned memory.
_DATASTATES, _DATASTATES_OPTIONS = "datastates_ckpt", ("parser_threads", "pin_host_cache")
# Of the arguments of ``Engine``, those that belong to this adapter or that several ranks lack.
_NOT_CONFIGURABLE = {"process_group", "storage", "memory"}

# Presets that need no arguments, by the names that a configuration in JSON may give.
_POLICIES: dict[str, Callable[[], Policy]] = {
    "exact": Policy.exact,
    "derive": partial(Policy.exact, derive=True),
    "auto": Policy.auto,
}


def engine_options(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``Engine`` from DeepSpeed's configuration and from the caller.

    The caller's options take precedence over the section ``"deltacheck"``, and this section over
    ``"datastates_ckpt"``.

    Raises:
        ValueError: A section is not a mapping, or an option or the name of a policy is unknown.
    """
    section = config.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{_SECTION} must be a section with options, not {section!r}")
    # The last value of a key counts, so the caller's options come last.
    merged = {**section, **options}
    # From the signature, so that a new argument of ``Engine`` is accepted here too.
    accepted = {"root", *inspect.signature(Engine).parameters} - _NOT_CONFIGURABLE
    for name in merged:
        if name not in accepted:
            raise ValueError(
                f"{_SECTION} has the option {name!r}, which is not one of"
                f" {', '.join(sorted(accepted))}; leave it out"
            )
    # JSON has names and sections where Python has records.
    if isinstance(merged.get("policy"), str):
        merged["policy"] = _policy_named(merged["policy"])
    if isinstance(merged.get("keep"), Mapping):
        best = merged["keep"].get("best", ())
        rules = [best] if isinstance(best, Mapping) else best
        for rule in rules:
            _check(KeepBest, "keep.best", rule)
        _check(Keep, "keep", merged["keep"])
        best = tuple(KeepBest(**rule) for rule in rules)
        merged["keep"] = Keep(**{**merged["keep"], "best": best})
    fields = merged.get("options", {})
    if isinstance(fields, Mapping):
        _check(SaveOptions, "options", fields)
        merged["options"] = SaveOptions(**{**_datastates_options(config), **fields})
    return merged


def _datastates_options(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of ``SaveOptions`` that correspond to DataStates-LLM's options.

    ``host_cache_size`` (GiB) becomes ``host_cache_bytes``.
    """
    section = config.get(_DATASTATES, {})
    # ``true`` selects DataStates-LLM without options.
    section = section if isinstance(section, Mapping) else {}
    for name in section:
        if name not in ("host_cache_size", *_DATASTATES_OPTIONS):
            raise ValueError(
                f"{_DATASTATES} has the option {name!r}, which is not one of"
                f" {', '.join(('host_cache_size', *_DATASTATES_OPTIONS))}; leave it out"
            )
    if "host_cache_size" not in section:
        return {}
    size = section["host_cache_size"]
    # bool is a subclass of int, and ``true`` would mean 1 GiB.
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
        raise ValueError(
            f"{_DATASTATES}.host_cache_size must be a number of GiB above 0, not {size!r}"
        )
    # A small fraction of a GiB is rounded to 0 bytes, which ``Engine`` refuses.
    return {"host_cache_bytes": max(1, int(size * (1 << 30)))}


def _check(kind: type[Keep | KeepBest | SaveOptions], name: str, section: Any) -> None:
    """Raise ``ValueError`` if a section of JSON has a field that a record does not have."""
    names = {field.name for field in dataclasses.fields(kind)}
    for field in section:
        if field not in names:
            raise ValueError(
                f"{_SECTION}.{name} has the option {field!r}, which is not one of"
                f" {', '.join(sorted(names))}; leave it out"
            )


def _policy_named(name: str) -> Policy:
    """Return a policy by the name of its preset, since JSON cannot hold a ``Policy``."""
    if name not in _POLICIES:
        raise ValueError(
            f"{_SECTION} has the policy {name!r}, which is not one of"
            f" {', '.join(sorted(_POLICIES))}; for other policies, call"
            " install(policy=Policy...) in Python"
        )
    return _POLICIES[name]()


def refuse_unsupported(engine: Any, policy: Policy | None) -> None:
    """Raise ``ValueError`` if the engine's state is not of the kind that ``zero.py`` describes.

    Args:
        engine: The DeepSpeed engine.
        policy: The policy of its saves; ``None``: the default.
    """
    features = {
        "a pipeline": engine.pipeline_parallelism,
        "tensor or model parallelism": engine.mp_world_size > 1,
        "MoE layers": engine.has_moe_layers,
        "storage of the nodes (use_node_local_storage)": engine.use_node_local_storage(),
        "an optimizer on NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "elastic_checkpoint (any number of ranks loads without it)": (
            engine.zero_optimization() and engine.zero_elastic_checkpoint()
        ),
    }
    offload = engine.zero_offload_param()
    # Only a bounded master needs the weight beside it, which is not in memory then.
    features["parameters on NVMe under a policy with bounded contracts (use Policy.exact())"] = (
        is_bounded(policy) and offload is not None and str(offload.device).endswith("nvme")
    )
    for feature, is_used in features.items():
        if is_used:
            raise ValueError(
                f"deltacheck does not save a DeepSpeed engine with {feature}; leave deltacheck out,"
                " or that"
            )


def is_bounded(policy: Policy | None) -> bool:
    """Return ``True`` if a policy may bound or reuse leaves."""
    return policy is not None and policy.hidden is not None
