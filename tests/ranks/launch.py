"""Start a function in several processes, as the ranks of a run, and gather what each gives.

Ranks are forked from one server that has imported the frameworks, in milliseconds instead of the
seconds of an import for each rank. The server has one thread and no started backend: neither
TensorStore nor a JAX backend survives a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

_IMPORTED = (
    "torch._dynamo",  # imported by the first DTensor
    "torch.distributed.fsdp",
    "deltacheck.backends.torch",
    "deltacheck.backends.orbax",
    "deltacheck.codec.native",
)


def launch(
    target: Callable[..., Any],
    size: int,
    *args: Any,
    seconds: float = 250.0,
    lost: set[int] = frozenset(),
) -> list[Any]:  # type: ignore[assignment]
    """``target(rank, size, port, *args)`` in ``size`` new processes: what each returned, ``None``
    for the ``lost``, which kill themselves.

    A rank that has returned stays until all others have: rank 0 serves the store of the group, and
    JAX ends each process whose store is gone.

    Fails with the traceback of the first rank that raised, or where one takes longer than
    ``seconds``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    results: Any = context.Queue()
    all_returned = context.Event()
    variables = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
    }
    processes = [
        context.Process(
            target=_run,
            args=(results, all_returned, variables, target, rank, size, port, args),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        if len(lost) == size:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            assert results.empty(), results.get()[2]
            alive = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            assert not alive, f"ranks {alive} of {size} did not end within {seconds:g} s"
        while len(found) < size - len(lost):
            try:
                rank, value, failure = results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"only ranks {sorted(found)} of {size} came back within {seconds:g} s"
                ) from None
            assert not failure, f"rank {rank}:\n{failure}"
            found[rank] = value
        return [found.get(rank) for rank in range(size)]
    finally:
        all_returned.set()
        for process in processes:
            process.join(5)
            process.kill()


def _run(
    results: Any,
    all_returned: Any,
    variables: dict[str, str],
    target: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    # Those of the test, not those that the server was started with.
    os.environ.clear()
    os.environ.update(variables, RANK=str(rank))
    try:
        results.put((rank, target(rank, size, port, *args), ""))
    except BaseException:  # noqa: BLE001 - the test tells it
        results.put((rank, None, traceback.format_exc()))
    all_returned.wait()
