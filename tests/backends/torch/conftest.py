"""Fixtures of the tests of the torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.accelerators import Device


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return the device of all tensors of a test."""
    from deltacheck.backends.torch.capture import tensor_codec
    from tests.support.accelerators import Emulated, Real

    found = Real() if request.param == "cuda" else Emulated()
    monkeypatch.setattr(
        tensor_codec,
        "accelerator_of",
        lambda tensor: found if found.holds(tensor) else None,
    )
    return found
