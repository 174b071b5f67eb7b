"""What we know of JAX beyond its public interface: where the client of its coordination service is.
Nothing else imports from ``jax._src``.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed


def coordination_client() -> Any:
    """The client of the coordination service, whose store of keys all processes of the run share.

    Raises ``RuntimeError`` where there is none: several processes, and
    ``jax.distributed.initialize`` was not called.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "this run has several processes, but no coordination service, over which they could"
            " agree on a save; call jax.distributed.initialize() first"
        )
    return client
