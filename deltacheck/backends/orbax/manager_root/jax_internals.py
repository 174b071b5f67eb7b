"""The use of JAX beyond its public interface: the client of its coordination service.

No other module imports from ``jax._src``.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed


def coordination_client() -> Any:
    """Return the client of the coordination service, whose key-value store all processes share.

    Raises ``RuntimeError`` if ``jax.distributed.initialize`` was not called.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "this run has several processes, but no coordination service, over which they could"
            " agree on a save; call jax.distributed.initialize() first"
        )
    return client
