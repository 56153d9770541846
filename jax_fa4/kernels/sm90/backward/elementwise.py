"""Elementwise parts on transposed score tiles (keys are rows): P, dS, and the row statistics they need."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def probabilities(c: Any, work: Any, score: cute.Tensor, lse2: cute.Tensor, m: Int32, row: Int32, scale_log2):
    """score becomes P = exp2(score * scale_log2 - lse2), hidden pairs 0. ``row`` is the thread's first key."""
    column = (cute.arch.lane_idx() % 4) * 2
    for j in cutlass.range_constexpr(c.tile_m // 8):
        pair = column_pair(lse2, j)
        for i in cutlass.range_constexpr(4):
            score[4 * j + i] = cute.math.exp2(score[4 * j + i] * scale_log2 - pair[i % 2], fastmath=True)
    if work.ranges.needs_mask(m, work.key_block):
        for r in cutlass.range_constexpr(2):
            low, high = work.ranges.row_bounds(row + 8 * r, m)
            low, high = low - column, high - column
            for j in cutlass.range_constexpr(c.tile_m // 8):
                for i in cutlass.range_constexpr(2):
                    seen = (8 * j + i >= low) & (8 * j + i < high)
                    kept = score[4 * j + 2 * r + i]
                    score[4 * j + 2 * r + i] = kept if seen else Float32(0)


@cute.jit
def score_gradients(c: Any, probability: cute.Tensor, dprobability: cute.Tensor, delta: cute.Tensor):
    """dprobability becomes dS = P (dP - delta)."""
    for j in cutlass.range_constexpr(c.tile_m // 8):
        pair = column_pair(delta, j)
        for i in cutlass.range_constexpr(4):
            k = 4 * j + i
            dprobability[k] = probability[k] * (dprobability[k] - pair[i % 2])


def row_statistics(c: Any, values: cute.Tensor) -> cute.Tensor:
    """The thread's share of one block of lse2 or delta in shared memory: columns 8 j + 2 (lane % 4) + i as [i, j]."""
    start = (values.iterator + (cute.arch.lane_idx() % 4) * 2).align(8)
    return cute.make_tensor(start, cute.make_layout((2, c.tile_m // 8), stride=(1, 8)))


def column_pair(statistics: cute.Tensor, j: int) -> cute.Tensor:
    """Columns of one 8-column group, loaded where they are used: all of them at once would not fit the registers."""
    pair = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(statistics[None, j], pair)
    return pair
