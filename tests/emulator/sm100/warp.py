"""Tensor-memory operations of a warp: allocation, loads and stores, issue to the tensor core. Mixed into Warp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.emulator.errors import MemoryFault, SyncError
from tests.emulator.lanes import FULL
from tests.emulator.race import GENERIC, ORDER, Accessor, join

from . import fragments
from .cp import CopyShape
from .descriptors import decode_instruction, decode_shared
from .fragments import Fragment
from .mma import MmaRequest
from .tmem import POISON, TensorAddress
from .unit import COLUMNS, GROUP_LANES, GROUPS, TensorCore, TensorMemoryUnit, group_of, unit_of


@dataclass(frozen=True)
class MmaForm:
    """What the opcode of a tcgen05.mma says."""

    kind: str
    cta_group: int
    a_in_tensor_memory: bool
    scale_d: int


@lru_cache(maxsize=4096)
def _granules(part: Fragment, address: TensorAddress) -> np.ndarray:
    columns, lanes = fragments.touched(address, part)
    return np.unique(columns * GROUPS + lanes // GROUP_LANES)


class _Port:
    """A warp's loads or stores of tensor memory: they complete, in order, no later than the matching wait."""

    def __init__(self, machine, name: str, clocks: np.ndarray):
        self.machine = machine
        self.column = machine.columns.operation(name, clocks)
        self.deferred: list = []
        self.unwaited = False
        self.waited = 0

    def start(self, clocks: np.ndarray) -> np.ndarray:
        """The clock of a new access issued at ``clocks``."""
        columns = self.machine.columns
        columns.clock[self.column] += 1
        mine = clocks.copy()
        mine[ORDER, self.column] = columns.clock[self.column]
        return mine

    def wait(self, clocks: np.ndarray) -> None:
        """Completes all accesses; they happen before what comes after ``clocks``."""
        for work in self.deferred:
            work()
        self.deferred.clear()
        self.unwaited = False
        self.waited = int(self.machine.columns.clock[self.column])
        clocks[ORDER, self.column] = self.waited


