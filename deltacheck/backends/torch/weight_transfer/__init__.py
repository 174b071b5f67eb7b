"""Adapters that carry published weights between trainers and inference engines.

``trl_transfer`` and ``verl_engine`` publish the weights that a trainer sends. ``vllm_engine`` and
``verl_engine`` hand them to inference workers. See ``docs/how-to/publish.md``.
"""

from __future__ import annotations

import logging

from deltacheck.backends.torch.weight_transfer.trl_transfer import PublishedWeights

__all__ = ["PublishedWeights", "register_with_vllm"]

log = logging.getLogger("deltacheck")

_BACKEND = "deltacheck"


def register_with_vllm() -> None:
    """Register the weight transfer backend ``deltacheck`` in this process of vLLM.

    vLLM calls it through the entry point ``vllm.general_plugins``. A second call does nothing.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ModuleNotFoundError as error:
        # Every process of vLLM comes here, whether it transfers weights or not.
        log.info("this vLLM has no backends for weight transfer (%s)", str(error))
        return
    if _BACKEND not in WeightTransferEngineFactory._registry:
        # By name, so that the engine is imported only if it is used.
        WeightTransferEngineFactory.register_engine(
            _BACKEND, f"{__name__}.vllm_engine", "DeltaCheckWeightTransferEngine"
        )
