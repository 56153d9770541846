"""(DSL) A compute warpgroup of a CTA in a pair: one thread per key of the CTA, half of the query rows of a part.

Data flow per part::

    stat.full, s.full -> scores of a key with all its rows, tensor memory to registers    -> read.full (the leader's)
                         P = exp2(S scale log2 e - lse2), hidden pairs 0
                         16-bit P over S                                                  -> p.full (the leader's)
    dp.full           -> dS = P (dP - delta), in float32
                         16-bit dS over dP, and, after ds.empty, to shared memory:
                           the peer's rows                                                -> send.full
                           this CTA's rows
                                                                            -> ds.full (the leader's), stat.empty

All scores are read before the first probability is written. With one part to a block, the peer's rows are turned into
dS first, whichever half of the block they are; with two, all rows of a part are the peer's or this CTA's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.compute import ComputeRole
from jax_fa4.kernels.sm100.backward.config import BOX_ROW_BYTES, KEYS, STAT_STAGES
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.backward_pair import tmem
from jax_fa4.kernels.sm100.backward_pair.context import PairContext


class PairComputeRole(ComputeRole):
    """``group`` (DSL integer) says which rows of each half of a part this warpgroup has."""

    def __init__(self, context: PairContext, group: Int32):
        super().__init__(context, group)
        self.pair = context
        self.shape = context.shape
        self.lanes = (self.key & ~31) << tmem.LANE_SHIFT
        # The halves of a part. One part: the peer's rows, then this CTA's own.
        self.halves = (context.rank ^ 1, context.rank) if self.shape.parts == 1 else (Int32(0), Int32(1))
        self.row = self.key * BOX_ROW_BYTES
        self.swizzle = ((self.key & 7) << 4) ^ (group * (self.shape.group_rows * 2))

    @cute.jit
    def step(self, i, m):
        """One block of query rows."""
        for part in cutlass.range_constexpr(self.shape.parts):
            self.part(i, m, part)

    @cute.jit
    def part(self, i, m, part: cutlass.Constexpr):
        """One part of block ``m``, the ``i``-th one."""
        c, shape = self.pair, self.shape
        use = i * shape.parts + part
        stage, stat_use = stage_of(i, STAT_STAGES)
        low, high = c.work.mask_ranges.row_bounds(c.work.key_block * KEYS + self.key, m)
        masked = c.work.mask_ranges.needs_mask(m, c.work.key_block)
        # First row, within the part, of each half that this warpgroup has: columns of S and dP.
        first = [half * shape.own_rows + self.group * shape.group_rows for half in self.halves]
        before = part * shape.rows
        c.edges.stat.wait_full(stage, stat_use)
        c.edges.s.wait_full(0, use)
        ptx.tmem_fence_after()
        probability = ptx.tmem_load_each([self.lanes + (tmem.SCORES + f) for f in first], shape.group_rows)
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.read.full(0))
        for k in cutlass.range_constexpr(2):
            row = first[k] + before
            stat = c.stat(stage) + row * 4
            probability[k] = self.probabilities(probability[k], stat, masked, low - row, high - row)
            column = self.group * shape.group_rows + self.halves[k] * (shape.group_rows // 2)
            ptx.tmem_store(self.lanes + (tmem.SCORES + column), self.packed(probability[k]))
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.p.full(0))

        c.edges.dp.wait_full(0, use)
        ptx.tmem_fence_after()
        outgoing, own = c.base + c.shared.outgoing, c.dscore()
        for k in cutlass.range_constexpr(2):
            columns = self.lanes + (tmem.DPROBABILITIES + first[k])
            stat = c.stat(stage) + (first[k] + before) * 4
            d = ptx.tmem_load(columns, shape.group_rows)
            packed = self.packed(self.dscores(d, probability[k], stat))
            ptx.tmem_store(columns, packed)
            if cutlass.const_expr(k == 0):
                c.edges.ds.wait_empty(0, i)
            if cutlass.const_expr(shape.parts == 1):
                target, half = (outgoing, own)[k], 0
            else:
                target, half = select_(c.rank == part, own, outgoing), k * shape.own_rows * 2
            for j in cutlass.range_constexpr(0, len(packed), 4):
                ptx.store_shared_vector(target + self.row + ((half + j * 4) ^ self.swizzle), packed[j : j + 4])
            ptx.fence_async_shared()
            if cutlass.const_expr(shape.parts == 1 and k == 0):
                self.arrive(c.edges.send.full(0))
        if cutlass.const_expr(shape.parts == 2):
            ptx.sync_warp()
            if (c.rank != part) & self.lane0:
                ptx.mbarrier_arrive(c.edges.send.full(0))
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.ds.full(0))
        if cutlass.const_expr(part == shape.parts - 1):
            self.arrive(c.edges.stat.empty(stage))

    @cute.jit
    def arrive_leader(self, barrier):
        """One arrival for the warp at the leader's barrier after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive_leader(barrier)