class WarpTensor:
    """Uses ``machine``, ``cta``, ``index``, ``line``, ``clocks``, ``describe`` and ``tick`` of Warp.

    Under ``machine.tensor_fences`` accesses to tensor memory are ordered after another thread's only as far as the
    warp's last tcgen05.fence::after_thread_sync saw, and the warp publishes its own only at ::before_thread_sync:
    ``view`` is then a clock apart from ``clocks``.
    """

    _view: np.ndarray | None = None
    _loads: _Port | None = None
    _stores: _Port | None = None
    _core: TensorCore | None = None

    @property
    def view(self) -> np.ndarray:
        """The clock that accesses to tensor memory start from."""
        if not self.machine.tensor_fences:
            return self.clocks
        if self._view is None:
            self._view = np.zeros_like(self.clocks)
        return self._view

    # ---- allocation --------------------------------------------------------------------------------------------------
    def _whole(self, mask, what: str) -> None:
        if mask is not FULL and not mask.all():
            raise SyncError(f"{self.describe()}: {what} needs all 32 lanes, {int(mask.sum())} are active")

    def tensor_alloc_begin(self, address: int, columns: int, cta_group: int, mask):
        """tcgen05.alloc: returns None when done, or what to wait for (then call ``tensor_alloc_again``)."""
        self._whole(mask, "tcgen05.alloc")
        units = [unit_of(cta) for cta in group_of(self.cta, cta_group)]
        self._allocating = (address, columns, units)
        mine = unit_of(self.cta)
        if mine.memory.requested is not None:
            raise SyncError(f"{self.describe()}: tcgen05.alloc while another warp of the CTA allocates")
        mine.memory.requested = columns
        mine.memory.granted = None
        return self.tensor_alloc_again()

    def tensor_alloc_again(self):
        address, columns, units = self._allocating
        mine = unit_of(self.cta)
        if mine.memory.granted is None:
            wanted = [unit.memory.requested for unit in units]
            if None in wanted:
                return mine.waiting
            if set(wanted) != {columns}:
                raise SyncError(f"{self.describe()}: the CTAs of the pair allocate {wanted} columns")
            starts = [unit.memory.find_free(columns) for unit in units]
            if None in starts:
                return mine.waiting
            if len(set(starts)) != 1:
                raise SyncError(f"{self.describe()}: free columns of the pair's CTAs differ: {starts}")
            for unit in units:
                unit.memory.allocate(starts[0], columns)
                unit.memory.granted, unit.memory.requested = starts[0], None
                self.machine.changed(unit.waiting)
        join(self.clocks, mine.freed)
        join(self.view, mine.freed)
        self.st("shared", address, [mine.memory.granted], 4, FULL)
        return None

    def tensor_dealloc(self, address: int, columns: int, mask) -> None:
        """tcgen05.dealloc; accesses not ordered before it are races."""
        self._whole(mask, "tcgen05.dealloc")
        unit = unit_of(self.cta)
        unit.memory.deallocate(address, columns)
        if unit.shadow is not None:
            unit.shadow.write(slice(address * GROUPS, (address + columns) * GROUPS), self.generic, self.line)
        join(unit.freed, self.clocks)
        self.tick()
        self.machine.changed(unit.waiting)

    def tensor_relinquish(self, mask) -> None:
        """tcgen05.relinquish_alloc_permit."""
        self._whole(mask, "tcgen05.relinquish_alloc_permit")
        unit_of(self.cta).memory.may_allocate = False

    # ---- loads and stores --------------------------------------------------------------------------------------------
    def _port(self, which: str) -> _Port:
        port = getattr(self, which)
        if port is None:
            name = f"tensor-memory {which[1:]} of warp {self.index} of CTA {self.cta.ctaid}"
            port = _Port(self.machine, name, self.clocks)
            setattr(self, which, port)
            self.machine.tensor_columns.add(port.column)
        return port

    def _tensor_place(self, part: Fragment, address: int) -> tuple[TensorMemoryUnit, TensorAddress]:
        where = TensorAddress.decode(address)
        fragments.check_quarter(where, part.shape, self.index)
        return unit_of(self.cta), where

    def _defers(self) -> bool:
        adversary = self.machine.adversary
        return adversary.temperament != "orderly" and adversary.random.random() < 0.5

    def _at(self, line: int) -> str:
        return f"warp {self.index} of CTA {self.cta.ctaid} at PTX line {line}"

    def tensor_load(self, part: Fragment, address: int, at_once: bool, mask) -> np.ndarray:
        """tcgen05.ld: (registers, 32) uint32. The rows are filled now or, poisoned until then, at the wait.

        ``at_once``: the kernel uses loaded registers before the wait, so the load counts as complete when issued.
        """
        self._whole(mask, "tcgen05.ld")
        unit, where = self._tensor_place(part, address)
        port, line = self._port("_loads"), self.line
        clocks = port.start(self.view)
        self.machine.count("tmem_load_bytes", part.registers * 128)

        def perform() -> np.ndarray:
            if unit.shadow is not None:
                who = Accessor(port.column, clocks, GENERIC, lambda: self._at(line))
                unit.shadow.read(_granules(part, where), who, line)
            values, known = fragments.load(unit.memory, where, part)
            if not known.all():
                register, lane = np.argwhere(~known)[0]
                raise MemoryFault(
                    f"{self._at(line)}: tcgen05.ld reads column {where.column + part.columns[register, lane]}, lane "
                    f"{where.lane + part.lanes[register, lane]} of tensor memory, which nobody has written"
                )
            return values

        if at_once:
            values = perform()
            port.wait(self.view)
            return values
        port.unwaited = True
        if not self._defers():
            return perform()
        values = np.full((part.registers, 32), POISON, np.uint32)
        port.deferred.append(lambda: np.copyto(values, perform()))
        return values

    def tensor_store(self, part: Fragment, address: int, registers: np.ndarray, mask) -> None:
        """tcgen05.st of (registers, 32) uint32."""
        self._whole(mask, "tcgen05.st")
        unit, where = self._tensor_place(part, address)
        port, line = self._port("_stores"), self.line
        clocks = port.start(self.view)
        port.unwaited = True
        self.machine.count("tmem_store_bytes", part.registers * 128)

        def perform() -> None:
            if unit.shadow is not None:
                who = Accessor(port.column, clocks, GENERIC, lambda: self._at(line))
                unit.shadow.write(_granules(part, where), who, line)
            fragments.store(unit.memory, where, part, registers)

        if self._defers():
            port.deferred.append(perform)
        else:
            perform()

    def tensor_wait(self, which: str, mask) -> None:
        """tcgen05.wait::ld or ::st (``which``)."""
        self._whole(mask, f"tcgen05.wait::{which}")
        port = self._loads if which == "ld" else self._stores
        if port is not None:
            port.wait(self.view)

    def tensor_fence(self, after: bool, mask) -> None:
        """tcgen05.fence::after_thread_sync (``after``) or ::before_thread_sync."""
        if not self.machine.tensor_fences:
            return
        ports = [port for port in (self._loads, self._stores) if port is not None]
        if after:
            own = {port.column for port in (*ports, self._core) if port is not None}
            if any(self.clocks[ORDER, c] > self.view[ORDER, c] for c in self.machine.tensor_columns - own):
                self.machine.effects.add(self.line)
            join(self.view, self.clocks)
        else:
            before = self.clocks.copy()
            for port in ports:
                if port.waited > self.clocks[ORDER, port.column]:
                    self.machine.effects.add(self.line)
                    self.clocks[ORDER, port.column] = port.waited
            self.note_fence(before, mask)

    def tensor_exit(self) -> None:
        """Raises SyncError when the warp ends with stores not waited for."""
        if self._stores is not None and self._stores.unwaited:
            raise SyncError(f"{self.describe()} exits with a tcgen05.st not waited for")
        for port in (self._loads, self._stores, self._core):
            if port is not None and not (port is self._core and port.queue):
                self.machine.columns.done(port.column)

    # ---- the tensor core ---------------------------------------------------------------------------------------------
    def _issue(self, what: str, work, mask) -> None:
        if int(mask.sum()) != 1:
            raise SyncError(
                f"{self.describe()}: {what} issued by {int(mask.sum())} threads of the warp, one is meant to"
            )
        if self._core is None:
            self._core = TensorCore(self.machine, f"warp {self.index} of CTA {self.cta.ctaid}", self.clocks)
            self.machine.tensor_columns.add(self._core.column)
        self._core.issue(work, self.line, self.clocks, self.view)
        self.tick()

    def tensor_mma(self, form: MmaForm, d: int, a: int, b: int, instruction: int, accumulate, disabled: tuple, mask):
        """tcgen05.mma. ``disabled``: 32-bit words of the disable-output-lane vector."""
        group = form.cta_group
        ctas = group_of(self.cta, group)
        if ctas[0] is not self.cta:
            raise SyncError(f"{self.describe()}: tcgen05.mma.cta_group::2 issued in the odd CTA of a pair")
        request = MmaRequest(
            decode_instruction(instruction, form.kind, group),
            group,
            TensorAddress.decode(d),
            TensorAddress.decode(a) if form.a_in_tensor_memory else decode_shared(a),
            decode_shared(b),
            bool(accumulate),
            form.scale_d,
            sum(word << 32 * i for i, word in enumerate(disabled)),
        )
        request.check_lanes()
        self._issue("tcgen05.mma", lambda core: core.multiply(request, ctas), mask)

    def tensor_copy(self, form: CopyShape, cta_group: int, address: int, source: int, mask) -> None:
        """tcgen05.cp."""
        where, descriptor = TensorAddress.decode(address), decode_shared(source)
        ctas = group_of(self.cta, cta_group)
        self._issue("tcgen05.cp", lambda core: core.copy(form, where, descriptor, ctas), mask)

    def tensor_commit(self, address: int, cta_mask: int | None, mask) -> None:
        """tcgen05.commit: one arrival at ``address``, or at the same offset of every CTA in ``cta_mask``."""
        cta, offset = self._barrier_place(address)
        cluster = self.cta.cluster
        if cta_mask is None:
            targets = [(cta, offset)]
        else:
            if cta_mask >> len(cluster) or not cta_mask:
                raise SyncError(f"{self.describe()}: tcgen05.commit to CTA mask {cta_mask:#x} of {len(cluster)} CTAs")
            targets = [(other, offset) for rank, other in enumerate(cluster) if cta_mask >> rank & 1]
        self._issue("tcgen05.commit", lambda core: core.commit(targets), mask)


__all__ = ["COLUMNS", "MmaForm", "WarpTensor"]
