"""Barriers: mbarriers with phases and transaction counts, named CTA barriers, the cluster barrier."""

from __future__ import annotations

import numpy as np

from .errors import SyncError
from .race import join


class Waitable:
    """Something that warps block on. The machine moves ``waiters`` back to the runnable set on a change."""

    def __init__(self) -> None:
        self.waiters: list = []

    def report(self) -> str:
        raise NotImplementedError


class AsyncAction:
    """Asynchronous work that the scheduler may perform at any time. ``run`` returns whether it is finished."""

    def run(self) -> bool:
        raise NotImplementedError

    def report(self) -> str:
        return type(self).__name__


class Mbarrier(Waitable):
    """An mbarrier object. ``phase`` numbers the current incomplete phase from 0; ``pending`` arrivals are missing."""

    def __init__(self, name: str, count: int, width: int):
        super().__init__()
        self.name, self.count, self.pending, self.tx, self.phase = name, count, count, 0, 0
        self.gathering = np.zeros((3, width), np.int32)
        self.completed = np.zeros((3, width), np.int32)
        self.init_column, self.init_clock, self.init_line = 0, 0, 0
        self.announced = False  # fence.mbarrier_init (or fence.proxy.async) followed the initialisation
        self.last: list[str] = []

    def arrive(self, count: int, clock: np.ndarray, who) -> None:
        self.pending -= count
        if self.pending < 0:
            raise SyncError(
                f"{who()}: {count} arrivals on {self.report()}: {-self.pending} more than the phase expects"
            )
        join(self.gathering, clock)

    def check_async(self, clock: np.ndarray, who) -> None:
        """Raises SyncError unless an asynchronous operation with ``clock`` may signal the barrier."""
        if clock[0, self.init_column] < self.init_clock:
            raise SyncError(f"{who()} signals {self.report()}, not ordered after its mbarrier.init")
        if not self.announced:
            raise SyncError(f"{who()} signals {self.report()}, without fence.mbarrier_init after its mbarrier.init")

    def complete_tx(self, count: int, clock: np.ndarray, who) -> None:
        self.tx -= count
        join(self.gathering, clock)
        if self.pending == 0 and self.tx < 0:
            raise SyncError(f"{who()}: completes {count} bytes on {self.report()}, more than expected in this phase")

    def advance(self) -> bool:
        """Completes the phase if every arrival and every byte is in. Returns whether it did."""
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        self.completed, self.gathering = self.gathering, self.completed
        self.gathering.fill(0)
        return True

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity has completed (the one just before the current phase)."""
        return (self.phase & 1) != parity

    def report(self) -> str:
        return (
            f"mbarrier {self.name} (phase {self.phase}, {self.pending} of {self.count} arrivals missing, tx {self.tx})"
        )


class NamedBarrier(Waitable):
    """``bar``/``barrier.cta`` with an id: counts threads; warps that sync block until the count is reached."""

    def __init__(self, number: int, width: int):
        super().__init__()
        self.number, self.arrived, self.expected, self.generation = number, 0, 0, 0
        self.clock = np.zeros((3, width), np.int32)
        self.reduction: list = []
        self.result: dict[int, object] = {}

    def arrive(self, threads: int, expected: int, clock: np.ndarray, who) -> bool:
        """Adds threads; returns whether this completes the barrier."""
        if self.arrived and expected != self.expected:
            raise SyncError(
                f"{who()}: barrier {self.number} with {expected} threads while others wait with {self.expected}"
            )
        self.expected = expected
        self.arrived += threads
        join(self.clock, clock)
        if self.arrived > expected:
            raise SyncError(f"{who()}: {self.arrived} threads arrive on barrier {self.number} of {expected}")
        return self.arrived == expected

    def reset(self) -> None:
        self.arrived = 0
        self.generation += 1
        self.clock = np.zeros_like(self.clock)
        self.reduction = []

    def report(self) -> str:
        return f"barrier {self.number} ({self.arrived} of {self.expected} threads arrived)"


class ClusterBarrier(Waitable):
    """``barrier.cluster``: all threads of all CTAs of the cluster."""

    def __init__(self, threads: int, width: int):
        super().__init__()
        self.threads, self.arrived, self.phase = threads, 0, 0
        self.exited = 0
        self.gathering = np.zeros((3, width), np.int32)
        self.completed = np.zeros((3, width), np.int32)

    def arrive(self, count: int, clock: np.ndarray | None) -> bool:
        self.arrived += count
        if clock is not None:
            join(self.gathering, clock)
        return self.advance()

    def advance(self) -> bool:
        if self.arrived + self.exited < self.threads or self.arrived == 0:
            return False
        self.arrived = 0
        self.phase += 1
        self.completed, self.gathering = self.gathering, np.zeros_like(self.gathering)
        return True

    def report(self) -> str:
        return f"cluster barrier (phase {self.phase}, {self.arrived}+{self.exited} of {self.threads} threads)"


class Groups(Waitable):
    """Commit groups of asynchronous operations of one warp (bulk copies, or wgmma).

    An operation is known by an object with ``read_done`` and ``done`` flags and a ``clock``.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.open: list = []
        self.committed: list[list] = []

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def pending(self, allowed: int, reading: bool) -> list:
        """Operations that must finish (or finish reading) before at most ``allowed`` groups are pending."""
        count = max(0, len(self.committed) - allowed)
        flag = "read_done" if reading else "done"
        return [op for group in self.committed[:count] for op in group if not getattr(op, flag)]

    def report(self) -> str:
        return f"{self.name} ({len(self.committed)} groups pending)"
