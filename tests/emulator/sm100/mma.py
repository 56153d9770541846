"""tcgen05.mma: operands from shared or tensor memory, product, and the TMEM data paths of the result.

Source: PTX ISA, "Matrix and data movement shapes" and "Data path layout organization" of tcgen05.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .descriptors import (
    ELEMENT_BYTES,
    InstructionDescriptor,
    OperandChunks,
    SharedDescriptor,
    operand_chunks,
)
from .tmem import LANES, TensorAddress, TensorMemory, TensorMemoryError


@dataclass(frozen=True)
class DataPath:
    """Where one CTA's part of D (or a TMEM operand A) lies.

    lanes: slice or index array relative to the address's lane, in the order of the CTA's rows. column_halves: 1, or 2
    when lanes 0..63 hold the first half of N and lanes 64..127 the second half of the same 64 rows.
    """

    rows: int
    lanes: slice | np.ndarray
    column_halves: int


_M64_LANES = np.arange(64) % 16 + 32 * (np.arange(64) // 16)


def data_path(m: int, cta_group: int) -> DataPath:
    """The data path of an M=``m`` MMA in each of its CTAs."""
    if cta_group == 1:
        return DataPath(m, slice(0, LANES) if m == LANES else _M64_LANES, 1)
    return DataPath(m // 2, slice(0, LANES), 1 if m == 2 * LANES else 2)


@dataclass(frozen=True)
class MmaRequest:
    """One decoded tcgen05.mma. ``a`` is a SharedDescriptor, or a TensorAddress for an operand in tensor memory."""

    instruction: InstructionDescriptor
    cta_group: int
    d: TensorAddress
    a: SharedDescriptor | TensorAddress
    b: SharedDescriptor
    accumulate: bool
    scale_d: int = 0
    disabled_lanes: int = 0

    @property
    def flop(self) -> int:
        """Multiplications and additions, two per term."""
        step = self.instruction
        return 2 * step.m * step.n * step.k

    @property
    def d_columns(self) -> int:
        """Columns of D in each CTA."""
        return self.instruction.n // data_path(self.instruction.m, self.cta_group).column_halves

    @property
    def a_columns(self) -> int:
        """Columns of a TMEM operand A: 16-bit elements lie two to a column."""
        return self.instruction.k * ELEMENT_BYTES[self.instruction.kind] // 4

    def a_chunks(self) -> tuple[int, OperandChunks]:
        """Chunks of A in each CTA's shared memory (operand_chunks); only when A lies there."""
        rows = data_path(self.instruction.m, self.cta_group).rows
        step = self.instruction
        return operand_chunks(self.a, rows, step.k, ELEMENT_BYTES[step.kind], step.a_mn_major)

    def b_chunks(self) -> tuple[int, OperandChunks]:
        """Chunks of B in each CTA's shared memory: N / cta_group rows of it."""
        step = self.instruction
        return operand_chunks(self.b, step.n // self.cta_group, step.k, ELEMENT_BYTES[step.kind], step.b_mn_major)

    def check_lanes(self) -> None:
        """Raises TensorMemoryError when D's (or a TMEM A's) lane does not fit the data path."""
        allowed = (0, 16) if self.instruction.m == 64 else (0,)
        for name, address in (("D", self.d), ("A", self.a)):
            if isinstance(address, TensorAddress) and address.lane not in allowed:
                raise TensorMemoryError(
                    f"tcgen05.mma {name} at lane {address.lane}: M={self.instruction.m} allows {allowed}"
                )
        if isinstance(self.a, TensorAddress) and self.a.lane != self.d.lane:
            raise TensorMemoryError(f"tcgen05.mma A at lane {self.a.lane} and D at lane {self.d.lane} differ")


def to_float32(raw: np.ndarray, name: str) -> np.ndarray:
    """float32 values of raw 16-bit (uint16) or tf32 (uint32) elements; any shape."""
    if name == "bf16":
        wide = np.zeros((*raw.shape, 2), np.uint16)
        wide[..., 1] = raw
        return wide.view(np.float32)[..., 0]
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)


