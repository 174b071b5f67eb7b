"""Read the objects of a state, which DCP pickles, without running their code."""

from __future__ import annotations

import io
import pickle

from deltacheck.backends.torch.files import numpy_pickle
from deltacheck.backends.torch.files.numpy_pickle import refusal
from deltacheck.errors import Damaged, DeltacheckError, UnsupportedLeaf


def read(content: bytes, fqn: str, step: int) -> object:
    """Return an object of a step.

    Args:
        content: The bytes of ``torch.save``.
        fqn: The name of the object.
        step: The step.

    Raises:
        UnsupportedLeaf: The object cannot be loaded without running code.
        Damaged: The bytes are not an object of ``torch.save``.
    """
    try:
        return numpy_pickle.load(io.BytesIO(content), map_location="cpu")
    except pickle.UnpicklingError as error:
        raise UnsupportedLeaf(
            f"{fqn!r} of step {step} is an object that only running its pickle would give back:"
            f" {refusal(error)}. If you trust whoever wrote this root, DeltaStorageReader(root,"
            " allow_pickle=True) does; torch.serialization.add_safe_globals lets single classes"
            " through"
        ) from None
    except DeltacheckError:
        raise
    # torch raises many types of errors for bytes that are damaged or made by an attacker.
    except Exception as error:
        raise Damaged(
            f"{fqn!r} is not what torch.save has written: {type(error).__name__}: {refusal(error)}",
            leaf=fqn,
        ) from error


def require_readable(content: bytes, fqn: str) -> None:
    """Check that a load will accept an object, before it is saved.

    Args:
        content: The bytes of ``torch.save``.
        fqn: The name of the object.

    Raises:
        UnsupportedLeaf: A load would refuse it.
    """
    try:
        # Without the memory of tensors.
        numpy_pickle.load(io.BytesIO(content), map_location="meta")
    # torch and the constructors of named classes raise many types of errors.
    except Exception as error:  # noqa: BLE001 - whatever it is, a load would raise it, too
        raise UnsupportedLeaf(
            f"{fqn!r} is an object that a load would refuse, because it runs no code:"
            f" {refusal(error)}. Save it as tensors, numbers, text, lists and dicts, or name its"
            " class with torch.serialization.add_safe_globals, in this process and in those that"
            " load"
        ) from None
