"""Commands that copy steps: ``export``, ``import``, ``branch``, ``mirror``, ``publish``."""
