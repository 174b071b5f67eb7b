"""Read and write model folders in the layout of Hugging Face, without its packages."""
