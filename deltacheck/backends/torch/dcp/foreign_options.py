"""Refuse the options of DCP's file storage that ours does not have, by name and with a remedy."""

from __future__ import annotations

from collections.abc import Mapping

_CODE = "a function that changes the stored bytes would end their verification"
_REMEDIES = {
    "single_file_per_rank": "the number of files does not depend on the number of tensors",
    "sync_files": "for sync_files=False, use options=SaveOptions(durability='process')",
    "thread_count": "it uses as many threads as help",
    "per_thread_copy_ahead": "use options=SaveOptions(host_cache_bytes=...)",
    "cache_staged_state_dict": (
        "use async_save(async_stager=BlockingAsyncStager(cache_staged_state_dict=True))"
    ),
    "serialization_format": (
        "a root has one format, and 'deltacheck export --to safetensors' writes another"
    ),
    "_extensions": _CODE,
    "_extension_registry": _CODE,
}


def refuse(owner: str, options: Mapping[str, object]) -> None:
    """Raise ``TypeError`` for the first option, if there is one.

    Args:
        owner: The class that got the options.
        options: The options that it does not have.
    """
    for name in options:
        remedy = f": {_REMEDIES[name]}" if name in _REMEDIES else ""
        raise TypeError(f"{owner} has no option {name}{remedy}")
