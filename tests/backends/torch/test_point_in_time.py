"""Test changes to a tensor between ``save()`` and its capture.

The checkpoint has the tensor as it was at ``save()``, or the save fails.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.save.progress import Progress
from tests.support.waiting import open_when_called


def write(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1)


def rebind(p: torch.nn.Parameter) -> None:
    p.data = torch.zeros_like(p)  # as sharding wrappers do


def rebind_smaller(p: torch.nn.Parameter) -> None:
    p.data = torch.zeros(5)


def set_(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.set_(torch.zeros_like(p))


def swap(p: torch.nn.Parameter) -> None:
    torch.utils.swap_tensors(p, torch.nn.Parameter(torch.zeros_like(p)))


def shrink(p: torch.nn.Parameter) -> None:
    p.data.resize_(10)


def grow(p: torch.nn.Parameter) -> None:
    p.data.resize_(2 * p.numel()).zero_()


def write_data(p: torch.nn.Parameter) -> None:
    p.data.zero_()  # as averages that are swapped in do


def write_numpy(p: torch.nn.Parameter) -> None:
    p.detach().numpy()[:] = 0


def write_storage(p: torch.nn.Parameter) -> None:
    p.untyped_storage().fill_(0)


def write_dlpack(p: torch.nn.Parameter) -> None:
    np.from_dlpack(p.detach())[:1000] = 0  # one twentieth of it


def write_from_a_thread(p: torch.nn.Parameter) -> None:
    thread = threading.Thread(target=write_numpy, args=(p,))
    thread.start()
    thread.join()


def free(p: torch.nn.Parameter) -> None:
    p.untyped_storage().resize_(0)


def free_and_allocate(p: torch.nn.Parameter) -> None:
    size = p.untyped_storage().nbytes()
    free(p)
    p.untyped_storage().resize_(size)


def forget(p: torch.nn.Parameter) -> None:
    gc.collect()  # the caller has let go of the optimizer and the state by then


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (write, True),
        (rebind, False),
        (rebind_smaller, False),
        (set_, True),
        (swap, False),
        (shrink, False),
        (grow, False),
        (write_data, False),
        (write_numpy, True),
        (write_storage, True),
        (write_dlpack, True),
        (write_from_a_thread, True),
        (free, False),
        (free_and_allocate, False),
        (forget, False),
    ],
)
@pytest.mark.parametrize("capture", ["auto", "eager"])
def test_what_happens_to_a_tensor_after_save_does_not_reach_the_checkpoint(
    tmp_path: Path,
    slow_encoder: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Any], None],
    told: bool,
    capture: str,
) -> None:
    """``told``: what the capture behind the training loop cannot undo it must tell; an eager one
    has read everything by then.
    """
    wanted = torch.arange(20_000.0)
    parameter = torch.nn.Parameter(wanted.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Engine(tmp_path, options=SaveOptions(capture=capture)) as engine:
        engine.guard(optimizer)
        handle = engine.save(0, {"p": parameter})
        assert capture == "eager" or handle.state == "started"
        if happens in (shrink, grow, write_data):
            # These wait for the capture, which begins during the wait.
            open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        if happens in (free, free_and_allocate, grow):
            with pytest.raises(
                RuntimeError, match="not resizable"
            ):  # torch refuses, since the save has a view of the memory
                happens(parameter)
        else:
            happens(parameter)
        waits = capture == "auto" and happens in (shrink, grow, write_data)
        assert slow_encoder.is_set() == waits
        del parameter, optimizer
        slow_encoder.set()
        error = handle.exception(240)
        if told and capture == "auto":
            assert isinstance(error, errors.SnapshotTorn)
            assert "leaf 'p'" in str(error)
            assert engine.steps() == []
        else:
            assert error is None
            assert torch.equal(engine.restore(0)["p"], wanted)


def test_an_optimizer_step_cannot_reach_a_save_under_way(
    tmp_path: Path, slow_encoder: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step itself, in place; its hook holds it back until the state is read."""
    parameter = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Engine(tmp_path) as engine:
        engine.guard(optimizer)
        wanted = parameter.detach().clone()
        engine.save(0, {"p": parameter, "optimizer": optimizer.state_dict()})
        open_when_called(monkeypatch, Progress, "wait_until", slow_encoder)
        optimizer.step()
        assert slow_encoder.is_set()
        found = engine.restore(0)
        assert torch.equal(found["p"], wanted)
        assert found["optimizer"]["state"][0]["step"] == 1
        assert not torch.equal(parameter, wanted)
