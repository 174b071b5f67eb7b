"""The part of a restore that arrives while the first forward and backward pass run.

The weights are restored before training begins. The large tensors of the optimizers follow on a
thread, and hooks of the optimizers wait for them. If they do not arrive, no hook lets a step pass.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deltacheck.errors import SaveFailed
from deltacheck.leaf.external_errors import typed
from deltacheck.store.lock.interrupts import Flag

# The last overlapped restore into each optimizer.
_newest: WeakKeyDictionary[torch.optim.Optimizer, Arrival] = WeakKeyDictionary()


class Arrival:
    """A thread that loads the state of optimizers, and the hooks that wait for it.

    Args:
        step: The step that is restored.
        optimizers: Those whose state is loaded.
        load: Loads the state. It writes to no tensor before all content is verified.
    """

    def __init__(
        self, step: int, optimizers: Iterable[torch.optim.Optimizer], load: Callable[[], None]
    ) -> None:
        self.step = step
        self._owner = os.getpid()
        self._end = Flag()
        self._error: BaseException | None = None
        self._is_seen = False
        optimizers = list(optimizers)
        for optimizer in optimizers:
            # The first stage has replaced what an earlier restore has left, perhaps of a closed
            # engine; from now on this restore guards the rest.
            if optimizer in _newest:
                _newest[optimizer].replaced(optimizer)
            _newest[optimizer] = self
        # By id: the optimizers whose state is not that of the step as long as the load has failed.
        self._incomplete = set(map(id, optimizers))
        # They stay until ``release``, because torch walks through a table of hooks while it calls
        # one, and nothing may be removed from it then.
        self._hooks: list[Any] = []
        try:
            for optimizer in optimizers:
                self._hooks += [
                    optimizer.register_step_pre_hook(self._before_step),
                    optimizer.register_state_dict_pre_hook(self._before_step),
                    # The background must not write to a state that is replaced meanwhile.
                    optimizer.register_load_state_dict_pre_hook(lambda *_: self.join()),
                    optimizer.register_load_state_dict_post_hook(self.replaced),
                    _BeforeCopy(optimizer, self._before_step),
                ]
            # As a daemon: an exit of the process needs the optimizer no more.
            threading.Thread(
                target=self._run, args=(load,), name="deltacheck-restore", daemon=True
            ).start()
        except BaseException:
            self.release()
            raise

    def _run(self, load: Callable[[], None]) -> None:
        try:
            load()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            # The frames refer to the memory of the restore.
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            self._end.set()

    def done(self) -> bool:
        """Return True if the state has arrived or failed to."""
        return self._end.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all state has arrived.

        Raises:
            TimeoutError: The time ran out.
            DeltacheckError: The state could not be loaded. It is raised again by each call, until
                another state is loaded into every optimizer.
        """
        self.join(timeout)
        if self._error is not None and self._incomplete:
            self._raise()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, whatever came of it.

        Raises:
            TimeoutError: The time ran out.
            SaveFailed: This process is a forked child, in which the thread does not live.
        """
        if self._end.is_set():
            return
        if os.getpid() != self._owner:
            raise SaveFailed(
                f"process {self._owner} was restoring the optimizer of step {self.step} when this"
                " process was forked from it, so the optimizer is incomplete here. Wait for the"
                " restore before the fork"
            )
        if not self._end.wait(timeout):
            raise TimeoutError(
                f"the optimizer of step {self.step} is not restored yet after {timeout} s"
            )

    def finish(self) -> None:
        """Remove the hooks; raise the failure if no call has raised it. The thread has ended.

        After a failure the hooks stay, so that no optimizer steps with what it has.
        """
        if self._error is None:
            self.release()
        elif self._incomplete and not self._is_seen:
            self._raise()

    def replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step in spite of a failure: another state was loaded into it."""
        self._incomplete.discard(id(optimizer))

    def release(self) -> None:
        """Remove the hooks. The caller has restored another state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _raise(self) -> None:
        assert self._error is not None
        self._is_seen = True
        # Each raise would add its frames to the same error.
        raise self._error.with_traceback(None)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.join()
        if self._error is not None and id(optimizer) in self._incomplete:
            self._raise()


class _BeforeCopy:
    """A hook that is called before an optimizer is copied or pickled, for which torch has none.

    Args:
        optimizer: The optimizer.
        hook: Called with it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, hook: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        inherited = type(optimizer).__getstate__

        def getstate() -> Any:
            present = self._optimizer()
            assert present is not None
            hook(present)
            return inherited(present)

        # ``copy`` and ``pickle`` look for it on the object, before the class.
        self._getstate = optimizer.__dict__["__getstate__"] = getstate

    def remove(self) -> None:
        """Let the optimizer be copied as torch does it."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("__getstate__") is self._getstate:
            del optimizer.__dict__["__getstate__"]


@typed
class RestoreHandle:
    """A restore whose optimizer state arrives behind the training loop.

    ``Engine.restore(overlap=True)`` returns it; a program has no reason to make one.

    Args:
        state: The state, without the optimizers' tensors so far.
        arrival: The rest.
    """

    def __init__(self, state: Any, arrival: Arrival) -> None:
        self.step = arrival.step
        self.state = state
        self._arrival = arrival

    def __repr__(self) -> str:
        return f"RestoreHandle(step={self.step}, done={self.done()})"

    def done(self) -> bool:
        """Return true if the restore is complete, or has failed.

        Returns:
            True if ``wait`` returns or raises at once.
        """
        return self._arrival.done()

    def wait(self, timeout: float | None = None) -> RestoreHandle:
        """Wait until the state of the optimizers is restored and verified.

        Args:
            timeout: Seconds. Default: no limit.

        Returns:
            This handle.

        Raises:
            Damaged: As ``Engine.restore`` raises it, and every other error of it that concerns
                content. The optimizers then refuse to step until a state is loaded into them.
            TimeoutError: The time ran out.
        """
        self._arrival.wait(timeout)
        return self
