"""Which TMEM word each register of each thread holds, for the shapes of tcgen05.ld and tcgen05.st.

Source: PTX ISA, "Data Movement Shape" (tcgen05), and the register layouts that CuTe's copy traits state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .tmem import COLUMNS, TensorAddress, TensorMemory, TensorMemoryError

WARP = 32
# shape -> (lanes touched, 32-bit columns per repetition, registers per repetition, largest repetition)
SHAPES = {
    "32x32b": (32, 1, 1, 128),
    "16x64b": (16, 2, 1, 128),
    "16x128b": (16, 4, 2, 64),
    "16x256b": (16, 8, 4, 32),
    "16x32bx2": (16, 1, 1, 128),
}


@dataclass(frozen=True, eq=False)
class Fragment:
    """Words of one tcgen05.ld/st, relative to its address. One object per form (``fragment``), hashed by identity.

    lanes, columns: int arrays (registers, 32 threads). columns_low is the first column of each register, and with
    ``packed`` the register holds the low halves of that column and the next.
    """

    shape: str
    num: int
    packed: bool
    half_split: int
    lanes: np.ndarray
    columns: np.ndarray

    @property
    def registers(self) -> int:
        """Number of 32-bit registers per thread."""
        return self.lanes.shape[0]

    @property
    def lane_count(self) -> int:
        """Lanes the instruction touches: 16 or 32."""
        return SHAPES[self.shape][0]

    @property
    def column_extent(self) -> int:
        """One past the highest relative column touched."""
        return int(self.columns.max()) + 1 + int(self.packed)


@cache
def fragment(shape: str, num: int, packed: bool = False, half_split: int = 0) -> Fragment:
    """The fragment of ``.shape.xnum``; ``half_split`` is the immediate of .16x32bx2 (columns).

    Raises TensorMemoryError for a shape or repetition that the ISA does not have.
    """
    if shape not in SHAPES:
        raise TensorMemoryError(f"tcgen05.ld/st shape .{shape} is unknown: one of {sorted(SHAPES)}")
    _, _, per_repetition, largest = SHAPES[shape]
    if num < 1 or num > largest or num & (num - 1):
        raise TensorMemoryError(f"tcgen05.ld/st .{shape}.x{num}: repetition must be a power of two up to {largest}")
    register = np.arange(num * per_repetition)[:, None]
    thread = np.arange(WARP)[None, :]
    if shape == "32x32b":
        lanes, columns = thread + 0 * register, register + 0 * thread
    elif shape == "16x64b":
        lanes = (thread >> 2) + 8 * (thread & 1) + 0 * register
        columns = ((thread >> 1) & 1) + 2 * register
    elif shape == "16x128b":
        lanes = (thread >> 2) + 8 * (register & 1)
        columns = (thread & 3) + 4 * (register >> 1)
    elif shape == "16x256b":
        lanes = (thread >> 2) + 8 * ((register >> 1) & 1)
        columns = 2 * (thread & 3) + (register & 1) + 8 * (register >> 2)
    else:
        lanes = (thread & 15) + 0 * register
        columns = register * (1 + packed) + half_split * (thread >> 4)
        return Fragment(shape, num, packed, half_split, lanes, columns)
    return Fragment(shape, num, packed, half_split, lanes, columns * (1 + packed))


def check_quarter(address: TensorAddress, shape: str, warp: int) -> None:
    """A warp reaches only the 32 lanes of its quarter (warp index modulo 4), 16-lane shapes either half of them.

    Raises TensorMemoryError otherwise.
    """
    first = 32 * (warp % 4)
    allowed = (first,) if shape == "32x32b" else (first, first + 16)
    if address.lane not in allowed:
        raise TensorMemoryError(
            f"tcgen05.ld/st .{shape} by warp {warp}: lane {address.lane} given, only {allowed} can be reached"
        )


def load(memory: TensorMemory, address: TensorAddress, part: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """Registers (registers, 32) uint32 and, alike, whether every word behind them had been written."""
    memory.check_owned(address.column, address.column + part.column_extent, f"tcgen05.ld .{part.shape}.x{part.num}")
    if part.shape == "32x32b" and not part.packed:
        window = (
            slice(address.column, address.column + part.num),
            slice(address.lane, address.lane + WARP),
        )
        return memory.words[window].copy(), memory.written[window]
    lanes, columns = part.lanes + address.lane, part.columns + address.column
    if not part.packed:
        return memory.words[columns, lanes], memory.written[columns, lanes]
    low, high = memory.words[columns, lanes], memory.words[columns + 1, lanes]
    known = memory.written[columns, lanes] & memory.written[columns + 1, lanes]
    return (low & 0xFFFF) | (high << np.uint32(16)), known


def store(memory: TensorMemory, address: TensorAddress, part: Fragment, registers: np.ndarray) -> None:
    """Writes ``registers`` (registers, 32) uint32; with unpacking, the upper half of each column becomes zero."""
    memory.check_owned(address.column, address.column + part.column_extent, f"tcgen05.st .{part.shape}.x{part.num}")
    if part.shape == "32x32b" and not part.packed:
        window = (
            slice(address.column, address.column + part.num),
            slice(address.lane, address.lane + WARP),
        )
        memory.words[window] = registers
        memory.written[window] = True
        return
    lanes, columns = part.lanes + address.lane, part.columns + address.column
    if not part.packed:
        memory.words[columns, lanes] = registers
        memory.written[columns, lanes] = True
        return
    memory.words[columns, lanes] = registers & 0xFFFF
    memory.words[columns + 1, lanes] = registers >> np.uint32(16)
    memory.written[columns, lanes] = True
    memory.written[columns + 1, lanes] = True


def touched(address: TensorAddress, part: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (columns, lanes) index arrays of the words an access touches, for the race detector."""
    columns, lanes = part.columns + address.column, part.lanes + address.lane
    if part.packed:
        columns, lanes = np.concatenate([columns, columns + 1]), np.concatenate([lanes, lanes])
    if columns.max() >= COLUMNS:
        raise TensorMemoryError(f"tcgen05.ld/st .{part.shape}.x{part.num} runs past column {COLUMNS - 1}")
    return columns.ravel(), lanes.ravel()
