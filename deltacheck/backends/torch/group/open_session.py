"""The session of an engine and all that may outlive it: saves under way, hooks, and the end.

torch's global hooks refer to this object and not to the engine, so that an engine which nobody
refers to is collected. Its saves are then finished as if it had been closed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from deltacheck.backends.torch.capture.capture import Capture
from deltacheck.backends.torch.capture.guard import Guard
from deltacheck.backends.torch.group.arrival import Arrival
from deltacheck.backends.torch.group.engine_session import Session
from deltacheck.save import exits
from deltacheck.save.save_options import Settings
from deltacheck.store.lock.deadline import Deadline


class OpenSession:
    """The session of one engine, from the time that it is opened until its threads have ended.

    Args:
        settings: The settings of all saves.
        open_session: Opens the session. Its argument waits until no save reads the state any more,
            and is called in restores only.
    """

    def __init__(
        self,
        settings: Settings,
        open_session: Callable[[Callable[[], None]], Session],
    ) -> None:
        # Only an exact policy reads each leaf once and in order, so that leaves can be copied
        # ahead.
        self.capture = Capture(settings)
        self.session = open_session(self.settle_reads)
        self.saver = self.session.saver
        # The rest of an overlapped restore, also after it has failed.
        self.arrival: Arrival | None = None
        self._guard: Guard | None = None

    def watch(self) -> Guard:
        """Watch the steps of all optimizers from now on."""
        self._guard = Guard(self.before_update)
        return self._guard

    def before_update(self) -> None:
        """Wait until the saves under way have read the state, and an overlapped restore is done."""
        # Its hooks stay, because this may be called by a hook.
        if (arrival := self.arrival) is not None:
            arrival.wait()
        self.settle_reads()

    def await_arrival(self, timeout: float | None = None) -> None:
        """Wait for an overlapped restore. Each call raises its failure, until the next restore."""
        if (arrival := self.arrival) is not None:
            arrival.wait(timeout)
            arrival.release()
            self.arrival = None

    def settle_reads(self) -> None:
        """Wait until no save under way reads the state any more."""
        if self.saver.settle_reads():
            # The training's stream waits for the reads, which does not block the host.
            self.capture.hold()
        if self._guard is not None:
            self._guard.announced()

    # --- the end ----------------------------------------------------------------------------------

    def end(self, timeout: float | None) -> None:
        """Finish the saves under way and give the root back, as ``Engine.close``."""
        deadline = Deadline.after(timeout)
        arrival = self.arrival if self.saver.is_ours() else None
        if arrival is not None:
            arrival.join(timeout)
            self.arrival = None
        # Before the saves, of which one may fail: torch's global hook would stay.
        if self._guard is not None:
            self._guard.close()
        try:
            # A forked child has neither the threads nor the lease of its parent.
            if self.saver.is_ours():
                self.session.close(deadline.left)
        except Exception:
            exits.forget(self)
            raise
        # Not after Ctrl-C, or after ``sys.exit`` in a handler: the exit then finishes the saves.
        exits.forget(self)
        if arrival is not None:
            arrival.finish()

    def end_unattended(self) -> None:
        """Do the same behind the program, because nobody refers to the engine any more.

        A garbage collection calls this on any thread.
        """
        self.session.abandon()
        self.saver.end_unattended(partial(exits.close_unattended, self))

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the saves when a signal ends the process; see ``exits``."""
        deadline = Deadline.after(timeout)
        self.await_arrival(timeout)
        self.session.finish(deadline.left)
        self.saver.pipeline.failures.raise_lost()

    def close(self, timeout: float | None = None) -> None:
        """End when the process ends. Steps that are only in memory are copied too."""
        self.end(timeout)
        self.saver.pipeline.failures.raise_lost()
