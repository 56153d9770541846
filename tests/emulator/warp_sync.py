"""Synchronisation by a warp: mbarriers, named and cluster barriers, fences, groups.

Methods named ``*_begin`` return None when the warp may go on, or the object that it must wait for; translated code
yields that object and then calls :meth:`again` until it returns None.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .errors import MemoryFault, SyncError
from .memory import SHARED_WINDOW
from .race import ORDER, PROXY_GLOBAL, PROXY_SHARED, join
from .sync import Mbarrier, Waitable


class WarpSync:
    """Barrier operations; mixed into Warp."""

    # ---- mbarriers ---------------------------------------------------------------------------------------------------
    def _barrier_place(self, address: int):
        if address >= SHARED_WINDOW:
            address -= SHARED_WINDOW
        rank, offset = address >> 24, address & 0xFFFFFF
        cluster = self.cta.cluster
        if rank >= len(cluster):
            raise MemoryFault(
                f"{self.describe()}: barrier address {address:#x} names CTA rank {rank} of {len(cluster)}"
            )
        return cluster[rank], offset

    def mbarrier(self, address: int) -> Mbarrier:
        cta, offset = self._barrier_place(address)
        found = cta.mbarriers.get(offset)
        if found is None:
            known = ", ".join(hex(o) for o in sorted(cta.mbarriers))
            raise SyncError(
                f"{self.describe()}: no initialised mbarrier at {address:#x} of CTA {cta.ctaid} (initialised: {known})"
            )
        if cta is not self.cta and not found.announced:
            raise SyncError(f"{self.describe()}: {found.report()} without fence.mbarrier_init after its mbarrier.init")
        if self.clocks[ORDER, found.init_column] < found.init_clock:
            raise SyncError(f"{self.describe()} uses {found.report()} not ordered after its mbarrier.init")
        if cta.live == 0:
            raise MemoryFault(f"{self.describe()}: mbarrier of CTA {cta.ctaid}, which has exited")
        return found

    def mbarrier_init(self, address: int, count: int) -> None:
        cta, offset = self._barrier_place(address)
        if cta is not self.cta:
            raise SyncError(f"{self.describe()}: mbarrier.init in another CTA")
        cta.shared.check(np.array([offset]), 8, self.describe, cta.window)
        if not 1 <= count < 1 << 20:
            raise SyncError(f"{self.describe()}: mbarrier.init with count {count}")
        if offset in cta.mbarriers:
            raise SyncError(f"{self.describe()}: {cta.mbarriers[offset].report()} is initialised again")
        if cta.shared.shadow is not None:
            cta.shared.shadow.write(np.array([offset // 4, offset // 4 + 1]), self.generic, self.line)
        barrier = Mbarrier(f"+{offset:#x} of CTA {cta.ctaid}", count, self.machine.columns.capacity)
        barrier.init_column, barrier.init_clock = self.column, int(self.clocks[ORDER, self.column])
        barrier.init_line = self.line
        cta.mbarriers[offset] = barrier
        self.unannounced.append(barrier)

    def mbarrier_inval(self, address: int) -> None:
        cta, offset = self._barrier_place(address)
        self.mbarrier(address)
        del cta.mbarriers[offset]

    def mbarrier_arrive(self, address, count: int, mask, tx: int | None = None, relaxed: bool = False) -> int:
        """Arrivals of the active lanes (each counts); with ``tx``, each lane expects that many bytes first."""
        clocks = np.zeros_like(self.clocks) if relaxed else self.published(mask)
        if isinstance(address, int):
            return self._arrive_one(address, count, int(np.count_nonzero(mask)), tx, clocks)
        for place, lanes in Counter(address[mask].tolist()).items():
            self._arrive_one(place, count, lanes, tx, clocks)
        return 0

    def _arrive_one(self, address: int, count: int, lanes: int, tx: int | None, clocks: np.ndarray) -> int:
        barrier = self.mbarrier(address)
        state = barrier.phase & 1
        if tx is not None:
            barrier.tx += tx * lanes
        barrier.arrive(count * lanes, clocks, self.describe)
        self.tick()
        self.machine.progress += 1
        if barrier.advance():
            self.machine.changed(barrier)
        return state

    def mbarrier_expect(self, address: int, tx: int, mask) -> None:
        barrier = self.mbarrier(address)
        barrier.tx += tx * int(np.count_nonzero(mask))
        if barrier.advance():
            self.machine.changed(barrier)

    def mbarrier_complete(self, address: int, tx: int, mask) -> None:
        barrier = self.mbarrier(address)
        barrier.complete_tx(tx * int(np.count_nonzero(mask)), self.clocks, self.describe)
        self.tick()
        if barrier.advance():
            self.machine.changed(barrier)

    def try_wait_begin(self, address: int, parity: int, suspend: bool) -> Waitable | None:
        """Leaves the outcome in ``self.passed``. ``suspend``: try_wait, which may block for a while."""
        barrier = self.mbarrier(address)
        self.waiting = (barrier, parity & 1)
        self.timed_out = False
        if barrier.passed(parity & 1):
            return self._passed(barrier)
        if not suspend or self.machine.adversary.gives_up():
            self.passed = False
            return None
        self.may_time_out = True
        self.wait_note = f", wants parity {parity & 1}"
        return barrier

    def _passed(self, barrier: Mbarrier) -> None:
        join(self.clocks, barrier.completed)
        self.lanes_met()
        self.passed = True
        self.may_time_out = False
        self.wait_note = ""

    def try_wait_again(self) -> Waitable | None:
        barrier, parity = self.waiting
        if barrier.passed(parity):
            return self._passed(barrier)
        if self.timed_out:
            self.timed_out = False
            self.passed = False
            return None
        return barrier

    # ---- named barriers ----------------------------------------------------------------------------------------------
    def barrier_begin(self, number: int, threads: int | None, mask, sync: bool, reduction=None) -> Waitable | None:
        """``bar.sync``/``bar.red``/``bar.arrive`` for this warp (a warp counts 32 threads, as the hardware does)."""
        cta = self.cta
        if not 0 <= number < 16:
            raise SyncError(f"{self.describe()}: barrier number {number}")
        expected = threads if threads is not None else sum(w.thread_count for w in cta.warps)
        if threads is not None and threads % 32:
            raise SyncError(f"{self.describe()}: barrier {number} for {threads} threads, not a multiple of 32")
        barrier = cta.named_barrier(number)
        if reduction is not None:
            barrier.reduction.append(reduction)
        complete = barrier.arrive(self.thread_count, expected, self.clocks, self.describe)
        self.sync_lanes()
        self.machine.progress += 1
        generation = barrier.generation
        if complete:
            released = barrier.clock
            barrier.result[generation] = list(barrier.reduction)
            barrier.result.pop(generation - 2, None)
            for warp in barrier.waiters:
                join(warp.clocks, released)
            if sync:
                join(self.clocks, released)
            barrier.reset()
            self.machine.changed(barrier)
        self.named_wait = (barrier, generation)
        self.may_time_out = False
        self.wait_note = ""
        return barrier if sync and not complete else None

    def barrier_again(self) -> Waitable | None:
        barrier, generation = self.named_wait
        return barrier if barrier.generation == generation else None

    def barrier_result(self, operation: str):
        barrier, generation = self.named_wait
        parts = barrier.result[generation]
        count = sum(int(np.count_nonzero(p)) for p in parts)
        total = sum(len(p) for p in parts)
        return {"popc": count, "and": count == total, "or": count > 0}[operation]

    # ---- cluster barrier ---------------------------------------------------------------------------------------------
    def cluster_arrive(self, relaxed: bool, mask) -> None:
        barrier = self.cta.cluster_barrier
        if self.cluster_phase is not None:
            raise SyncError(f"{self.describe()}: barrier.cluster.arrive twice without a wait")
        self.cluster_phase = barrier.phase
        complete = barrier.arrive(int(np.count_nonzero(mask)), self.fence_clock if relaxed else self.clocks)
        self.tick()
        self.machine.progress += 1
        if complete:
            self.machine.changed(barrier)

    def cluster_wait_begin(self) -> Waitable | None:
        if self.cluster_phase is None:
            raise SyncError(f"{self.describe()}: barrier.cluster.wait without an arrive")
        self.may_time_out = False
        self.wait_note = ""
        return self.cluster_wait_again()

    def cluster_wait_again(self) -> Waitable | None:
        barrier = self.cta.cluster_barrier
        if barrier.phase == self.cluster_phase:
            return barrier
        self.cluster_phase = None
        self.sync_lanes()
        join(self.clocks, barrier.completed)
        return None

    # ---- fences ------------------------------------------------------------------------------------------------------
    def fence(self) -> None:
        """``fence.acq_rel``/``fence.sc``/``membar``: orders relaxed atomics around it."""
        if self.pending_acquire is not None:
            join(self.clocks, self.pending_acquire)
            self.pending_acquire = None
        self.fence_clock = self.clocks.copy()
        self.tick()

    def announce_barriers(self) -> None:
        """``fence.mbarrier_init``: the barriers that this warp has initialised become visible to asynchronous units."""
        for barrier in self.unannounced:
            barrier.announced = True
        self.unannounced.clear()

    def proxy_fence(self, shared: bool, everything_global: bool, mask) -> None:
        """``fence.proxy.async``: generic accesses so far become visible to the async proxy."""
        before = self.clocks.copy()
        if shared:
            join(self.clocks[PROXY_SHARED], self.clocks[ORDER])
            self.announce_barriers()
        if everything_global:
            join(self.clocks[PROXY_GLOBAL], self.clocks[ORDER])
        self.note_fence(before, mask)
        self.tick()

    # ---- groups of asynchronous operations ---------------------------------------------------------------------------
    def groups_begin(self, which: str, allowed: int, reading: bool) -> Waitable | None:
        groups = self.bulk if which == "bulk" else self.wgmma_groups
        self.group_wait = (groups, allowed, reading)
        self.may_time_out = False
        self.wait_note = ""
        return self.groups_again()

    def groups_again(self) -> Waitable | None:
        groups, allowed, reading = self.group_wait
        if groups.pending(allowed, reading):
            return groups
        finished = len(groups.committed) - allowed
        for group in groups.committed[: max(0, finished)]:
            for operation in group:
                operation.observe(self.clocks, reading)
        if not reading and finished > 0:
            del groups.committed[:finished]
        return None
