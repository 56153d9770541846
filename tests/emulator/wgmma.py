"""wgmma (sm_90a): asynchronous matrix products of a warpgroup, one warp's 16 rows at a time.

A warp's rows of D depend on its own rows of A and on all of B, so every warp issues its own operation. The registers of
D become rows of one array that holds NaN from issue until the operation has run: code that reads them before
``wgmma.wait_group`` computes nonsense. The products of one warp run in order, at times that the adversary picks.
"""

from __future__ import annotations

import operator
import re

import numpy as np

from .accumulation import hopper_product
from .errors import UnsupportedError
from .lanes import f4
from .matrix import decode_wgmma, fetch, to_float
from .operations import Operation
from .race import ORDER
from .sync import AsyncAction

_SHAPE = re.compile(r"m64n(\d+)k16")


class Accumulator:
    """D of one warp: ``shown`` (registers, 32) is what the program sees, ``value`` (16, N) the true contents."""

    def __init__(self, registers: int):
        self.shown = np.full((registers, 32), np.nan, f4)
        self.rows = tuple(self.shown)
        self.value: np.ndarray | None = None
        self.pending = 0

    def load(self, registers: tuple) -> None:
        n = len(registers) * 2
        stacked = np.concatenate(registers).reshape(n // 8, 2, 2, 8, 4)  # (n block, half, pair, row, quad)
        self.value = np.ascontiguousarray(stacked.transpose(1, 3, 0, 4, 2)).reshape(16, n)

    def show(self) -> None:
        assert self.value is not None
        n = self.value.shape[1]
        self.shown[:] = self.value.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)


class Queue(AsyncAction):
    """The products of one warp in issue order, as one agent of the scheduler."""

    def __init__(self, warp):
        self.warp, self.operations, self.active = warp, [], False

    def add(self, operation) -> None:
        self.operations.append(operation)
        if not self.active:
            self.active = True
            self.warp.machine.start(self)

    def run(self) -> bool:
        operation = self.operations.pop(0)
        operation.execute()
        self.active = bool(self.operations)
        return not self.active

    def report(self) -> str:
        return self.operations[0].report() if self.operations else "wgmma queue"


class Product(Operation):
    """One ``wgmma.mma_async`` of one warp."""

    def __init__(self, warp, accumulator: Accumulator, n: int, a, b: int, keep: bool, scale_a: int, scale_b: int,
                 a_k_major: bool, b_k_major: bool, bf16: bool):  # fmt: skip
        super().__init__(warp, f"wgmma m64n{n}k16")
        self.accumulator, self.n, self.a, self.b, self.keep = accumulator, n, a, b, keep
        self.scale = scale_a * scale_b
        self.a_k_major, self.b_k_major, self.bf16 = a_k_major, b_k_major, bf16

    def _open(self, source: np.ndarray) -> tuple[np.ndarray, int]:
        """Products of one commit group share a column: they run in order and are waited for together."""
        group = self.warp.wgmma_groups.open
        if not group:
            return super()._open(source)
        clocks, column = source.copy(), group[-1].column
        clocks[ORDER, column] = self.machine.columns.clock[column]
        self.machine.columns.busy.add(column)
        return clocks, column

    def close(self) -> None:
        self.done = self.read_done = True
        if not any(other.column == self.column for other in self.warp.wgmma_queue.operations):
            self.machine.columns.done(self.column)

    def execute(self) -> None:
        shared = self.cta.shared
        if isinstance(self.a, int):
            descriptor, row = decode_wgmma(self.a), self.warp.index % 4
            if self.a_k_major:  # this warp's rows start two groups of eight rows further per warp
                descriptor = descriptor._replace(start=descriptor.start + 2 * row * descriptor.stride)
                a = fetch(shared, descriptor, 16, True, self.bf16, self.accessor, self.line)
            else:
                whole = fetch(shared, descriptor, 64, False, self.bf16, self.accessor, self.line)
                a = whole[16 * row : 16 * row + 16]
            self.machine.count("mma_shared_read", 16 * 16 * 2)
        else:
            a = from_registers(self.a, self.bf16)
        b = fetch(shared, decode_wgmma(self.b), self.n, self.b_k_major, self.bf16, self.accessor, self.line)
        if self.scale < 0:
            a = -a
        d = self.accumulator
        if self.machine.chip_products:
            d.value = hopper_product(a, b, d.value if self.keep else None)
        else:
            d.value = a @ b.T if not self.keep else d.value + a @ b.T
        d.pending -= 1
        if d.pending == 0:
            d.show()
        self.machine.count("mma_flop", 2 * 16 * self.n * 16)
        if self.warp.index % 4 == 0:  # B is read once for the four warps
            self.machine.count("mma_shared_read", self.n * 16 * 2)
        self.close()
        self.machine.changed(self.warp.wgmma_groups)


def from_registers(registers: tuple, bf16: bool) -> np.ndarray:
    """A from four uint32 registers: (16, 16) float32. Register i: rows +8 (i & 1), columns +8 (i >> 1)."""
    halves = (
        np.concatenate(registers).view(np.uint16).reshape(2, 2, 8, 4, 2)
    )  # (column half, row half, row, quad, pair)
    return to_float(np.ascontiguousarray(halves.transpose(1, 2, 0, 3, 4)).reshape(16, 16), bf16)


def issue(
    warp, shape: str, registers: tuple, a, b: int, keep: bool, immediates: tuple[int, ...], types: tuple[str, ...]
):
    """``wgmma.mma_async``. Returns the tuple of D registers (the same tuple when it already is the accumulator).

    ``a`` is a descriptor or a tuple of four uint32 registers; ``immediates`` are scale-a, scale-b and the transposes.
    """
    match = _SHAPE.fullmatch(shape)
    if match is None or types[0] != "f32" or types[1] not in ("bf16", "f16") or types[1] != types[2]:
        raise UnsupportedError(f"wgmma {shape} {types}")
    n = int(match.group(1))
    if n % 8 or not 8 <= n <= 256 or len(registers) != n // 2:
        raise UnsupportedError(f"wgmma {shape} with {len(registers)} accumulators")
    owner = getattr(warp, "accumulators", None)
    if owner is None:
        owner = warp.accumulators = {}
    found = owner.get(id(registers[0]))
    chained = found is not None and all(map(operator.is_, registers, found.rows))
    from_smem = isinstance(a, int)
    if not chained:
        found = Accumulator(len(registers))
        if keep:
            found.load(registers)
        for key in [k for k, v in owner.items() if not v.pending]:
            del owner[key]
        owner[id(found.rows[0])] = found
    found.shown.fill(np.nan)
    found.pending += 1
    scale_a, scale_b, *transposes = immediates
    a_k_major = not (from_smem and transposes and transposes[0])
    b_k_major = not (transposes and transposes[-1])
    operation = Product(warp, found, n, a, b, keep, scale_a, scale_b, a_k_major, b_k_major, types[1] == "bf16")
    warp.tick()
    if warp.wgmma_queue is None:
        warp.wgmma_queue = Queue(warp)
    warp.wgmma_queue.add(operation)
    warp.wgmma_groups.open.append(operation)
    return registers if chained else found.rows
