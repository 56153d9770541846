"""(DSL) The dQ-reduce warpgroup of a CTA in a pair: adds half of the rows of each step's dQ to the float32 scratch.

Data flow per step::

    dq.full -> half of the columns of dQ of a row, tensor memory to registers -> dq.empty (the leader's)
               for each piece of 16 columns: shared memory -> addition to global memory by TMA

The scratch is laid out as the single-CTA kernel's: in each half of the columns, vectors of 4 columns, and within a
vector the rows. This CTA's rows are half of each vector's, a box of the scratch's tensor map. The order of additions is
the single-CTA kernel's too, with the pair's key blocks, and with a counter per half of the rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.reduce import REDUCE_BARRIER, TURN_BYTES, VECTOR_BYTES
from jax_fa4.kernels.sm100.backward_pair import tmem
from jax_fa4.kernels.sm100.backward_pair.config import (
    DQ_COLUMNS,
    HALF_ROWS,
    PIECE_BUFFERS,
    PIECE_BYTES,
    PIECE_VECTORS,
)
from jax_fa4.kernels.sm100.backward_pair.context import PairContext
from jax_fa4.kernels.sm100.bulk import pass_turn, wait_for_turn

HALVES = 2
"""Halves of the columns: the chunks of the scratch."""

PIECES = DQ_COLUMNS // 4 // PIECE_VECTORS
SCRATCH_ROW = HALF_ROWS * 4
"""float32 elements of this CTA's rows in a vector."""


class PairReduceRole:
    """See the module's text. Bulk groups belong to a thread: the first one does all bulk operations."""

    def __init__(self, context: PairContext):
        self.c = context
        self.thread = cute.arch.thread_idx()[0] & 127
        self.lane0 = Boolean((self.thread & 31) == 0)
        self.issuer = Boolean(self.thread == 0)
        self.lanes = (self.thread & ~31) << tmem.LANE_SHIFT

    @cute.jit
    def run(self):
        c = self.c
        head, m = c.work.first()
        for i in cutlass.range(c.work.steps, unroll=1):
            c.edges.dq.wait_full(0, i)
            ptx.tmem_fence_after()
            values = ptx.tmem_load(self.lanes + tmem.DQUERY, DQ_COLUMNS)
            ptx.tmem_fence_before()
            ptx.sync_warp()
            if self.lane0:
                ptx.mbarrier_arrive_leader(c.edges.dq.empty(0))
            block = c.work.scratch_block(head, m)
            first_key_block, _ = c.work.ranges.key_blocks(m)
            place = c.work.order_block - first_key_block
            for piece in cutlass.range_constexpr(PIECES):
                columns = PIECE_VECTORS * 4
                self.add(piece, values[piece * columns : (piece + 1) * columns], block, place)
            head, m = c.work.next(head, m)
        if self.issuer:
            ptx.bulk_wait(0, read=False)

    @cute.jit
    def add(self, piece: cutlass.Constexpr, values, block, place):
        """One piece of one row, in every thread; ``place``: how many of the pairs' key blocks come before this one."""
        c = self.c
        shared = c.base + (c.shared.piece + piece % PIECE_BUFFERS * PIECE_BYTES)
        if self.issuer:
            # The addition that last used this buffer has read it; the one after it may still do so.
            ptx.bulk_wait(PIECE_BUFFERS - 1, read=True)
        ptx.named_barrier(REDUCE_BARRIER, 128)
        half, row = self.thread // HALF_ROWS, self.thread % HALF_ROWS
        target = shared + half * (PIECE_BYTES // HALVES) + row * VECTOR_BYTES
        for v in cutlass.range_constexpr(PIECE_VECTORS):
            registers = [ptx.bits(x) for x in values[4 * v : 4 * v + 4]]
            ptx.store_shared_vector(target + v * (HALF_ROWS * VECTOR_BYTES), registers)
        ptx.fence_async_shared()
        ptx.named_barrier(REDUCE_BARRIER, 128)
        if self.issuer:
            self.issue(piece, shared, block, place)

    @cute.jit
    def issue(self, piece: cutlass.Constexpr, shared, block, place):
        """Starts a piece's addition when its turn has come, and passes on the turn when the block is complete."""
        c = self.c
        if cutlass.const_expr(c.config.deterministic):
            turn = c.turn + block * Int64(DQ_CHUNKS * TURN_BYTES) + Int64(c.rank * TURN_BYTES)
            if place == 0:
                self.copy(ptx.tma_store, piece, shared, block)
            else:
                if cutlass.const_expr(piece == 0):
                    wait_for_turn(turn, place)
                self.copy(ptx.tma_add, piece, shared, block)
            ptx.bulk_commit()
            if cutlass.const_expr(piece == PIECES - 1):
                ptx.bulk_wait(0, read=False)
                pass_turn(turn)
        else:
            self.copy(ptx.tma_add, piece, shared, block)
            ptx.bulk_commit()

    def copy(self, instruction, piece: int, shared, block) -> None:
        """Both halves of the columns of a piece, by TMA ``instruction``."""
        c = self.c
        for half in range(HALVES):
            vector = Int32(block) * (HALVES * DQ_COLUMNS // 4) + (half * DQ_COLUMNS // 4 + piece * PIECE_VECTORS)
            instruction(c.dq_accum, (c.rank * SCRATCH_ROW, vector), shared + half * (PIECE_BYTES // HALVES))
