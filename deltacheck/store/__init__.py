"""Segments, manifests, commit and collection on disk: zarr through TensorStore. What is public is
re-exported by `deltacheck`.
"""