def shared_operand(
    shared: np.ndarray, base: int, chunks: OperandChunks, itemsize: int, mn_major: bool, name: str
) -> np.ndarray:
    """Reads an operand, (rows, K) float32, from a CTA's shared memory.

    ``shared``: the CTA's shared window as complex128 (16-byte items). Raises TensorMemoryError past its end.
    """
    first = base // 16
    if first + chunks.stop > shared.size:
        raise TensorMemoryError(f"matrix descriptor reads past the end of shared memory ({shared.size * 16} bytes)")
    gathered = shared[first : first + chunks.stop].take(chunks.index)
    raw = gathered.view(np.uint16 if itemsize == 2 else np.uint32)
    if mn_major:
        blocks, k = chunks.index.shape
        raw = raw.reshape(blocks, k, 16 // itemsize).transpose(0, 2, 1).reshape(-1, k)
    return to_float32(np.ascontiguousarray(raw), name)


def tensor_operand(memory: TensorMemory, request: MmaRequest) -> np.ndarray:
    """Reads A, (128 or 64 lanes, K) float32, from tensor memory; one row per lane of the data path."""
    path, step = data_path(request.instruction.m, request.cta_group), request.instruction
    first, stop = request.a.column, request.a.column + request.a_columns
    memory.check_owned(first, stop, "tcgen05.mma A")
    lanes = _lanes(path, request.a.lane)
    if not memory.written[first:stop, lanes].all():
        raise TensorMemoryError(f"tcgen05.mma reads unwritten A in TMEM columns {first}..{stop - 1}")
    words = np.ascontiguousarray(memory.words[first:stop, lanes].T)
    raw = words.view(np.uint16) if ELEMENT_BYTES[step.kind] == 2 else words
    return to_float32(raw, step.a_format)


def _lanes(path: DataPath, lane: int) -> slice | np.ndarray:
    return path.lanes if isinstance(path.lanes, slice) else path.lanes + lane


# BLAS libraries split larger products among threads, which costs more than it gains and is slow on a busy machine.
_SINGLE_THREAD = 1 << 18


def _product(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """b (n, k) times a (m, k) transposed: (n, m) float32, in pieces that BLAS keeps on one thread."""
    n, k = b.shape
    step = max(1, _SINGLE_THREAD // (a.shape[0] * k))
    if n <= step:
        return b @ a.T
    out = np.empty((n, a.shape[0]), np.float32)
    for start in range(0, n, step):
        np.matmul(b[start : start + step], a.T, out=out[start : start + step])
    return out


def execute(request: MmaRequest, ctas: list[tuple[np.ndarray, TensorMemory]]) -> None:
    """Executes ``request`` on ``ctas``: per CTA, in rank order, its shared window (complex128) and tensor memory.

    The products of K terms are summed in float32 and added to D. Raises TensorMemoryError for unwritten D or A words,
    unallocated columns or addresses out of range.
    """
    step, path = request.instruction, data_path(request.instruction.m, request.cta_group)
    itemsize = ELEMENT_BYTES[step.kind]
    b_base, b_index = request.b_chunks()
    parts = [shared_operand(shared, b_base, b_index, itemsize, step.b_mn_major, step.b_format) for shared, _ in ctas]
    b = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if step.negate_b:
        b = -b
    for number, (shared, memory) in enumerate(ctas):
        if isinstance(request.a, TensorAddress):
            a = tensor_operand(memory, request)
        else:
            a_base, a_index = request.a_chunks()
            a = shared_operand(shared, a_base, a_index, itemsize, step.a_mn_major, step.a_format)
        if step.negate_a:
            a = -a
        disabled = request.disabled_lanes >> (LANES * number) & ((1 << LANES) - 1)
        if path.column_halves == 2:
            upper = a[64:] if a.shape[0] == LANES else a
            half = step.n // 2
            product = np.concatenate([_product(b[:half], a[:64]), _product(b[half:], upper)], axis=1)
        else:
            product = _product(b, a)
        _accumulate(request, memory, _lanes(path, request.d.lane), product, disabled)


def _accumulate(
    request: MmaRequest, memory: TensorMemory, lanes: slice | np.ndarray, product: np.ndarray, disabled: int
) -> None:
    first, stop = request.d.column, request.d.column + request.d_columns
    memory.check_owned(first, stop, "tcgen05.mma D")
    if disabled:
        every = np.arange(LANES)[lanes] if isinstance(lanes, slice) else lanes
        keep = np.array([not disabled >> int(lane) & 1 for lane in every])
        lanes, product = every[keep], product[:, keep]
    half = request.instruction.d_format == "f16"
    if request.accumulate:
        if not memory.written[first:stop, lanes].all():
            raise TensorMemoryError(f"tcgen05.mma accumulates onto unwritten D in TMEM columns {first}..{stop - 1}")
        old = memory.words[first:stop, lanes]
        before = (old & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32) if half else old.view(np.float32)
        product = product + (before * np.float32(2.0**-request.scale_d) if request.scale_d else before)
    words = product.astype(np.float16).view(np.uint16).astype(np.uint32) if half else product.view(np.uint32)
    memory.words[first:stop, lanes] = words
    memory.written[first:stop, lanes] = True
