"""The class of Orbax's metadata of trees, which has no public name (0.11.30 to 0.12.8)."""

from orbax.checkpoint._src.metadata.tree import _TreeMetadataImpl as TreeMetadata

__all__ = ["TreeMetadata"]
