"""Store segments, manifests and tags on disk: their writing, commit, reading and collection.

Arrays are zarr through TensorStore. Public names are exported by ``deltacheck``.
"""
