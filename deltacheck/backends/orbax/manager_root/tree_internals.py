"""Orbax's metadata of trees, which has no public names (0.11.30 to 0.12.8)."""

from collections.abc import Iterator
from typing import Any

import jax
from orbax import checkpoint as ocp
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint._src.metadata.tree import _TreeMetadataImpl as TreeMetadata
from orbax.checkpoint._src.tree.utils import get_param_names

__all__ = ["TreeMetadata", "stored_names", "tree_checkpointer"]


def tree_checkpointer() -> Any:
    """Return a checkpointer of plain trees that reads and writes the types of tuples, too."""
    options = PyTreeMetadataOptions(support_rich_types=True)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options))


def stored_names(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield the name that Orbax stores each value of a tree under, and the value's place.

    Two values with one name are stored as one.

    Raises:
        ValueError: JAX has no order for the keys of a dict.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(get_param_names(tree))
    for path, name in pairs:
        # TensorStore takes a name as a folder, with a slash at its end or without.
        yield name.removesuffix("/"), jax.tree_util.keystr(path)
