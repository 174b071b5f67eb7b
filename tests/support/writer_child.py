"""A writer that takes no lease, as where the file system has no locks. Prints what became of each
save: sequence number and value, or 'fenced'.
"""

from __future__ import annotations

import sys

import torch

from deltacheck import errors
from deltacheck.backends.torch import Engine
from deltacheck.store.lock.holding import Holding


class NoLease:
    def __init__(self, root: object) -> None:
        self.holding = Holding()

    def check(self) -> None: ...
    def release(self) -> None: ...


def main(root: str, writer: int, rounds: int) -> None:
    from deltacheck.store.roots import opened

    torch.set_num_threads(1)
    opened.take_lease = NoLease
    engine, state = None, {}
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(rounds):
        value = float(writer * 1_000_000 + number)
        try:
            if engine is None:
                engine = Engine(root)
                state = (
                    engine.restore()
                    if engine.steps()
                    else {"a": torch.zeros(50), "b": torch.zeros(50)}
                )
            for leaf in state.values():
                leaf.fill_(value)
            report = engine.save(number, state).result(240)
            assert report is not None
            print(report.seq, value, flush=True)
        except errors.SaveFailed as error:
            print("fenced" if isinstance(error.__cause__, errors.RootBusy) else error, flush=True)
            engine = None  # as a program that is started again; the old one's threads end with it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
