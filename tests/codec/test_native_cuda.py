"""The CUDA encoder's module where there may be no GPU: it loads, says what is missing, and nothing
else depends on it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import GPUS

cuda = pytest.importorskip("deltacheck._native_cuda", reason="this build has no CUDA encoder")


def test_it_loads_without_a_driver_and_says_what_is_missing() -> None:
    assert (cuda.problem() is None) == bool(GPUS)


def test_it_loads_without_any_framework() -> None:
    code = (
        "import sys, deltacheck._native_cuda; print([name for name in ('torch', 'jax') if name in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_its_handlers_are_for_cuda() -> None:
    found = {name: platform for name, _, platform in cuda.registrations()}
    assert set(found.values()) <= {"CUDA"}
    if found:
        assert set(found) == {"deltacheck_encode_cuda"}


@pytest.mark.skipif(bool(GPUS), reason="there is a GPU")
def test_a_call_without_a_device_is_an_error_that_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA: "):
        cuda.digest(table=0, chunks=1, digests=0, stream=0)
