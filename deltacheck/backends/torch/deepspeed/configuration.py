"""Check the DeepSpeed engine and turn its configuration into options of ``Engine``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from deltacheck.backends.torch.datastates import SECTION as DATASTATES_SECTION
from deltacheck.backends.torch.datastates import datastates_options
from deltacheck.backends.torch.engine import Engine

_SECTION = "deltacheck"
# Options that belong to this adapter, or that several ranks do not support.
_NOT_CONFIGURABLE = {"process_group", "max_pending", "compact_after", "storage"}


def engine_options(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``Engine`` from DeepSpeed's configuration and from the caller.

    The caller's options take precedence over the section ``"deltacheck"``, and this section over
    ``"datastates_ckpt"``.

    Raises:
        ValueError: A section is not a mapping, an option is unknown, or the policy is not exact.
    """
    section = config.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"{_SECTION} must be a section with options, not {section!r}")
    datastates = (
        datastates_options(config[DATASTATES_SECTION])
        if isinstance(config.get(DATASTATES_SECTION), Mapping)
        else {}
    )
    # The last value of a key counts, so the caller's options come last.
    merged = {**datastates, **section, **options}
    # From the signature, so that a new option of ``Engine`` is accepted here too.
    accepted = {"root", *inspect.signature(Engine).parameters} - _NOT_CONFIGURABLE
    for name in merged:
        if name not in accepted:
            raise ValueError(
                f"{_SECTION} has the option {name!r}, which is not one of"
                f" {', '.join(sorted(accepted))}; leave it out"
            )
    policy = merged.get("policy")
    if policy is not None and not policy.is_exact:
        raise ValueError(
            "DeepSpeed's checkpoints need an exact policy, such as Policy.exact(): their tree has"
            " other names, in which a policy does not find the leaves of a parameter"
        )
    return merged


def refuse_unsupported(engine: Any) -> None:
    """Raise ``ValueError`` if the engine's state is not of the kind that ``zero.py`` describes."""
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
    for feature, is_used in features.items():
        if is_used:
            raise ValueError(
                f"deltacheck does not save a DeepSpeed engine with {feature}; leave deltacheck out,"
                " or that"
            )
