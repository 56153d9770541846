"""(DSL) A compute warpgroup of a CTA in a pair: one thread per key of the CTA, 32 query rows of each half of a block.

Data flow per step::

    stat.full, s.full -> scores of a key with 64 query rows, tensor memory to registers  -> read.full (the leader's)
                         P = exp2(S scale log2 e - lse2), hidden pairs 0
                         16-bit P over S                                                 -> p.full (the leader's)
    dp.full           -> dS = P (dP - delta), in float32
                         16-bit dS over dP, and, after ds.empty, to shared memory:
                           the peer's rows, first                                        -> send.full
                           this CTA's rows                                               -> ds.full (the leader's),
                                                                                            stat.empty

All scores are read before the first probability is written. The peer's rows are turned into dS first, whichever half of
the block they are.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.compute import ComputeRole
from jax_fa4.kernels.sm100.backward.config import BOX_ROW_BYTES, KEYS, STAT_STAGES
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.backward_pair import tmem
from jax_fa4.kernels.sm100.backward_pair.config import HALF_ROWS
from jax_fa4.kernels.sm100.backward_pair.context import PairContext

GROUP_BYTES = tmem.GROUP_COLUMNS * 2
"""Bytes of a warpgroup's rows in a key's 128-byte row of dS."""


class PairComputeRole(ComputeRole):
    """``group`` (DSL integer) says which rows of each half of a block this warpgroup has."""

    def __init__(self, context: PairContext, group: Int32):
        super().__init__(context, group)
        self.pair = context
        self.lanes = (self.key & ~31) << tmem.LANE_SHIFT
        # The halves of a block: the peer's rows, then this CTA's own.
        self.halves = (context.rank ^ 1, context.rank)
        self.row = self.key * BOX_ROW_BYTES
        self.swizzle = ((self.key & 7) << 4) ^ (group * GROUP_BYTES)

    @cute.jit
    def step(self, i, m):
        """One block of query rows."""
        c = self.pair
        stage, use = stage_of(i, STAT_STAGES)
        low, high = c.work.mask_ranges.row_bounds(c.work.key_block * KEYS + self.key, m)
        masked = c.work.mask_ranges.needs_mask(m, c.work.key_block)
        # First row of each half that this warpgroup has.
        first = [half * HALF_ROWS + self.group * tmem.GROUP_COLUMNS for half in self.halves]
        c.edges.stat.wait_full(stage, use)
        c.edges.s.wait_full(0, i)
        ptx.tmem_fence_after()
        probability = [ptx.tmem_load(self.lanes + (tmem.SCORES + f), tmem.GROUP_COLUMNS) for f in first]
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.read.full(0))
        for k in cutlass.range_constexpr(2):
            stat = c.stat(stage) + first[k] * 4
            probability[k] = self.probabilities(probability[k], stat, masked, low - first[k], high - first[k])
            column = self.group * tmem.GROUP_COLUMNS + self.halves[k] * (tmem.GROUP_COLUMNS // 2)
            ptx.tmem_store(self.lanes + (tmem.SCORES + column), self.packed(probability[k]))
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.p.full(0))

        c.edges.dp.wait_full(0, i)
        ptx.tmem_fence_after()
        targets = (c.base + c.shared.outgoing, c.dscore())
        for k in cutlass.range_constexpr(2):
            columns = self.lanes + (tmem.DPROBABILITIES + first[k])
            stat = c.stat(stage) + first[k] * 4
            d = ptx.tmem_load(columns, tmem.GROUP_COLUMNS)
            packed = self.packed(self.dscores(d, probability[k], stat))
            ptx.tmem_store(columns, packed)
            if cutlass.const_expr(k == 0):
                c.edges.ds.wait_empty(0, i)
            for j in cutlass.range_constexpr(0, len(packed), 4):
                ptx.store_shared_vector(targets[k] + self.row + ((j * 4) ^ self.swizzle), packed[j : j + 4])
            ptx.fence_async_shared()
            if cutlass.const_expr(k == 0):
                self.arrive(c.edges.send.full(0))
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        self.arrive_leader(c.edges.ds.full(0))
        self.arrive(c.edges.stat.empty(stage))

    @cute.jit
    def arrive_leader(self, barrier):
        """One arrival for the warp at the leader's barrier after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive_leader(barrier)
