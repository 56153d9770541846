"""(DSL) A compute warpgroup: one thread per resident row, half of the streamed rows of a step.

Data flow per step::

    s.full  -> scores, tensor memory to registers; P = exp2(S scale log2 e - lse2), hidden pairs 0
               key_value side: 16-bit P over S                                  -> p.full
    dp.full -> dS = P (dP - delta), 16 bits over dP                             -> ds.full (and stat.empty)

On the key_value side the row statistics belong to columns and come through shared memory (the same for all threads of a
warp); on the query side they belong to this thread's row and stay in registers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_

from jax_fa4.kernels.common.ptx import exp2, pack_pair
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.compute import BIT, MINUS_ONE
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.backward_split import maps
from jax_fa4.kernels.sm100.backward_split.config import HALF, RESIDENT, STAT_BYTES, STAT_STAGES
from jax_fa4.kernels.sm100.backward_split.context import Context


class ComputeRole:
    """``group`` (DSL integer) says which half of the streamed rows this warpgroup has."""

    def __init__(self, context: Context, group: Int32):
        self.c = context
        self.group = group
        thread = cute.arch.thread_idx()[0]
        self.row = thread & (RESIDENT - 1)
        self.lane0 = Boolean((thread & 31) == 0)
        self.lanes = ((self.row & ~31) << maps.LANE_SHIFT) + group * HALF

    @cute.jit
    def run(self):
        c = self.c
        position = c.work.block * RESIDENT + self.row
        lse2, delta = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(not c.config.key_side):
            offset = c.work.statistic(c.work.head, position)
            lse2 = ptx.load_global_float(c.lse2 + offset)
            delta = ptx.load_global_float(c.delta + offset)
        head, block = c.work.first()
        for i in cutlass.range(c.work.steps, unroll=1):
            self.step(i, block, position, lse2, delta)
            head, block = c.work.next(head, block)

    @cute.jit
    def step(self, i, block, position, row_lse2, row_delta):
        """One streamed block. ``row_lse2``, ``row_delta``: of this thread's row, on the query side."""
        c = self.c
        config = c.config
        stage, use = stage_of(i, STAT_STAGES)
        stat = c.stat(stage) + self.group * (HALF * 4)
        if cutlass.const_expr(config.key_side):
            low, high = c.work.ranges.row_bounds(position, block)
            masked = c.work.ranges.needs_mask(block, c.work.block)
            c.edges.stat.wait_full(stage, use)
        else:
            low, high = c.work.ranges.column_bounds(position, block)
            masked = c.work.ranges.needs_mask(c.work.block, block)
        low, high = low - self.group * HALF, high - self.group * HALF
        c.edges.s.wait_full(0, i)
        ptx.tmem_fence_after()
        negative_scale = (-c.scale_log2, -c.scale_log2)
        p = ptx.tmem_load(self.lanes + maps.SCORES, HALF)
        lse2 = [row_lse2] * 4
        for j in cutlass.range_constexpr(0, HALF, 4):
            if cutlass.const_expr(config.key_side):
                lse2 = ptx.load_shared_floats(stat + j * 4)
            for k in cutlass.range_constexpr(0, 4, 2):
                # The negation is free in the exponential, and not in a packed instruction.
                x = ptx.fma2((p[j + k], p[j + k + 1]), negative_scale, (lse2[k], lse2[k + 1]))
                p[j + k], p[j + k + 1] = exp2(-x[0]), exp2(-x[1])
        if masked:
            visible = ptx.low_mask(high) & ~ptx.low_mask(low)
            for j in cutlass.range_constexpr(HALF):
                p[j] = select_((visible & BIT[j]) != 0, p[j], Float32(0.0))
        if cutlass.const_expr(config.key_side):
            ptx.tmem_store(self.lanes + maps.SCORES, [pack_pair(p[j], p[j + 1], c.element) for j in range(0, HALF, 2)])
            ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive(c.edges.p.full(0))

        c.edges.dp.wait_full(0, i)
        ptx.tmem_fence_after()
        d = ptx.tmem_load(self.lanes + maps.DPROBABILITIES, HALF)
        delta = [row_delta] * 4
        for j in cutlass.range_constexpr(0, HALF, 4):
            if cutlass.const_expr(config.key_side):
                delta = ptx.load_shared_floats(stat + (STAT_BYTES + j * 4))
            for k in cutlass.range_constexpr(0, 4, 2):
                x = ptx.fma2((delta[k], delta[k + 1]), MINUS_ONE, (d[j + k], d[j + k + 1]))
                d[j + k], d[j + k + 1] = ptx.mul2((p[j + k], p[j + k + 1]), x)
        packed = [pack_pair(d[j], d[j + 1], c.element) for j in range(0, HALF, 2)]
        ptx.tmem_store(self.lanes + maps.DPROBABILITIES, packed)
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive(c.edges.ds.full(0))
        if cutlass.const_expr(config.key_side):
            self.arrive(c.edges.stat.empty(stage))

    @cute.jit
    def arrive(self, barrier):
        """One arrival for the warp after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive(barrier)
