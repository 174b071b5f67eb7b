"""A restore lets go of its segments when it returns, without Python's garbage collector.

An open segment is pinned, and a pinned segment is not removed: a memory tier would stay full.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch

import deltacheck
from deltacheck import MemoryTier, Policy, SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.store.segment import Segment

State = dict[str, Any]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state_at(step: int) -> State:
    master = torch.rand(600, 512, generator=torch.Generator().manual_seed(1)) + 0.1 * step
    return {
        "model": {"w": master.bfloat16()},
        "optimizer": {"state": {0: {"master": master, "exp_avg": torch.ones(600, 512)}}},
        "step": step,
    }


@pytest.fixture
def open_segments(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Segment]:
    """The segments that the test has opened and not let go of."""
    segments: WeakSet[Segment] = WeakSet()
    opened = Segment.__init__

    def noted(self: Segment, *args: Any, **options: Any) -> None:
        opened(self, *args, **options)
        segments.add(self)

    monkeypatch.setattr(Segment, "__init__", noted)
    return segments


def new_state(engine: Engine) -> None:
    engine.restore()


def into_a_target(engine: Engine) -> None:
    engine.restore(into=state_at(0))


def an_earlier_step(engine: Engine) -> None:
    engine.restore(0)


def one_leaf(engine: Engine) -> None:
    deltacheck.open(engine.root).restore(leaves=["model/w"])


def verify(engine: Engine) -> None:
    assert deltacheck.open(engine.root).verify(deep=True) == []


def fallback_from_damage(engine: Engine) -> None:
    root = Path(str(engine.root))
    newest = max((root / "segments").glob("s*"))
    for file in newest.rglob("c.0"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    engine.restore(fallback=True)
    assert engine.restored_step == 1


@pytest.mark.parametrize(
    "restore",
    [new_state, into_a_target, an_earlier_step, one_leaf, verify, fallback_from_damage],
)
@pytest.mark.parametrize("derive", [False, True])
def test_no_segment_is_open_after_a_restore(
    tmp_path: Path,
    derive: bool,
    restore: Callable[[Engine], None],
    open_segments: WeakSet[Segment],
) -> None:
    with Engine(tmp_path / "run", policy=Policy.exact(derive=derive)) as engine:
        for step in range(3):
            engine.save(step, state_at(step)).wait(timeout=240)
        assert bool(deltacheck.open(engine.root).manifest().derived) == derive
        restore(engine)
        assert not open_segments


def test_a_memory_tier_that_is_nearly_full_saves_after_a_restore(tmp_path: Path) -> None:
    def state(step: int) -> State:
        return {"w": torch.rand(500_000, generator=torch.Generator().manual_seed(step))}

    # Room for one whole state of 2 MB, and not for two.
    memory = MemoryTier(tmp_path / "memory", memory_bytes=4_500_000)
    with Engine(
        tmp_path / "disk",
        memory=memory,
        options=SaveOptions(grace_seconds=0),
    ) as engine:
        engine.save(0, state(0)).wait(timeout=240)
        engine.restore(into=state(9))
        engine.save(1, state(1)).wait(timeout=240)
        engine.persist(240)
    assert deltacheck.open(tmp_path / "disk").steps() == [0, 1]
