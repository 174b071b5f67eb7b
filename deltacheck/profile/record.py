"""The profile of a run: a versioned JSON document, ``profile.json``, checked whole when it is
read.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deltacheck.errors import Damaged, UnsupportedFormat
from deltacheck.leaf.contracts import Bounded, Exact, Reused
from deltacheck.leaf.structs import known
from deltacheck.policy.events import Event

FORMAT, VERSION = "deltacheck.profile", 1
MAX_DOCUMENT_BYTES = 256 << 20

# Permanent names. What a leaf is to the optimizer:
ROLES = ("weight", "master", "first_moment", "second_moment", "count", "other")
# What it does over time:
KINDS = ("frozen", "sparse", "stable-changing", "active", "derived")


class Curve(msgspec.Struct, frozen=True):
    """A quantity over training steps; ``steps`` ascending, as long as ``values``."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


class AdamRule(msgspec.Struct, frozen=True):
    """The constants of an Adam or AdamW optimizer; moments of other optimizers are never reused."""

    beta1: float
    beta2: float
    eps: float = 1e-8


class LeafProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leaf over time.

    ``role``: one of ``ROLES``; ``kind``: one of ``KINDS``. ``derived_from``: of a derived leaf, the
    leaf that it is computed from, by ``how`` (``cast`` or ``same``). ``density``: share of sampled
    elements that changed since the observation before. ``drift``: by how much, in ``drift_unit``:
    ``lr`` (root mean square change over the learning rate, weights and masters), ``octaves``
    (median ``|log2|`` ratio, second moments) or ``relative`` (relative L2). ``exact_bytes``: bytes
    an element that the best lossless code takes, by the order-0 entropy of the sample.
    ``stable_from``: first step from which it is stable-changing, ``None`` where it never was;
    ``confidence``: 0 to 1. ``refresh_steps``: how often it should be written at least, 0 for at
    every save.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    kind: str
    density: Curve
    drift: Curve
    drift_unit: str
    exact_bytes: float
    derived_from: str = ""
    how: str = ""
    stable_from: int | None = None
    confidence: float = 0.0
    recommended: Exact | Bounded | Reused = Exact()
    refresh_steps: int = 0


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was observed of a run. ``stable_start``: of the stable set as a whole, ``None`` where
    there
    is none.

    ``interval_steps``: between observations. ``learning_rate``, ``loss``, ``gradient_norm``: as the
    run reported them. ``optimizer``: ``None`` where it is not known to be Adam or AdamW.
    """

    format: str
    version: int
    source: str
    interval_steps: int
    leaves: dict[str, LeafProfile]
    stable_start: int | None = None
    confidence: float = 0.0
    optimizer: AdamRule | None = None
    learning_rate: Curve = Curve()
    loss: Curve = Curve()
    gradient_norm: Curve = Curve()
    events: tuple[Event, ...] = ()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, replacing ``path`` in one act. Raises ``OSError``."""
        target = Path(path)
        fresh = target.with_name(target.name + ".tmp")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        fresh.replace(target)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile. Raises ``OSError``, ``Damaged`` naming the file and the field,
        ``UnsupportedFormat`` for a later version.
        """
        if os.path.getsize(path) > MAX_DOCUMENT_BYTES:
            raise Damaged(
                f"{path} is larger than the {MAX_DOCUMENT_BYTES} bytes that a profile may have"
            )
        content = Path(path).read_bytes()
        try:
            about = msgspec.json.decode(content, type=_Header)
            if about.format != FORMAT:
                raise Damaged(
                    f"{path} is not a profile of a run: its format is {about.format!r}, not"
                    f" {FORMAT!r}"
                )
            if about.version != VERSION:
                raise UnsupportedFormat(
                    f"{path} has profile version {about.version}; this deltacheck reads {VERSION}"
                )
            return msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{path} is damaged: {error}") from error


class _Header(msgspec.Struct):
    format: str
    version: int


known(Profile, _Header)
