"""The defaults of the memory of a save follow the size of the state."""

from __future__ import annotations

import pytest

from deltacheck.save.save_options import SaveOptions

MIB = 1 << 20


@pytest.mark.parametrize(
    ("state", "cache"),
    [(0, 32 * MIB), (46 * MIB, 32 * MIB), (400 * MIB, 100 * MIB), (1 << 40, 8192 * MIB)],
)
def test_the_default_cache_is_a_quarter_of_the_state_within_limits(state: int, cache: int) -> None:
    options = SaveOptions()
    assert options.cache_bytes(state) == cache
    # A training that waits copies as much as it did with half of the state.
    assert options.copied_bytes(state) == 2 * cache


def test_a_given_cache_limits_encoded_bytes_and_copies() -> None:
    options = SaveOptions(host_cache_bytes=5 * MIB)
    assert options.cache_bytes(1 << 40) == 5 * MIB
    assert options.copied_bytes(1 << 40) == 5 * MIB
