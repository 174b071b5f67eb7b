"""The use of JAX beyond its public interface: its coordination service, and weak types.

No other module imports from ``jax._src``.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed
from jax._src.lax import lax


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


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return an array as a weakly typed one, whose dtype yields to that of any other operand.

    JAX's public functions make such arrays of Python numbers only.
    """
    weak: jax.Array = lax._convert_element_type(array, weak_type=True)
    return weak
