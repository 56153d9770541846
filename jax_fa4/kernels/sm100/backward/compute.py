"""(DSL) A compute warpgroup: one thread per key, half of the query rows of a block at a time.

Data flow per step::

    stat.full, s.full -> scores of a key with 64 query rows, tensor memory to registers
                         P = exp2(S scale log2 e - lse2), hidden pairs 0
                         16-bit P over S                                         -> p.full
    dp.full           -> dS = P (dP - delta), in float32
                         16-bit dS over dP, and to shared memory                 -> ds.full, stat.empty

Row statistics are the same for all threads of a warp: broadcast reads of shared memory. Rows without probability
(beyond the query length, or without a visible key) have lse2 = +inf, so that P is exactly 0 there.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_

from jax_fa4.kernels.common.ptx import exp2, pack_pair
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.config import (
    BOX_BYTES,
    BOX_ROW_BYTES,
    HALF,
    KEYS,
    STAT_BYTES,
    STAT_STAGES,
)
from jax_fa4.kernels.sm100.backward.context import Context
from jax_fa4.kernels.sm100.backward.work import stage_of

CHUNK = 32
"""Query rows whose scores are in registers as loaded at a time."""

MINUS_ONE = (Float32(-1.0), Float32(-1.0))

BIT = [*(1 << i for i in range(31)), -(1 << 31)]
"""Single bits as signed 32-bit values."""


class ComputeRole:
    """``group`` (DSL integer) says which half of the query rows this warpgroup has."""

    def __init__(self, context: Context, group: Int32):
        self.c = context
        self.group = group
        thread = cute.arch.thread_idx()[0]
        self.key = thread & (KEYS - 1)
        self.lane0 = Boolean((thread & 31) == 0)
        # A warp reaches the 32 lanes of tensor memory that its number modulo 4 names.
        self.lanes = ((self.key & ~31) << tmem.LANE_SHIFT) + group * HALF
        # This key's row in this half's box of dS.
        self.row = context.base + context.shared.dscore + group * BOX_BYTES + self.key * BOX_ROW_BYTES
        self.swizzle = (self.key & 7) << 4

    @cute.jit
    def run(self):
        c = self.c
        head, m = c.work.first()
        for i in cutlass.range(c.work.steps, unroll=1):
            self.step(i, m)
            head, m = c.work.next(head, m)

    @cute.jit
    def step(self, i, m):
        """One block of query rows."""
        c = self.c
        stage, use = stage_of(i, STAT_STAGES)
        stat = c.stat(stage) + self.group * (HALF * 4)
        low, high = c.work.mask_ranges.row_bounds(c.work.key_block * KEYS + self.key, m)
        low, high = low - self.group * HALF, high - self.group * HALF
        masked = c.work.mask_ranges.needs_mask(m, c.work.key_block)
        c.edges.stat.wait_full(stage, use)
        c.edges.s.wait_full(0, i)
        ptx.tmem_fence_after()
        probability = []
        for first in cutlass.range_constexpr(0, HALF, CHUNK):
            p = ptx.tmem_load(self.lanes + (tmem.SCORES + first), CHUNK)
            p = self.probabilities(p, stat + first * 4, masked, low - first, high - first)
            ptx.tmem_store(self.lanes + (tmem.SCORES + first // 2), self.packed(p))
            probability += p
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive(c.edges.p.full(0))

        c.edges.dp.wait_full(0, i)
        ptx.tmem_fence_after()
        for first in cutlass.range_constexpr(0, HALF, CHUNK):
            d = ptx.tmem_load(self.lanes + (tmem.DPROBABILITIES + first), CHUNK)
            packed = self.packed(self.dscores(d, probability[first : first + CHUNK], stat + first * 4))
            ptx.tmem_store(self.lanes + (tmem.DPROBABILITIES + first // 2), packed)
            for j in cutlass.range_constexpr(0, CHUNK // 2, 4):
                address = self.row + (((first + 2 * j) * 2) ^ self.swizzle)
                ptx.store_shared_vector(address, packed[j : j + 4])
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        ptx.fence_async_shared()
        self.arrive(c.edges.ds.full(0))
        self.arrive(c.edges.stat.empty(stage))

    @cute.jit
    def probabilities(self, scores, stat, masked, low, high):
        """P of a key with the rows of ``scores``. ``stat``: address of their statistics; only rows from ``low`` to
        ``high``, counted from the first of them, see the key where the block is ``masked``."""
        p = list(scores)
        negative_scale = (-self.c.scale_log2, -self.c.scale_log2)
        for j in cutlass.range_constexpr(0, len(p), 4):
            lse2 = ptx.load_shared_floats(stat + j * 4)
            for k in cutlass.range_constexpr(0, 4, 2):
                # The negation is free in the exponential, and not in a packed instruction.
                x = ptx.fma2((p[j + k], p[j + k + 1]), negative_scale, (lse2[k], lse2[k + 1]))
                p[j + k], p[j + k + 1] = exp2(-x[0]), exp2(-x[1])
        if masked:
            visible = ptx.low_mask(high) & ~ptx.low_mask(low)
            for j in cutlass.range_constexpr(len(p)):
                p[j] = select_((visible & BIT[j]) != 0, p[j], Float32(0.0))
        return p

    def dscores(self, dprobability: list, probability: list, stat) -> list:
        """dS of a key with the rows of ``dprobability``; ``stat``: address of their statistics."""
        d = list(dprobability)
        for j in range(0, len(d), 4):
            delta = ptx.load_shared_floats(stat + (STAT_BYTES + j * 4))
            for k in range(j, j + 4, 2):
                x = ptx.fma2((delta[k - j], delta[k - j + 1]), MINUS_ONE, (d[k], d[k + 1]))
                d[k], d[k + 1] = ptx.mul2((probability[k], probability[k + 1]), x)
        return d

    def packed(self, values: list) -> list:
        """Pairs of values as 16-bit numbers."""
        return [pack_pair(values[j], values[j + 1], self.c.element) for j in range(0, len(values), 2)]

    @cute.jit
    def arrive(self, barrier):
        """One arrival for the warp after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive(barrier)
