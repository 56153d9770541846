"""A warp: identity, clocks, and the warp-wide operations that translated code calls."""

from __future__ import annotations

import numpy as np

from .copies import distinct
from .errors import EmulatorError, SyncError
from .lanes import FULL, f4, u4, u8
from .race import GENERIC, ORDER, STRONG, Accessor
from .sm100.warp import WarpTensor
from .sync import Groups
from .warp_memory import WarpMemory
from .warp_sync import WarpSync

_WEIGHTS = (1 << np.arange(32, dtype=np.uint64)).astype(u4)
_LANES = np.arange(32)
_LANEMASK = {
    "eq": _WEIGHTS,
    "lt": (_WEIGHTS - 1).astype(u4),
    "le": ((_WEIGHTS.astype(u8) << u8(1)) - u8(1)).astype(u4),
    "gt": (~((_WEIGHTS.astype(u8) << u8(1)) - u8(1))).astype(u4),
    "ge": (~(_WEIGHTS - 1)).astype(u4),
}


class Warp(WarpMemory, WarpSync, WarpTensor):
    """State of one warp. ``line`` is the PTX line of the instruction in progress."""

    lanemask = _LANEMASK
    distinct = staticmethod(distinct)

    def __init__(self, machine, cta, index: int, threads: int):
        self.machine, self.cta, self.index = machine, cta, index
        self.line = 0
        linear = np.arange(index * 32, index * 32 + 32)
        bx, by, _ = machine.launch.block
        self.tid = tuple(v.astype(u4) for v in (linear % bx, linear // bx % by, linear // (bx * by)))
        self.thread_count = int(min(32, threads - index * 32))
        self.initial_mask = FULL if self.thread_count == 32 else linear < threads
        self.column = machine.columns.warp(f"warp {index} of CTA {cta.ctaid}")
        self.clocks = np.zeros((3, machine.columns.capacity), np.int32)
        self.clocks[ORDER, self.column] = machine.columns.clock[self.column]
        self.generic = Accessor(self.column, self.clocks, GENERIC, self.describe)
        self.strong = Accessor(self.column, self.clocks, STRONG, self.describe)
        self.elected = machine.adversary.random.randrange(32) if machine.adversary.seed else 0
        self.bulk = Groups("bulk-copy groups")
        self.wgmma_groups = Groups("wgmma groups")
        self.wgmma_queue = None
        self.cluster_phase: int | None = None
        self.fence_clock: np.ndarray | None = None
        self.loose = False  # several lanes have accessed memory since the warp last synchronised its lanes
        self.touched = False  # any lane has
        self.issuing = self.initial_mask  # lanes that issue the asynchronous operation in hand
        self.lane_fences: list = []  # what fences of several lanes have changed since: (where, values before)
        self.synced = 0  # this warp's clock at that time
        self.unannounced: list = []  # mbarriers initialised since the last fence
        self.pending_acquire: np.ndarray | None = None
        self.may_time_out = False
        self.timed_out = False
        self.wait_note = ""
        self.local: np.ndarray | None = None
        self.registers_limit = 0
        self.generator = None
        self.block_counts = None
        self._time = 0

    def __hash__(self) -> int:
        return id(self)

    def describe(self) -> str:
        return f"warp {self.index} of CTA {self.cta.ctaid} at PTX line {self.line}"

    def exit(self) -> None:
        if self.wgmma_groups.open or self.wgmma_groups.pending(0, False):
            raise SyncError(f"{self.describe()} exits with wgmma operations in flight")
        self.tensor_exit()

    def trap(self) -> None:
        raise EmulatorError(f"{self.describe()}: trap")

    def clock(self) -> int:
        self._time += 1
        return self._time & 0xFFFFFFFF

    def set_registers(self, count: int, increase: bool) -> None:
        """``setmaxnreg``: a multiple of 8 in 24..256 that moves in the stated direction."""
        if count % 8 or not 24 <= count <= 256:
            raise SyncError(f"{self.describe()}: setmaxnreg {count}")
        if self.registers_limit and (count < self.registers_limit) == increase and count != self.registers_limit:
            raise SyncError(f"{self.describe()}: setmaxnreg from {self.registers_limit} to {count} the wrong way")
        self.registers_limit = count

    # ---- clocks ------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Starts a new epoch: what this warp does from now on is not covered by what it has published."""
        clock = self.machine.columns.clock
        clock[self.column] += 1
        self.clocks[ORDER, self.column] = clock[self.column]

    def sync_lanes(self) -> None:
        """The lanes have met (bar.warp.sync or a wider barrier): each may now publish what the others did."""
        if self.touched or self.lane_fences:
            self.machine.effects.add(self.line)
        self.loose = self.touched = False
        self.lane_fences.clear()
        self.synced = int(self.clocks[ORDER, self.column])
        self.lanes_met()

    def lanes_met(self) -> None:
        """Whatever a lane has done so far, the others may build on."""
        self.generic.met = self.strong.met = int(self.clocks[ORDER, self.column])
        self.tick()

    def published(self, mask) -> np.ndarray:
        """The clock that an arrival or a copy by the lanes ``mask`` publishes: not what other lanes did since they last
        met, nor what their fences made visible."""
        if not (self.loose or self.lane_fences) or np.count_nonzero(mask) == self.thread_count:
            return self.clocks
        clocks = self.clocks.copy()
        if self.loose:
            clocks[:, self.column] = np.minimum(clocks[:, self.column], self.synced)
        for changed, values in reversed(self.lane_fences):
            clocks[changed] = values
        return clocks

    def note_fence(self, before: np.ndarray, mask) -> None:
        """Every lane's fence covers that lane's accesses only: keeps what one lane may not publish for the others."""
        if np.count_nonzero(mask) > 1:
            changed = before != self.clocks
            if changed.any():
                self.lane_fences.append((changed, before[changed]))

    # ---- lanes -------------------------------------------------------------------------------------------------------
    @staticmethod
    def first(mask) -> int:
        return 0 if mask is FULL else int(mask.argmax())

    @staticmethod
    def bits(mask) -> int:
        return int((_WEIGHTS * mask).sum(dtype=np.uint64))

    def same(self, values, mask):
        """The one value that all active lanes hold; an error if they differ."""
        value = values[self.first(mask)]
        if np.count_nonzero((values != value) & mask):
            raise EmulatorError(f"{self.describe()}: lanes disagree on an operand that must be uniform: {values}")
        return value if values.dtype.kind == "f" else int(value) if values.dtype.kind != "b" else bool(value)

    def elect(self, mask) -> tuple[int, np.ndarray]:
        lane = self.elected if mask[self.elected] else self.first(mask)
        chosen = np.zeros(32, bool)
        chosen[lane] = True
        return lane, chosen

    def all_same(self, predicate, mask) -> bool:
        active = predicate[mask]
        return bool((active == active[0]).all())

    def shuffle(self, mode: str, values, lane, clamp):
        """``shfl.sync``: returns (values, predicate of lanes whose source is in range)."""
        c = int(clamp if isinstance(clamp, int) else clamp[0])
        limit, segment = c & 31, c >> 8 & 31
        b = np.asarray(lane, np.int64) & 31
        maximum = (_LANES & segment) | (limit & ~segment)
        if mode == "up":
            source = _LANES - b
            ok = source >= maximum
        elif mode == "down":
            source = _LANES + b
            ok = source <= maximum
        elif mode == "bfly":
            source = _LANES ^ b
            ok = source <= maximum
        else:
            source = (_LANES & segment) | (b & ~segment)
            ok = source <= maximum
        source = np.where(ok, source, _LANES)
        return values[source], ok

    def redux(self, operation: str, values, mask, is_signed: bool, absolute: bool, nan: bool):
        if isinstance(values, int):
            values = np.full(32, values, u4)
        elif not getattr(values, "ndim", 0):
            values = np.full(32, values, f4)
        active = values[mask]
        if active.dtype == f4:
            active = np.abs(active) if absolute else active
            table = {
                ("max", False): np.fmax,
                ("min", False): np.fmin,
                ("max", True): np.maximum,
                ("min", True): np.minimum,
            }
            return table[operation, nan].reduce(active)
        if operation in ("min", "max") and is_signed:
            active = active.view(np.int32)
        function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                    "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]  # fmt: skip
        return int(function.reduce(active.astype(np.int64))) & 0xFFFFFFFF

    def match_any(self, values, mask):
        if isinstance(values, int):
            values = np.full(32, values, u8)
        equal = (values[:, None] == values[None, :]) & mask[None, :]
        return (equal * _WEIGHTS).sum(axis=1, dtype=np.uint64).astype(u4)

    def match_all(self, values, mask):
        if isinstance(values, int):
            return self.bits(mask), True
        active = values[mask]
        same = bool((active == active[0]).all())
        return (self.bits(mask) if same else 0), same
