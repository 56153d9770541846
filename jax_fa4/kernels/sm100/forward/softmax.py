"""(DSL) A softmax warpgroup: one thread per query row, one block of 128 scores at a time.

Data flow per block::

    s.full -> 128 scores of the row, tensor memory to registers
              mask, row maximum, conditional rescale factor
    stat.empty -> factor to shared memory                       -> stat.full (not for a tile's first block)
              probabilities = exp2(score * scale - maximum * scale), packed to 16 bits
              three quarters to tensor memory                   -> p_early.full
              last quarter                                      -> p_late.full
              row sum (off the critical path)

and after a tile's last block: sum and maximum to shared memory -> stat.full.

Conditional rescale: with a = (m_old - m_new) * scale * log2 e, the old maximum stays in use while a >= -8: the factor
is then exactly 1, probabilities are at most 2^8, and sum and accumulator share the stale maximum, so that the final
division is exact. A maximum of -inf (no visible key yet) counts as 0 in the exponent: all probabilities are 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_

from jax_fa4.kernels.common.ptx import exp2, pack_pair
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward import tmem
from jax_fa4.kernels.sm100.forward.config import EARLY_STEPS, K_STEP, KEYS, RESCALE_THRESHOLD, ROWS
from jax_fa4.kernels.sm100.forward.context import Context
from jax_fa4.kernels.sm100.forward.exp2 import exp2_fma
from jax_fa4.kernels.sm100.forward.row_mask import RowMask
from jax_fa4.kernels.sm100.forward.shared import STAT_BYTES

CHUNK = 32
"""Probabilities converted and stored together."""

EARLY_CHUNKS = EARLY_STEPS * K_STEP // CHUNK
PAIRS = CHUNK // 2

MINUS_INFINITY = float("-inf")

BIT = [*(1 << i for i in range(31)), -(1 << 31)]
"""Single bits as signed 32-bit values."""


class SoftmaxRole:
    """``stage`` (DSL integer) is the query tile that this warpgroup serves."""

    def __init__(self, context: Context, stage: Int32):
        self.c = context
        self.stage = stage
        thread = cute.arch.thread_idx()[0]
        self.row = thread & (ROWS - 1)
        self.lane0 = Boolean((thread & 31) == 0)
        # A warp reaches the 32 lanes of tensor memory that its number modulo 4 names.
        self.lanes = (self.row & ~31) << tmem.LANE_SHIFT
        self.stat = context.base + context.shared.stat + stage * (2 * STAT_BYTES) + self.row * 4

    @cute.jit
    def run(self):
        c = self.c
        index = c.scheduler.first()
        asked = Int32(0)
        count = Int32(0)
        stats = Int32(0)
        while index < c.problem.order.total:
            tile = c.problem.tile(index)
            if tile.blocks > 0:
                mask = RowMask.of(c.problem, tile, self.stage, self.row)
                maximum = Float32(MINUS_INFINITY)
                total = Float32(0.0)
                for i in cutlass.range(tile.blocks, unroll=1):
                    first = Boolean(i == 0)
                    block = tile.end_block - 1 - i
                    maximum, total = self.step(mask, block, count, stats, first, maximum, total)
                    count = count + 1
                    stats = stats + select_(first, Int32(0), Int32(1))
                c.edges.stat.wait_empty(self.stage, stats)
                ptx.store_shared(self.stat, total)
                ptx.store_shared(self.stat + STAT_BYTES, maximum)
                self.arrive(c.edges.stat.full(self.stage))
                stats = stats + 1
            index, asked = c.scheduler.next(index, asked)

    @cute.jit
    def step(self, mask, block, count, stats, first, maximum, total):
        """One key block; returns the maximum in use and the sum. ``count``, ``stats``: blocks and messages so far."""
        c = self.c
        buffer, use = (self.stage, count) if cutlass.const_expr(c.config.paired) else (count & 1, count >> 1)
        c.edges.s.wait_full(buffer, use)
        ptx.tmem_fence_after()
        s = ptx.tmem_load(self.lanes + tmem.scores(c.config, buffer), KEYS)
        if mask.cuts(block):
            visible = mask.visible(block)
            for i in cutlass.range_constexpr(KEYS):
                s[i] = select_((visible[i // 32] & BIT[i % 32]) != 0, s[i], Float32(MINUS_INFINITY))

        new = row_maximum(s, maximum)
        finite = select_(new == Float32(MINUS_INFINITY), Float32(0.0), new)
        growth = (maximum - finite) * c.scale_log2
        keep = Boolean(growth >= Float32(-RESCALE_THRESHOLD))
        factor = select_(keep, Float32(1.0), exp2(growth))
        maximum = select_(keep, maximum, new)
        if not first:
            # Paired: these scores came after P V of the last block, which waited for its factor to be applied.
            if cutlass.const_expr(not c.config.paired):
                c.edges.stat.wait_empty(self.stage, stats)
            ptx.store_shared(self.stat, factor)
            self.arrive(c.edges.stat.full(self.stage))

        subtract = Float32(0.0) - select_(keep, maximum, finite) * c.scale_log2
        scale2, subtract2 = (c.scale_log2, c.scale_log2), (subtract, subtract)
        sums = [(total * factor, Float32(0.0)), (Float32(0.0), Float32(0.0))]
        p_address = self.lanes + tmem.probabilities(c.config, buffer)
        probabilities = []
        for chunk in cutlass.range_constexpr(KEYS // CHUNK):
            packed = []
            for pair in cutlass.range_constexpr(PAIRS):
                i = chunk * CHUNK + 2 * pair
                x = ptx.fma2((s[i], s[i + 1]), scale2, subtract2)
                p = exp2_fma(x) if on_fma_units(c.config.exp2_fma_pairs, pair) else (exp2(x[0]), exp2(x[1]))
                packed.append(pack_pair(p[0], p[1], c.element))
                probabilities.append(p)
            ptx.tmem_store(p_address + chunk * PAIRS, packed)
            if cutlass.const_expr(chunk == EARLY_CHUNKS - 1):
                self.arrive_stored(c.edges.p_early.full(buffer))
        self.arrive_stored(c.edges.p_late.full(buffer))
        for i in cutlass.range_constexpr(KEYS // 2):
            sums[i % 2] = ptx.add2(sums[i % 2], probabilities[i])
        total2 = ptx.add2(sums[0], sums[1])
        return maximum, total2[0] + total2[1]

    @cute.jit
    def arrive_stored(self, barrier):
        """One arrival for the warp after its tensor-memory stores are complete."""
        ptx.tmem_store_wait()
        ptx.tmem_fence_before()
        ptx.sync_warp()
        if self.lane0:
            self.c.arrive_mma(barrier)

    @cute.jit
    def arrive(self, barrier):
        """One arrival for the warp after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive(barrier)


def row_maximum(s: list, start: Float32) -> Float32:
    """Maximum of ``start`` and 128 scores with three-input instructions, in four independent chains."""
    chains = [start, *s[:3]]
    rest = s[3:]
    for i in range(0, len(rest) - 1, 2):
        chain = (i // 2) % len(chains)
        chains[chain] = ptx.max3(chains[chain], rest[i], rest[i + 1])
    if len(rest) % 2:
        chains[0] = ptx.max2(chains[0], rest[-1])
    return ptx.max2(ptx.max3(chains[0], chains[1], chains[2]), chains[3])


def on_fma_units(pairs: int, pair: int) -> bool:
    """Whether this pair of a chunk is computed by :func:`exp2_fma`; ``pairs`` of 16 are, evenly spread."""
    return (pair + 1) * pairs // PAIRS > pair * pairs // PAIRS
