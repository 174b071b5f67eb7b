"""Processes that end in every way with a save under way. Imports the frameworks once; each case is
a
fork of this one.

Called with a JSON file of cases (see ``Case``); prints one JSON line a case when it has ended: its
exit status as ``waitpid`` has it (negative: a signal), seconds, and whether it had to be killed.
What a case prints goes to ``<folder>/out``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import deltacheck
from deltacheck import SaveOptions, errors
from deltacheck.backends.torch import Engine
from deltacheck.save import pipeline
from deltacheck.save.job import save_job
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import StreamWriter
from deltacheck.store.files.durability import Durability
from tests.support.waiting import set_deadline

ORBAX = "--orbax" in sys.argv
if ORBAX:
    import jax.numpy as jnp

    from deltacheck.backends.orbax import DeltaSaveArgs, manager

AT_ONCE = 4
Case = dict[str, Any]  # folder, kind, ending, fault, limit


def fork_all(cases: list[Case]) -> Case | None:
    """The case to carry out, in each child; ``None`` in the parent, when all have ended."""
    running: dict[int, tuple[Case, float]] = {}
    while cases or running:
        while cases and len(running) < AT_ONCE:
            case = cases.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if not child:
                out = os.open(Path(case["folder"]) / "out", os.O_WRONLY | os.O_CREAT, 0o600)
                for stream in (1, 2):
                    os.dup2(out, stream)
                return case
            running[child] = case, time.monotonic()
        time.sleep(0.005)
        for child, (case, began) in list(running.items()):
            seconds = time.monotonic() - began
            hung = seconds > case["limit"]
            if hung:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if hung else os.WNOHANG)
            if ended:
                del running[child]
                about = {
                    "status": os.waitstatus_to_exitcode(status),
                    "seconds": seconds,
                    "hung": hung,
                }
                print(json.dumps({"folder": case["folder"], **about}), flush=True)
    return None


# --- faults ---------------------------------------------------------------------------------------


class Hanging:
    """A write that never ends."""

    def result(self, timeout: float | None = None) -> None:
        threading.Event().wait(timeout)
        raise TimeoutError

    def done(self) -> bool:
        return False


def slow(*args: Any) -> Any:
    time.sleep(0.15)
    return ORIGINAL_SYNC(*args)


def full(*args: Any) -> Any:
    time.sleep(0.15)
    raise ValueError("RESOURCE_EXHAUSTED: No space left on device")


def stuck(*args: Any) -> Any:
    os.read(os.pipe()[0], 1)  # a system call that never returns


def held(*args: Any) -> Any:
    RELEASED.wait()
    return ORIGINAL_SYNC(*args)


ORIGINAL_SYNC = Durability.sync_tree
RELEASED = threading.Event()


def break_storage(case: Case, options: SaveOptions) -> None:
    if case["fault"] in ("hang", "stuck") and case["ending"] != "none":
        # The deadline of this save is what ends it, not that of the exit.
        set_deadline(options, 1.5)
    match case["fault"]:
        case "ok":
            Durability.sync_tree = slow  # type: ignore[method-assign]
        case "full":
            arrays.create_file = full  # of the table or the manifest
        case "hang":
            arrays.write = StreamWriter.write = lambda *_: Hanging()
        case "stuck":
            Durability.sync_tree = stuck  # type: ignore[method-assign]
        case "held":
            Durability.sync_tree = held  # type: ignore[method-assign]


# --- ways to end ----------------------------------------------------------------------------------


def save(case: Case) -> Any:
    """Commit step 0, break the storage, and begin to save step 1."""
    hangs = case["fault"] in ("hang", "stuck")
    options = SaveOptions(exit_timeout_seconds=0.4 if hangs else 60.0)
    root = Path(case["folder"]) / "root"
    if ORBAX:
        mngr = manager(root, save_options=options)
        mngr.save(0, args=DeltaSaveArgs({"x": jnp.zeros(5)}))
        mngr.wait_until_finished()
        break_storage(case, options)
        mngr.save(1, args=DeltaSaveArgs({"x": jnp.ones(5)}))
        return mngr
    engine = Engine(root, options=options)
    engine.save(0, {"x": torch.zeros(200, 200)}).wait()
    break_storage(case, options)
    if case["kind"] in INSIDE:
        original = pipeline.Pipeline.start

        def start(self: Any, *arguments: Any) -> None:
            os.kill(os.getpid(), INSIDE[case["kind"]])
            original(self, *arguments)

        pipeline.Pipeline.start = start  # type: ignore[method-assign]
    if case["kind"] == "forked child":
        late = save_job.SaveJob.capture

        def capture_late(self: Any, sources: Any) -> None:
            time.sleep(
                0.0 if threading.current_thread() is threading.main_thread() else 0.5
            )  # until after the fork
            late(self, sources)

        save_job.SaveJob.capture = capture_late  # type: ignore[method-assign]
    engine.save(1, {"x": torch.ones(200, 200)})
    return engine


def interrupt_a_join() -> None:
    """Send Ctrl-C once the main thread waits for the end of a thread."""
    names: list[str] = []
    while "join" not in names:
        frame, names = sys._current_frames()[threading.main_thread().ident or 0], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
    os.kill(os.getpid(), signal.SIGINT)


INSIDE = {"sigterm inside save": signal.SIGTERM, "sigint inside save": signal.SIGINT}


def train(case: Case) -> None:
    saves = save(case)
    if case["kind"] == "sigint in a wait":
        threading.Thread(target=interrupt_a_join, daemon=True).start()
        try:
            saves.wait_until_finished()
        finally:
            RELEASED.set()
            # Orbax takes it for failed if its own wait is interrupted.
            assert 1 in saves.all_steps()
    if case["ending"] == "wait":
        saves.wait_until_finished() if ORBAX else saves.wait()
    elif case["ending"] == "close":
        saves.close()
    with contextlib.suppress(NameError):
        globals()["kept"] = saves


def in_thread(case: Case, daemon: bool, after: Any) -> None:
    def body() -> None:
        train(case)
        after()

    thread = threading.Thread(target=body, daemon=daemon)
    thread.start()
    if daemon:
        while "kept" not in globals() and thread.is_alive():
            time.sleep(0.01)


def fail() -> None:
    raise ZeroDivisionError("the training has failed")


def end(case: Case) -> None:
    """Save, and end the process in the case's way (or return, to end by itself)."""
    kind = case["kind"]
    match kind:
        case "sigterm, finish" | "sigterm inside save" | "sigterm twice":
            # A process that waits for the end of the long grace period counts as hung.
            deltacheck.finish_on_signal(
                grace_seconds=0.4
                if case["fault"] in ("hang", "stuck") and kind != "sigterm twice"
                else 3600
            )
        case "sigterm, finish, handler":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
            deltacheck.finish_on_signal(
                grace_seconds=0.4 if case["fault"] in ("hang", "stuck") else 20
            )
        case "thread fails":
            return in_thread(case, False, fail)
        case "thread exits":
            return in_thread(case, False, sys.exit)
        case "daemon thread":
            return in_thread(case, True, time.sleep(0.0) or (lambda: time.sleep(100)))
        case "worker":
            worker = multiprocessing.get_context("fork").Process(target=train, args=(case,))
            worker.start()
            worker.join()
            sys.exit(worker.exitcode)
        case "no memory":
            return out_of_memory(case)
    train(case)
    match kind:
        case "exit 0":
            sys.exit(0)
        case "exit 3":
            sys.exit(3)
        case "exception":
            fail()
        case "sigterm" | "sigterm, finish" | "sigterm, finish, handler":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        case "sigterm twice":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        case "sigint":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        case "sigint twice":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "os._exit":
            os._exit(9)
        case "abort":
            os.abort()
        case "forked child":
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
                    "the child was disturbed by its parent's save"
                )
            else:
                globals()["kept"].before_update()  # must not wait for saves of the parent
                sys.exit(0)


def out_of_memory(case: Case) -> None:
    """A save for which memory does not suffice fails alone; the next one works."""
    torch.set_num_threads(1)
    engine = Engine(Path(case["folder"]) / "root")
    engine.save(0, {"x": torch.zeros(200, 200)}).wait()
    state = {"x": torch.ones(200, 200), "big": torch.zeros(60, 1 << 20)}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), resource.RLIM_INFINITY)
    )
    error = engine.save(1, state).exception(240)
    assert isinstance(error, errors.SaveFailed), error
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("deltacheck: told:", error)
    assert engine.steps() == [0]
    with contextlib.suppress(errors.SaveFailed):
        engine.wait()
    del state["big"]
    engine.save(1, state).wait(timeout=240)


torch.set_num_threads(1)
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # where we run in the background of a shell, it is ignored
gc.collect()
gc.freeze()  # else each child would copy, and collect, all that the frameworks are made of
todo = fork_all(json.loads(Path(sys.argv[1]).read_text()))
if todo is not None:
    end(todo)
