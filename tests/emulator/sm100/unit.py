"""The asynchronous side of tensor memory: the tensor core's queue, and what tensor memory tells the race detector.

Matrix products, copies and commits of one warp complete in the order of issue, each at a moment that the adversary
picks; those of different warps are unordered unless the program orders them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.errors import MemoryFault, SyncError
from tests.emulator.race import ASYNC, ORDER, Accessor, Shadow, join
from tests.emulator.sync import Waitable

from . import cp, mma
from .descriptors import SharedDescriptor
from .tmem import COLUMNS, LANES, TensorAddress, TensorMemory

if TYPE_CHECKING:
    from tests.emulator.machine import Cta

GROUP_LANES = 16  # lanes per race-detector granule: the smallest run that an instruction touches
GROUPS = LANES // GROUP_LANES


class TensorMemoryUnit:
    """Tensor memory of one CTA with its access history; lives in ``Cta.units``."""

    def __init__(self, cta: Cta):
        self.cta = cta
        self.memory = TensorMemory()
        self.shadow: Shadow | None = None
        machine = cta.machine
        if machine.detect_races:
            # 4 bytes per granule is the Shadow's unit: one granule is one column of 16 lanes here.
            self.shadow = Shadow("tensor memory granule", COLUMNS * GROUPS * 4, machine.columns, ORDER, False)
        self.freed = np.zeros((3, machine.columns.capacity), np.int32)
        self.waiting = TensorMemoryWait(self)

    @cached_property
    def shared_words(self) -> np.ndarray:
        """The CTA's shared window in 16-byte items."""
        return self.cta.shared.bytes.view(np.complex128)

    def finish(self) -> None:
        """Called when the CTA has ended."""
        self.memory.check_exit()


class TensorMemoryWait(Waitable):
    """What a blocked tcgen05.alloc waits for: columns to be freed, or the peer CTA's allocation."""

    def __init__(self, unit: TensorMemoryUnit):
        super().__init__()
        self.unit = unit

    def report(self) -> str:
        memory = self.unit.memory
        return (
            f"tensor memory of CTA {self.unit.cta.ctaid} (allocations {memory.allocations}; or its peer's allocation)"
        )


def unit_of(cta: Cta) -> TensorMemoryUnit:
    """The CTA's tensor memory, made on first use."""
    found = cta.units.get("tensor memory")
    if found is None:
        found = cta.units["tensor memory"] = TensorMemoryUnit(cta)
    return found  # type: ignore[return-value]


def group_of(cta: Cta, cta_group: int) -> list[Cta]:
    """The CTAs that a ``.cta_group::cta_group`` instruction of ``cta`` concerns, in rank order."""
    if cta_group == 1:
        return [cta]
    if len(cta.cluster) % 2:
        raise SyncError(f"cta_group::2 in CTA {cta.ctaid}, whose cluster has {len(cta.cluster)} CTAs: no peer")
    first = cta.rank & ~1
    return [cta.cluster[first], cta.cluster[first + 1]]


@lru_cache(maxsize=4096)
def _shared_granules(descriptor: SharedDescriptor, rows: int, k: int, itemsize: int, mn_major: bool) -> np.ndarray:
    """Race-detector granules (4 bytes) of an operand in shared memory."""
    base, chunks = mma.operand_chunks(descriptor, rows, k, itemsize, mn_major)
    return (((chunks.index.reshape(-1, 1) * 4) + np.arange(4)).ravel()) + base // 4


