"""Translate options of DataStates-LLM's checkpoint engine into ``SaveOptions``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from deltacheck.save.save_options import SaveOptions

log = logging.getLogger("deltacheck")

SECTION = "datastates_ckpt"
_GIB = 1 << 30
_NO_COUNTERPART = {
    "parser_threads": "the encoder takes the processors that are idle",
    "pin_host_cache": "copies from a device always go to pinned memory",
}


def datastates_options(config: Mapping[str, Any]) -> SaveOptions:
    """Return the options of saves that correspond to DataStates-LLM's.

    ``host_cache_size`` (GiB, above 0) becomes ``host_cache_bytes``. ``parser_threads`` and
    ``pin_host_cache`` have no counterpart, and the log says why.

    Args:
        config: A DeepSpeed configuration with the section ``datastates_ckpt``, or that section.

    Returns:
        The options, for ``Engine(root, options=...)``.

    Raises:
        ValueError: An option is unknown, or a value is not valid.
    """
    section = config.get(SECTION, config)
    if not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} must be a section with options, not {section!r}")
    options = SaveOptions()
    for name, value in section.items():
        if name == "host_cache_size":
            if (
                # bool is a subclass of int, and ``true`` would mean 1 GiB.
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < float("inf")
            ):
                raise ValueError(
                    f"{SECTION}.host_cache_size must be a number of GiB above 0, not {value!r}"
                )
            # A small fraction of a GiB is rounded to 0 bytes, which ``Engine`` refuses.
            options = SaveOptions(host_cache_bytes=max(1, int(value * _GIB)))
        elif name in _NO_COUNTERPART:
            log.info("%s.%s=%r has no counterpart: %s", SECTION, name, value, _NO_COUNTERPART[name])
        else:
            supported = ", ".join(["host_cache_size", *_NO_COUNTERPART])
            raise ValueError(
                f"{SECTION} has the option {name!r}, which is not one of {supported}; leave it out"
            )
    return options
