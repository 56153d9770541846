"""(DSL) The correction warpgroup: rescales the accumulators when a maximum has moved, and finishes them.

Data flow, per tile; the stages take turns, one thread per query row::

    for each block but the first:
      stat.full -> the row's factor                                       -> stat.empty
      o.full    -> O *= factor, only if a row of the warp has one below 1 -> o.empty
    stat.full -> the row's sum and maximum -> LSE to global memory        -> stat.empty
    o.full, out.empty -> O / sum, 16 bits, swizzled to shared memory      -> o.empty, out.full

A tile without visible keys goes from here straight to global memory (zeros, LSE -inf); no other role sees it.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, select_

from jax_fa4.kernels.common.ptx import log2, pack_pair, reciprocal
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward import tmem
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, ROWS
from jax_fa4.kernels.sm100.forward.context import Context
from jax_fa4.kernels.sm100.forward.shared import STAT_BYTES
from jax_fa4.kernels.sm100.forward.work import Tile

RESCALE_CHUNK = 32
FINISH_CHUNK = 16
"""Accumulator columns in registers at a time."""

VECTOR = 8
"""16-bit elements of one 16-byte shared-memory access."""


class CorrectionRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context
        thread = cute.arch.thread_idx()[0]
        self.row = thread & (ROWS - 1)
        self.lane0 = Boolean((thread & 31) == 0)
        self.lanes = (self.row & ~31) << tmem.LANE_SHIFT

    @cute.jit
    def run(self):
        c = self.c
        stages = c.config.q_stages
        index = c.scheduler.first()
        asked = Int32(0)
        block = Int32(0)
        tiles = Int32(0)
        while index < c.problem.order.total:
            tile = c.problem.tile(index)
            if tile.blocks > 0:
                for _ in cutlass.range(tile.blocks - 1, unroll=1):
                    for stage in cutlass.range_constexpr(stages):
                        self.rescale(stage, block)
                    block = block + 1
                for stage in cutlass.range_constexpr(stages):
                    self.finish(tile, stage, block, tiles)
                block = block + 1
                tiles = tiles + 1
            else:
                for stage in cutlass.range_constexpr(stages):
                    self.empty_tile(tile, stage)
            index, asked = c.scheduler.next(index, asked)

    @cute.jit
    def rescale(self, stage: cutlass.Constexpr, block):
        """Waits for block ``block``'s product, brings O to the next block's maximum."""
        c = self.c
        c.edges.stat.wait_full(stage, block)
        factor = ptx.load_shared(self.stat(stage))
        self.arrive(c.edges.stat.empty(stage))
        moved = ptx.warp_any(factor < Float32(1.0))
        # Paired: the factor belongs to scores that were computed after this block's product.
        if cutlass.const_expr(not c.config.paired):
            c.edges.o.wait_full(stage, block)
        if moved:
            ptx.tmem_fence_after()
            address = self.lanes + tmem.accumulator(c.config, stage)
            for first in cutlass.range_constexpr(0, c.config.accumulator_columns, RESCALE_CHUNK):
                o = ptx.tmem_load(address + first, RESCALE_CHUNK)
                for i in cutlass.range_constexpr(0, RESCALE_CHUNK, 2):
                    o[i], o[i + 1] = ptx.mul2((o[i], o[i + 1]), (factor, factor))
                ptx.tmem_store(address + first, o)
            ptx.tmem_store_wait()
            ptx.tmem_fence_before()
        self.arrive_mma(c.edges.o.empty(stage))

    @cute.jit
    def finish(self, tile, stage: cutlass.Constexpr, block, tiles):
        """Normalises the tile's O and hands it to the store warp; writes the LSE."""
        c = self.c
        c.edges.stat.wait_full(stage, block)
        total = ptx.load_shared(self.stat(stage))
        maximum = ptx.load_shared(self.stat(stage) + STAT_BYTES)
        self.arrive(c.edges.stat.empty(stage))
        token, _, _ = self.locate(tile, stage)
        # NaN sums are kept visible: only an exact 0 means that the row sees no key.
        valid = Boolean(token < tile.lengths.q_len) & Boolean(total != Float32(0.0))
        inverse = reciprocal(total)
        lse = (maximum * c.scale_log2 + log2(total)) * Float32(math.log(2.0))
        self.store_lse(tile, stage, select_(valid, lse, Float32(float("-inf"))))

        c.edges.out.wait_empty(stage, tiles)
        c.edges.o.wait_full(stage, block)
        ptx.tmem_fence_after()
        source = self.lanes + tmem.accumulator(c.config, stage)
        # Read anew: addresses derived from it would else be kept in registers through the rescale loop.
        row = ptx.thread() & (ROWS - 1)
        target = c.base + (c.shared.o + stage * c.shared.o_stride) + row * c.config.box_row_bytes
        swizzle = (row & 7) << 4
        for first in cutlass.range_constexpr(0, c.config.accumulator_columns, FINISH_CHUNK):
            o = ptx.tmem_load(source + first, FINISH_CHUNK)
            packed = []
            for i in cutlass.range_constexpr(0, FINISH_CHUNK, 2):
                low, high = ptx.mul2((o[i], o[i + 1]), (inverse, inverse))
                low = select_(valid, low, Float32(0.0))
                high = select_(valid, high, Float32(0.0))
                packed.append(pack_pair(low, high, c.element))
            box, column = divmod(first, BOX_COLUMNS)
            for i in cutlass.range_constexpr(0, FINISH_CHUNK, VECTOR):
                offset = box * ROWS * c.config.box_row_bytes
                address = target + offset + (((column + i) * 2) ^ swizzle)
                ptx.store_shared_vector(address, packed[i // 2 : i // 2 + 4])
        ptx.tmem_fence_before()
        self.arrive_mma(c.edges.o.empty(stage))
        ptx.fence_async_shared()
        self.arrive(c.edges.out.full(stage))

    @cute.jit
    def store_lse(self, tile, stage: cutlass.Constexpr, lse):
        """LSE (B, N, T) of this thread's row, where the row exists."""
        c = self.c
        token, head, exists = self.locate(tile, stage)
        if exists:
            row = Int64(tile.batch * c.problem.query_heads + head) * Int64(c.problem.seqlen_q) + Int64(token)
            ptx.store_global(c.lse + row * 4, lse)

    @cute.jit
    def empty_tile(self, tile, stage: cutlass.Constexpr):
        """Zeros and -inf for a tile whose rows see no key."""
        c = self.c
        self.store_lse(tile, stage, Float32(float("-inf")))
        token, head, exists = self.locate(tile, stage)
        if exists:
            row = (Int64(tile.batch) * Int64(c.problem.seqlen_q) + Int64(token)) * Int64(c.problem.query_heads)
            address = c.output + (row + Int64(head)) * Int64(c.head_dim_v) * 2
            column = Int32(0)
            while column < c.head_dim_v:
                ptx.store_global_zeros(address + Int64(column) * 2)
                column = column + VECTOR

    def locate(self, tile: Tile, stage: int) -> tuple[Int32, Int32, Boolean]:
        """Query position and head of this thread's row, and whether it is a row of the output."""
        row = ptx.thread() & (ROWS - 1)
        token, head = self.c.problem.locate(tile, stage, row)
        return token, head, Boolean(token < self.c.problem.seqlen_q) & Boolean(row < self.c.problem.box_rows)

    def stat(self, stage: int) -> Int32:
        return self.c.base + (self.c.shared.stat + stage * 2 * STAT_BYTES) + self.row * 4

    @cute.jit
    def arrive(self, barrier):
        """One arrival for the warp after all its lanes have come here."""
        ptx.sync_warp()
        if self.lane0:
            ptx.mbarrier_arrive(barrier)

    @cute.jit
    def arrive_mma(self, barrier):
        """As :meth:`arrive`, at a barrier that the MMA warp waits for."""
        ptx.sync_warp()
        if self.lane0:
            self.c.arrive_mma(barrier)
