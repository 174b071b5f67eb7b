"""Names on disk.

Every name is made here, and every name that comes from disk is checked here before it is used as a
path.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

import xxhash

from deltacheck.errors import Damaged

FORMAT = "deltacheck"
VERSION = 1
ATTRIBUTE = "deltacheck"  # the one key under which our groups keep their attributes

CHECKPOINTS = "checkpoints"
SEGMENTS = "segments"
CONTROL = "control"
TAGS = "tags"  # below control/
# In a manager root: keeps Orbax's clean-up of unfinished steps away from our directory.
COMMIT_MARK = "commit_success.txt"
LEAVES, PACKED, DELTA = "leaves", "packed", "delta"
# Orbax gives an unfinished directory this ending; older releases append a number.
UNFINISHED_STEP = ".orbax-checkpoint-tmp"
# The name under which Orbax records the writer of an item. It is permanent.
ITEM_HANDLER = "deltacheck.DeltaCheckpointHandler"

# With ``\Z`` and not ``$``, which would accept a line feed at the end of a name.
_SEGMENT_ID = re.compile(r"s[0-9]{10}-[0-9a-f]{8}\Z")
_CHECKPOINT_ID = re.compile(r"c[0-9]{10}\Z")
# A prefix such as ``checkpoint_`` may precede the digits, as Orbax's name formats allow.
_STEP = re.compile(r"(.*[^0-9])?([0-9]+)\Z", re.DOTALL)
# The lookahead refuses numbers: in the place of a step, a number is a training step.
_TAG = re.compile(r"(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_UNSAFE_NAME = re.compile(r"[^A-Za-z0-9_.%~-]")
_MAX_NAME = 160  # characters; file systems allow 255 bytes


def segment_id(seq: int) -> str:
    """Return the name of a new segment: its sequence number and a nonce.

    The nonce keeps two writers from ever sharing a name.
    """
    return f"s{seq:010d}-{secrets.token_hex(4)}"


def checkpoint_id(seq: int) -> str:
    """Return the name of the checkpoint with a sequence number."""
    return f"c{seq:010d}"


def is_segment_id(name: str) -> bool:
    """Return whether ``segment_id`` may have made the name."""
    return _SEGMENT_ID.match(name) is not None


def is_checkpoint_id(name: str) -> bool:
    """Return whether ``checkpoint_id`` may have made the name."""
    return _CHECKPOINT_ID.match(name) is not None


def step_name(name: str) -> tuple[str, int] | None:
    """Return the prefix and the step number in the name of a manager's step directory.

    ``None``: it is no such name, or that of an unfinished step.
    """
    match = _STEP.match(name)
    if match is None or UNFINISHED_STEP in name:
        return None
    return match[1] or "", int(match[2])


def is_array_name(name: str) -> bool:
    """Return whether ``array_names`` may have made the name: one harmless path component."""
    return _UNSAFE_NAME.search(name) is None and _is_usable(name)


LATEST = "latest"  # names the newest step, so no tag may have this name


def is_tag(name: str) -> bool:
    """Return whether a name can be a tag.

    A tag has letters, digits and ``_.-``, at most 100, the first a letter or digit. It is no
    number, and not ``latest``.
    """
    return _TAG.match(name) is not None and name != LATEST


def seq_of(name: str) -> int:
    """Return the sequence number in a segment's or checkpoint's name; else ``Damaged``."""
    if not (is_segment_id(name) or is_checkpoint_id(name)):
        raise Damaged(f"{name!r} is not the name of a segment or checkpoint")
    return int(name[1:11])


def array_names(paths: list[str]) -> dict[str, str]:
    """Return one flat array name per leaf path: ``/`` becomes ``.``, other characters ``%XX``.

    Names that would collide (also on a file system that ignores case), that zarr reserves or that
    are too long get a hash of the path. The leaf table, not the name, tells the leaf of an array.
    """
    plain = {path: _plain_name(path) for path in paths}
    uses: dict[str, int] = {}
    for name in plain.values():
        uses[name.lower()] = uses.get(name.lower(), 0) + 1
    return {
        path: name if uses[name.lower()] == 1 and _is_usable(name) else _hashed(path, name)
        for path, name in plain.items()
    }


def group_json(attributes: Mapping[str, Any]) -> bytes:
    """Return the ``zarr.json`` of a group."""
    return json.dumps(
        {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)},
        separators=(",", ":"),
    ).encode()


def _plain_name(path: str) -> str:
    name = path.replace("/", ".")
    return _UNSAFE.sub(
        lambda m: "".join(f"%{b:02X}" for b in m.group().encode("utf-8", "surrogatepass")), name
    )


def _is_usable(name: str) -> bool:
    return (
        # zarr reserves names that begin with two underscores, dots alone are directories, and Azure
        # may drop a dot at the end.
        0 < len(name) <= _MAX_NAME
        and not name.endswith(".")
        and not name.startswith(("__", "."))
        and name != "zarr.json"
    )


def _hashed(path: str, name: str) -> str:
    digest = xxhash.xxh3_64_hexdigest(path.encode("utf-8", "surrogatepass"))
    return f"leaf.{name[:100].strip('._')}~{digest}"
