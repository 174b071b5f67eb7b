"""Publish the weights of a run as a folder of versions that inference engines pull."""
