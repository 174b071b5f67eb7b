"""The profile of a run: a versioned JSON document, ``profile.json``, validated when it is read.

Field names are keys of that document. ``docs/how-to/policies.md`` shows how to make and use one.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deltacheck.errors import Damaged, UnsupportedFormat
from deltacheck.leaf.external_errors import typed
from deltacheck.leaf.structs import inspect_types
from deltacheck.policy.events import Event
from deltacheck.store.files.object_path import ObjectPath
from deltacheck.store.files.storage import size_of

FORMAT, VERSION = "deltacheck.profile", 1
MAX_DOCUMENT_BYTES = 256 << 20

# Permanent names of the roles that a leaf has for the optimizer.
ROLES = ("weight", "master", "first_moment", "second_moment", "count", "other")
# Permanent names of its behaviour over time.
KINDS = ("frozen", "sparse", "stable-changing", "active", "derived")


class Curve(msgspec.Struct, frozen=True):
    """A quantity over training steps.

    Args:
        steps: The steps, ascending.
        values: A value for each step.
    """

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


class AdamRule(msgspec.Struct, frozen=True):
    """The constants of an Adam or AdamW optimizer (Kingma & Ba, 2015).

    The moments of other optimizers are never reused.

    Args:
        beta1: The decay rate of the first moment, 0 to 1.
        beta2: The decay rate of the second moment, 0 to 1. Larger: a longer memory, so that the
            second moment may be reused for longer; smaller: the opposite.
        eps: The constant that is added to the root of the second moment (default: 1e-8).
    """

    beta1: float
    beta2: float
    eps: float = 1e-8


class LeafProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The behaviour of one leaf over time.

    Args:
        path: The leaf path.
        shape: The shape of the leaf.
        dtype: The name of its type.
        role: One of ``ROLES``.
        kind: One of ``KINDS``.
        density: The share of sampled elements that changed since the previous observation.
        drift: The size of the change, in ``drift_unit``.
        drift_unit: ``lr`` (root mean square change over the learning rate, for weights and
            masters), ``octaves`` (median ``|log2|`` of the ratio, for second moments) or
            ``relative`` (relative L2 change).
        derived_from: The leaf that this one is computed from; empty for other kinds.
        how: The rule of that computation, ``cast`` or ``same``.
        stable_from: The stable start if the drift of this second moment alone decided, ``None`` if
            there is none.
        confidence: The confidence in it, 0 to 1.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    kind: str
    density: Curve
    drift: Curve
    drift_unit: str
    derived_from: str = ""
    how: str = ""
    stable_from: int | None = None
    confidence: float = 0.0


class ClassSensitivity(msgspec.Struct, frozen=True):
    """The effect of restoring one class of leaves as ``Policy.auto`` does.

    Args:
        name: ``masters``, ``moments`` or ``moments of embeddings``.
        leaves: The paths of the leaves.
        step: The step from which the trials have trained on.
        trial_steps: The number of steps of each trial.
        accepted: False if there is a reason against it. ``Policy.auto`` then keeps these
            leaves exact.
        lost_steps: The missing progress, in steps of the exact run.
        loss_change: The loss minus that of the exact run.
        noise_sd: The standard deviation of the loss over orders of the data.
        element_change: The largest difference of one final weight, in learning rates.
        law_violations: The number of elements with m^2 > C v.
        reasons: The reasons against it.
    """

    name: str
    leaves: tuple[str, ...]
    step: int
    trial_steps: int
    accepted: bool
    lost_steps: float
    loss_change: float
    noise_sd: float
    element_change: float
    law_violations: int
    reasons: tuple[str, ...]


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of observing a run, as ``Profiler.profile`` returns it.

    Args:
        format: ``"deltacheck.profile"``.
        version: The version of the format.
        source: A name for the run.
        interval_steps: The number of steps between two observations.
        leaves: The profile of each leaf, by path.
        stable_start: The first of the observed steps at which ``Policy.auto`` may reuse moments if
            it saves at each of them, ``None`` if there is none. A later run that follows the
            profile needs not see their drift settle from this step on.
        confidence: The share of the intervals since then whose drift is within the tolerance, less
            if there were few.
        optimizer: The constants of the optimizer, ``None`` if it is not known to be Adam or AdamW.
        learning_rate: The learning rate, as the run reported it.
        loss: The loss, as the run reported it.
        gradient_norm: The gradient norm before clipping, as the run reported it.
        events: The events of the run.
        sensitivity: The effect of inexact classes of leaves, if it was asked for.
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
    sensitivity: tuple[ClassSensitivity, ...] = ()

    @typed
    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, replacing ``path`` atomically.

        Args:
            path: The file to write.

        Raises:
            StorageFailed: If the file cannot be written.
        """
        target = Path(path)
        # The same folder, because a rename across file systems is not atomic.
        temporary = target.with_name(target.name + ".tmp")
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    @typed
    def read(cls, path: str | os.PathLike[str] | ObjectPath) -> Profile:
        """Read a profile.

        Args:
            path: The file to read.

        Returns:
            The profile.

        Raises:
            StorageFailed: If the file cannot be read.
            Damaged: If the file is too large or is no valid profile; the message names the file
                and the field.
            UnsupportedFormat: If the file has another version of the format.
        """
        file = path if isinstance(path, ObjectPath) else Path(path)
        # The limit keeps a damaged or hostile file from exhausting the memory.
        if size_of(file) > MAX_DOCUMENT_BYTES:
            raise Damaged(
                f"{path} is larger than the {MAX_DOCUMENT_BYTES} bytes that a profile may have"
            )
        content = file.read_bytes()
        try:
            header = msgspec.json.decode(content, type=_Header)
            if header.format != FORMAT:
                raise Damaged(
                    f"{path} is not a profile of a run: its format is {header.format!r}, not"
                    f" {FORMAT!r}"
                )
            if header.version != VERSION:
                raise UnsupportedFormat(
                    f"{path} has profile version {header.version}; this deltacheck reads {VERSION}"
                )
            return msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise Damaged(f"{path} is damaged: {error}") from error


class _Header(msgspec.Struct):
    """The fields that are read first, because they determine how to read the others."""

    format: str
    version: int


inspect_types(Profile, _Header)
