"""(DSL) The affine mask for one thread's query row, as bits.

A row sees the keys ``low <= j < high``. Within a block these are two bit masks per 32 keys, built from counts that are
clamped to 0..32 first, so that no shift is as long as a register. A block that no row of the tile has cut needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, const_expr

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import KEYS
from jax_fa4.kernels.sm100.forward.work import Problem, Tile


@dataclass(frozen=True)
class RowMask(Invariant):
    """Bounds of one row, and the tightest bounds over all rows of its tile: those decide whether a block is cut at all.

    ``low`` is None where the mask has no left bound.
    """

    high: Int32
    high_min: Int32
    low: Int32 | None = None
    low_max: Int32 | None = None

    @classmethod
    def of(cls, problem: Problem, tile: Tile, stage, row: Int32) -> RowMask:
        """Mask of row ``row`` of a stage's tile."""
        mask, lengths = problem.config.mask, tile.lengths
        if const_expr(mask == "none"):
            return cls(lengths.kv_len, lengths.kv_len)
        first = problem.first_token(tile, stage) + lengths.offset
        position = problem.locate(tile, stage, row)[0] + lengths.offset
        right = lengths.right if const_expr(mask == "window") else 0
        high = cutlass.min(lengths.kv_len, position + right + 1)
        high_min = cutlass.min(lengths.kv_len, first + right + 1)
        if const_expr(mask == "causal"):
            return cls(high, high_min)
        last = first + problem.box_tokens
        return cls(high, high_min, position - lengths.left, last - lengths.left)

    def cuts(self, block: Int32) -> Boolean:
        """Whether some row of the tile does not see all of the block (the same for all threads)."""
        cut = Boolean((block + 1) * KEYS > self.high_min)
        if self.low is not None:
            cut = cut | Boolean(block * KEYS < self.low_max)
        return cut

    def visible(self, block: Int32) -> list[Int32]:
        """One word per 32 keys of the block; bit i set: key i of the 32 is visible."""
        words = []
        for first in range(0, KEYS, 32):
            start = block * KEYS + first
            word = ptx.low_mask(self.high - start)
            if self.low is not None:
                word = word & ~ptx.low_mask(self.low - start)
            words.append(word)
        return words
