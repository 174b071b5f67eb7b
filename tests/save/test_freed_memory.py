"""Memory that returns to the system after saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltacheck.backends.torch import Engine
from deltacheck.codec import host_memory


def test_memory_returns_to_the_system_after_saves_of_large_whole_leaves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    original = host_memory.return_freed

    def counted() -> None:
        calls.append(None)
        original()

    monkeypatch.setattr(host_memory, "return_freed", counted)
    state = {"w": torch.zeros(host_memory.LEAST_FREED_BYTES // 4)}
    with Engine(tmp_path) as engine:
        for step in range(3):
            state["w"][step] = 1
            if step == 2:
                state["small"] = torch.ones(1000)
            engine.save(step, state).result()
    # After the first save, of the large leaf. `close` has waited for the threads.
    assert len(calls) == 1
