"""The machine: CTAs and clusters, the scheduler, and the adversary that decides what happens next.

Everything that can happen is an action of an agent: a runnable warp, or an asynchronous operation in flight. The
adversary picks the next agent with a seeded generator; a seed also draws one of several temperaments (asynchronous
work early, late or at random times; one warp starved; long or short bursts of one warp).
"""

from __future__ import annotations

import numpy as np

from .adversary import Adversary
from .errors import DeadlockError, EmulatorError, SyncError
from .memory import GlobalMemory, Region
from .race import PROXY_SHARED, Columns, Shadow
from .sync import AsyncAction, ClusterBarrier, Mbarrier, NamedBarrier, Waitable
from .warp import Warp

SHARED_LIMIT = 227 * 1024 + 1024
LIVELOCK_STEPS = 100_000


class Cta:
    """One thread block: coordinates, shared memory, barriers."""

    def __init__(self, machine: Machine, cluster: list[Cta], rank: int, ctaid: tuple[int, int, int]):
        self.machine, self.cluster, self.rank, self.ctaid = machine, cluster, rank, ctaid
        launch = machine.launch
        self.ntid, self.nctaid, self.cluster_dims = launch.block, launch.grid, launch.cluster
        self.cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        dims = launch.cluster
        self.cluster_ctaid = tuple(c % d for c, d in zip(ctaid, dims, strict=True))
        self.clusterid = tuple(c // d for c, d in zip(ctaid, dims, strict=True))
        self.nclusterid = tuple(g // d for g, d in zip(launch.grid, dims, strict=True))
        self.warp_count = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
        self.sm = machine.next_sm()
        self.window = rank << 24
        self.dynamic_bytes = launch.shared_bytes
        self.shared = Region(f"shared memory of CTA {ctaid}", 0, launch.shared_size)
        self.shared.low = 1024
        self.shared.versions = np.zeros((launch.shared_size >> 12) + 1, np.int64)
        self.shared.bytes.view(np.uint16)[:] = 0x7FFF
        if machine.detect_races:
            self.shared.shadow = Shadow("shared", launch.shared_size, machine.columns, PROXY_SHARED, True)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.cluster_barrier: ClusterBarrier = None  # type: ignore[assignment]
        self.warps: list[Warp] = []
        self.units: dict[str, object] = {}  # per-CTA units such as "tcgen05", made on first use
        self.live = 0

    def finish(self) -> None:
        """The last warp has exited: nothing may be left half done."""
        for unit in self.units.values():
            unit.finish()  # type: ignore[attr-defined]
        for offset, barrier in self.mbarriers.items():
            if barrier.tx:
                raise SyncError(f"CTA {self.ctaid} exits with bytes outstanding on {barrier.report()} at {offset:#x}")
        for named in self.named.values():
            if named.arrived:
                raise SyncError(f"CTA {self.ctaid} exits with {named.report()}")

    def named_barrier(self, number: int) -> NamedBarrier:
        found = self.named.get(number)
        if found is None:
            found = self.named[number] = NamedBarrier(number, self.machine.columns.capacity)
        return found


class Launch:
    """Sizes of one launch: grid, block, cluster in threads and CTAs, shared memory in bytes."""

    def __init__(self, grid, block, cluster, shared_bytes: int, static_bytes: int = 0):
        self.grid, self.block, self.cluster = tuple(grid), tuple(block), tuple(cluster)
        self.shared_bytes = shared_bytes
        self.shared_size = 1024 + -(-static_bytes // 16) * 16 + -(-shared_bytes // 16) * 16
        if self.shared_size > SHARED_LIMIT:
            raise EmulatorError(f"{shared_bytes} bytes of dynamic shared memory are more than an SM has")
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise EmulatorError(f"grid {self.grid} is not a multiple of the cluster {self.cluster}")


class Machine:
    """Runs one kernel launch. ``resident`` bounds the number of clusters in flight at a time."""

    sm_count = 132

    def __init__(self, program, launch: Launch, memory: GlobalMemory, params: bytes, *, seed: int = 0,
                 temperament: str | None = None, detect_races: bool = True, resident: int = 16,
                 tensor_maps: dict | None = None, tensor_fences: bool = False,
                 chip_products: bool = False):  # fmt: skip
        self.program, self.launch, self.memory, self.params = program, launch, memory, params
        self.adversary = Adversary(seed, temperament)
        self.detect_races = detect_races
        clusters = launch.grid[0] * launch.grid[1] * launch.grid[2]
        self.cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        clusters //= self.cluster_size
        self.resident = min(resident, clusters)
        warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32) * self.cluster_size
        self.columns = Columns(1 + self.resident * (warps + 64 * self.cluster_size))
        self.tensor_maps = tensor_maps or {}
        self.tensor_fences, self.chip_products = tensor_fences, chip_products
        self.tensor_columns: set[int] = set()  # clock columns of those who access tensor memory
        self.effects: set[int] = set()  # PTX lines of fences and warp barriers that ordered something
        self.waiting: list[tuple[int, int, int]] = []
        self.runnable: list[Warp] = []
        self.blocked: dict[Warp, Waitable] = {}
        self.actions: list[AsyncAction] = []
        self.progress = 0
        self._sm = 0
        self.sync_clocks: dict[int, np.ndarray] = {}  # clocks published through global atomics, by address
        self.block_counts: np.ndarray | None = None
        self.counters: dict[str, int] = {}

    def next_sm(self) -> int:
        self._sm += 1
        return (self._sm - 1) % self.sm_count

    def count(self, name: str, amount: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    # ---- agents ------------------------------------------------------------------------------------------------------
    def start(self, action: AsyncAction) -> None:
        self.actions.append(action)

    def changed(self, waitable: Waitable) -> None:
        """Something that warps may wait for has changed: they look again."""
        self.progress += 1
        waiters = waitable.waiters
        if waiters:
            for warp in waiters:
                if self.blocked.pop(warp, None) is not None:
                    self.runnable.append(warp)
            waiters.clear()

    def _launch_cluster(self, first: tuple[int, int, int]) -> None:
        dims = self.launch.cluster
        cluster: list[Cta] = []
        for z in range(dims[2]):
            for y in range(dims[1]):
                for x in range(dims[0]):
                    ctaid = (first[0] + x, first[1] + y, first[2] + z)
                    cluster.append(Cta(self, cluster, len(cluster), ctaid))
        threads = self.launch.block[0] * self.launch.block[1] * self.launch.block[2]
        barrier = ClusterBarrier(threads * len(cluster), self.columns.capacity)
        for cta in cluster:
            cta.cluster_barrier = barrier
            cta.live = cta.warp_count
            for index in range(cta.warp_count):
                warp = Warp(self, cta, index, threads)
                warp.block_counts = self.block_counts
                warp.generator = self.program.warp(warp)
                cta.warps.append(warp)
                self.runnable.append(warp)

    def _finish(self, warp: Warp) -> None:
        self.progress += 1
        warp.exit()
        cta = warp.cta
        cta.live -= 1
        self.columns.free_warps.append(warp.column)
        barrier = cta.cluster_barrier
        barrier.exited += warp.thread_count
        if barrier.advance():
            self.changed(barrier)
        if cta.live == 0:
            cta.finish()

    def run(self) -> None:
        """Runs the grid to its end. Raises an :class:`EmulatorError` for anything wrong."""
        grid, dims = self.launch.grid, self.launch.cluster
        waiting = [
            (x, y, z)
            for z in range(0, grid[2], dims[2])
            for y in range(0, grid[1], dims[1])
            for x in range(0, grid[0], dims[0])
        ]
        waiting.reverse()
        self.waiting = waiting  # cluster launch control takes from it
        self.block_counts = np.zeros(self.program.block_count, np.int64).tolist()  # type: ignore[assignment]
        warps_per_cluster = self.cluster_size * -(
            -self.launch.block[0] * self.launch.block[1] * self.launch.block[2] // 32
        )
        live = 0
        adversary, runnable, actions = self.adversary, self.runnable, self.actions
        last_progress, idle_steps, timeouts = -1, 0, -1
        with np.errstate(all="ignore"):
            while True:
                while waiting and live + warps_per_cluster <= self.resident * warps_per_cluster:
                    self._launch_cluster(waiting.pop())
                    live += warps_per_cluster
                if actions and (not runnable or adversary.asynchronous_first(len(runnable), len(actions))):
                    at = adversary.pick(actions)
                    action = actions[at]
                    self.progress += 1
                    if action.run():
                        if actions[at] is action:
                            actions.pop(at)
                        else:
                            actions.remove(action)
                    continue
                if not runnable:
                    if not self.blocked:
                        break
                    if timeouts == self.progress or not self._time_out():
                        raise DeadlockError(self._deadlock())
                    timeouts = self.progress
                    continue
                if self.progress == last_progress:
                    idle_steps += 1
                    if idle_steps > LIVELOCK_STEPS:
                        raise DeadlockError("no progress: warps spin\n" + self._deadlock())
                else:
                    last_progress, idle_steps = self.progress, 0
                at = adversary.pick(runnable)
                warp = runnable[at]
                generator = warp.generator
                for _ in range(adversary.burst()):
                    try:
                        waitable = next(generator)
                    except StopIteration:
                        runnable.remove(warp)
                        self._finish(warp)
                        live -= 1
                        break
                    except EmulatorError:
                        raise
                    except Exception as error:
                        raise EmulatorError(f"{warp.describe()}: {type(error).__name__}: {error}") from error
                    if waitable is not None:
                        runnable.remove(warp)
                        self.blocked[warp] = waitable
                        waitable.waiters.append(warp)
                        break
                else:
                    if adversary.temperament == "orderly":  # round robin
                        runnable.remove(warp)
                        runnable.append(warp)
        self._check_end()

    def _time_out(self) -> bool:
        """Nothing can run: a suspended try_wait gives up and returns false to its program."""
        woken = [w for w in self.blocked if w.may_time_out]
        for warp in woken:
            waitable = self.blocked.pop(warp)
            waitable.waiters.remove(warp)
            warp.timed_out = True
            self.runnable.append(warp)
        return bool(woken)

    def _deadlock(self) -> str:
        lines = [f"deadlock (seed {self.adversary.seed}, {self.adversary.temperament}):"]
        for warp, waitable in sorted(self.blocked.items(), key=lambda item: (item[0].cta.ctaid, item[0].index)):
            lines.append(f"  {warp.describe()} waits for {waitable.report()}{warp.wait_note}")
        for warp in self.runnable[:8]:
            lines.append(f"  {warp.describe()} runs")
        return "\n".join(lines)

    def _check_end(self) -> None:
        if self.actions:
            raise EmulatorError("asynchronous operations in flight at the end: " + self.actions[0].report())
