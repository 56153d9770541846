"""Tensor memory (TMEM) of one CTA: 128 lanes x 512 columns of 32-bit words, with poison and an allocation map.

Words are kept column-major (``words[column, lane]``): the .32x32b loads, one register per column, and the
accumulator rows of an MMA, one lane per row, are then contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.emulator.errors import EmulatorError

LANES = 128
COLUMNS = 512
MIN_ALLOCATION = 32
# A NaN as float32, as two bfloat16 and as two float16.
POISON = np.uint32(0x7FFF7FFF)


class TensorMemoryError(EmulatorError):
    """A use of tensor memory that hardware leaves undefined, or that leaks columns."""


@dataclass(frozen=True)
class TensorAddress:
    """A TMEM address: lane in bits 31..16, column in bits 15..0."""

    lane: int
    column: int

    @classmethod
    def decode(cls, address: int) -> TensorAddress:
        """Splits a 32-bit ``address``; raises TensorMemoryError outside the 128 x 512 array."""
        lane, column = (address >> 16) & 0xFFFF, address & 0xFFFF
        if lane >= LANES or column >= COLUMNS:
            raise TensorMemoryError(f"TMEM address {address:#010x} (lane {lane}, column {column}) is out of range")
        return cls(lane, column)


class TensorMemory:
    """State of one CTA's tensor memory."""

    def __init__(self) -> None:
        self.words = np.full((COLUMNS, LANES), POISON, np.uint32)
        self.written = np.zeros((COLUMNS, LANES), bool)
        self.owned = np.zeros(COLUMNS, bool)
        self.allocations: dict[int, int] = {}
        self.may_allocate = True
        # An allocation under way: columns asked for, and the column granted to it.
        self.requested: int | None = None
        self.granted: int | None = None

    def find_free(self, columns: int) -> int | None:
        """First free, size-aligned run of ``columns``; None when the caller has to wait.

        Raises TensorMemoryError for a size that is no power of two in 32..512, or after the permit was given up.
        """
        if columns < MIN_ALLOCATION or columns > COLUMNS or columns & (columns - 1):
            raise TensorMemoryError(f"tcgen05.alloc of {columns} columns: a power of two in 32..512 is required")
        if not self.may_allocate:
            raise TensorMemoryError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for start in range(0, COLUMNS, columns):
            if not self.owned[start : start + columns].any():
                return start
        return None

    def allocate(self, start: int, columns: int) -> None:
        """Takes the free run that ``find_free`` returned; its words become poison."""
        self.allocations[start] = columns
        self.owned[start : start + columns] = True
        self._poison(start, columns)

    def deallocate(self, address: int, columns: int) -> None:
        """Frees an allocation; raises TensorMemoryError unless ``address`` and ``columns`` match one exactly."""
        if self.allocations.get(address) != columns:
            raise TensorMemoryError(
                f"tcgen05.dealloc of {columns} columns at {address:#x} matches none of {self.allocations}"
            )
        del self.allocations[address]
        self.owned[address : address + columns] = False
        self._poison(address, columns)

    def check_exit(self) -> None:
        """Raises TensorMemoryError when a CTA ends with columns still allocated."""
        if self.allocations:
            raise TensorMemoryError(f"TMEM leak: allocations {self.allocations} (column: count) left at CTA exit")

    def check_owned(self, first: int, stop: int, what: str) -> None:
        """Raises TensorMemoryError unless every column of [first, stop) is allocated."""
        if stop > COLUMNS or not self.owned[first:stop].all():
            raise TensorMemoryError(f"{what}: columns {first}..{stop - 1} are not all allocated ({self.allocations})")

    def _poison(self, start: int, columns: int) -> None:
        self.words[start : start + columns] = POISON
        self.written[start : start + columns] = False
