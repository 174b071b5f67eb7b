"""Read and write files: local directories, object stores, and zarr arrays in them."""
