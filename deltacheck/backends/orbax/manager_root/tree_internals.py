"""Orbax's metadata of trees, which has no public names (0.11.30 to 0.12.8)."""

from typing import Any

from orbax import checkpoint as ocp
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint._src.metadata.tree import _TreeMetadataImpl as TreeMetadata

__all__ = ["TreeMetadata", "tree_checkpointer"]


def tree_checkpointer() -> Any:
    """Return a checkpointer of plain trees that reads and writes the types of tuples, too."""
    options = PyTreeMetadataOptions(support_rich_types=True)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(pytree_metadata_options=options))