@lru_cache(maxsize=1024)
def _tensor_granules(first: int, stop: int, lane: int, m: int, cta_group: int) -> slice | np.ndarray:
    """Granules of columns [first, stop) in the lanes of a data path."""
    if m != 64:
        return slice(first * GROUPS, stop * GROUPS)
    groups = np.arange(lane // GROUP_LANES, GROUPS, 2)
    return (np.arange(first, stop)[:, None] * GROUPS + groups).ravel()


class TensorCore:
    """In-order queue of one warp's tcgen05.mma, .cp and .commit: an asynchronous action of the machine."""

    def __init__(self, machine, issuer: str, clocks: np.ndarray):
        self.machine, self.issuer = machine, issuer
        self.queue: deque = deque()
        self.column = machine.columns.operation(f"tensor core for {issuer}", clocks)
        # What happened before the operation in hand; and what it may rely on in tensor memory.
        self.clock = np.zeros((3, machine.columns.capacity), np.int32)
        self.tensor_clock = np.zeros_like(self.clock) if machine.tensor_fences else self.clock
        self.line = 0
        self.accessor: Accessor = None  # type: ignore[assignment]
        self.tensor_accessor: Accessor = None  # type: ignore[assignment]

    def describe(self) -> str:
        return self._at(self.line)

    def _at(self, line: int) -> str:
        return f"tensor core, issued by {self.issuer} at PTX line {line},"

    def report(self) -> str:
        return f"{len(self.queue)} tcgen05 operations of {self.issuer}, the first of PTX line {self.queue[0][1]}"

    def issue(self, work: Callable[[TensorCore], None], line: int, clocks: np.ndarray, view: np.ndarray) -> None:
        """Queues ``work``; what happened before ``clocks`` happens before it, ``view`` alike for tensor memory."""
        if not self.queue:
            self.machine.start(self)
        kept = clocks.copy()
        self.queue.append((work, line, kept, kept if view is clocks else view.copy()))

    def run(self) -> bool:
        work, self.line, clocks, view = self.queue.popleft()
        join(self.clock, clocks)
        columns = self.machine.columns
        columns.clock[self.column] += 1
        self.clock[ORDER, self.column] = columns.clock[self.column]
        line = self.line
        self.accessor = self.tensor_accessor = Accessor(self.column, self.clock, ASYNC, lambda: self._at(line))
        if self.tensor_clock is not self.clock:
            join(self.tensor_clock, view)
            self.tensor_clock[ORDER, self.column] = columns.clock[self.column]
            self.tensor_accessor = Accessor(self.column, self.tensor_clock, ASYNC, lambda: self._at(line))
        work(self)
        return not self.queue

    # ---- operations ------------------------------------------------------------------------------------------------
    def multiply(self, request: mma.MmaRequest, ctas: list[Cta]) -> None:
        """Executes a tcgen05.mma on its CTAs."""
        units = [unit_of(cta) for cta in ctas]
        for cta in ctas:
            if cta.live == 0:
                raise MemoryFault(f"{self.describe()} works in CTA {cta.ctaid}, which has exited")
        for unit in units:
            if unit.shadow is not None:
                self._note_accesses(request, unit)
        mma.execute(request, [(unit.shared_words, unit.memory) for unit in units])
        count = self.machine.count
        count("mma_flop", request.flop)
        count("mma_instructions", 1)
        step, itemsize = request.instruction, 2 if request.instruction.kind == "f16" else 4
        width = step.k * itemsize
        from_shared = step.n * width
        if isinstance(request.a, TensorAddress):
            count("tmem_mma_a_bytes", step.m * width)
        else:
            from_shared += step.m * width
        count("mma_shared_bytes", from_shared)
        count("tmem_mma_d_bytes", step.m * step.n * 4)

    def _note_accesses(self, request: mma.MmaRequest, unit: TensorMemoryUnit) -> None:
        step, group, line = request.instruction, request.cta_group, self.line
        itemsize = mma.ELEMENT_BYTES[step.kind]
        shared = unit.cta.shared.shadow
        shared.read(
            _shared_granules(request.b, step.n // group, step.k, itemsize, step.b_mn_major), self.accessor, line
        )
        rows = mma.data_path(step.m, group).rows
        if isinstance(request.a, TensorAddress):
            index = _tensor_granules(
                request.a.column, request.a.column + request.a_columns, request.a.lane, step.m, group
            )
            unit.shadow.read(index, self.tensor_accessor, line)
        else:
            shared.read(_shared_granules(request.a, rows, step.k, itemsize, step.a_mn_major), self.accessor, line)
        d = _tensor_granules(request.d.column, request.d.column + request.d_columns, request.d.lane, step.m, group)
        unit.shadow.write(d, self.tensor_accessor, line)

    def copy(self, form: cp.CopyShape, address: TensorAddress, source: SharedDescriptor, ctas: list[Cta]) -> None:
        """Executes a tcgen05.cp in each of its CTAs."""
        columns = form.row_bytes // 4
        for cta in ctas:
            unit = unit_of(cta)
            if unit.shadow is not None:
                read = _shared_granules(source, max(form.rows, 8), form.row_bytes // 2, 2, False)
                cta.shared.shadow.read(read, self.accessor, self.line)
                unit.shadow.write(
                    slice(address.column * GROUPS, (address.column + columns) * GROUPS), self.tensor_accessor, self.line
                )
            cp.execute(form, address, source, unit.shared_words, unit.memory)
        self.machine.count("tmem_cp_bytes", form.rows * form.row_bytes * len(ctas))

    def commit(self, targets: list[tuple[Cta, int]]) -> None:
        """Arrives once on the mbarrier at each (CTA, byte offset)."""
        for cta, offset in targets:
            barrier = cta.mbarriers.get(offset)
            if barrier is None:
                raise SyncError(f"{self.describe()} commits to {offset:#x} of CTA {cta.ctaid}: no initialised mbarrier")
            if cta.live == 0:
                raise MemoryFault(f"{self.describe()} commits to an mbarrier of CTA {cta.ctaid}, which has exited")
            barrier.check_async(self.clock, self.describe)
            barrier.arrive(1, self.clock, self.describe)
            if barrier.advance():
                self.machine.changed(barrier)
