"""(DSL) The dQ-reduce warpgroup of a CTA in a pair: adds half of the rows of each block's dQ to the float32 scratch.

Data flow per block::

    dq.full -> half of the columns of dQ of a row, tensor memory to registers -> dq.empty (the leader's)
               for each piece of its columns: shared memory -> addition to global memory by TMA

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
from jax_fa4.kernels.sm100.backward_pair.config import HALF_ROWS, PIECE_BUFFERS
from jax_fa4.kernels.sm100.backward_pair.context import PairContext
from jax_fa4.kernels.sm100.bulk import pass_turn, wait_for_turn

HALVES = 2
"""Halves of the columns: the chunks of the scratch."""

SCRATCH_ROW = HALF_ROWS * 4
"""float32 elements of this CTA's rows in a vector."""


class PairReduceRole:
    """See the module's text. Bulk groups belong to a thread: the first one does all bulk operations."""

    def __init__(self, context: PairContext):
        self.c = context
        self.shape = context.shape
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
            values = ptx.tmem_load(self.lanes + tmem.dquery(self.shape), self.shape.dq_columns)
            ptx.tmem_fence_before()
            ptx.sync_warp()
            if self.lane0:
                ptx.mbarrier_arrive_leader(c.edges.dq.empty(0))
            block = c.work.scratch_block(head, m)
            first_key_block, _ = c.work.ranges.key_blocks(m)
            place = c.work.order_block - first_key_block
            columns = self.shape.piece_vectors * 4
            for piece in cutlass.range_constexpr(self.shape.pieces):
                self.add(piece, values[piece * columns : (piece + 1) * columns], block, place)
            head, m = c.work.next(head, m)
        if self.issuer:
            ptx.bulk_wait(0, read=False)

    @cute.jit
    def add(self, piece: cutlass.Constexpr, values, block, place):
        """One piece of one row, in every thread; ``place``: how many of the pairs' key blocks come before this one."""
        c = self.c
        shared = c.base + (c.shared.piece + piece % PIECE_BUFFERS * self.shape.piece_bytes)
        if self.issuer:
            # The addition that last used this buffer has read it; the one after it may still do so.
            ptx.bulk_wait(PIECE_BUFFERS - 1, read=True)
        ptx.named_barrier(REDUCE_BARRIER, 128)
        half, row = self.thread // HALF_ROWS, self.thread % HALF_ROWS
        target = shared + half * (self.shape.piece_bytes // HALVES) + row * VECTOR_BYTES
        for v in cutlass.range_constexpr(self.shape.piece_vectors):
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
            if cutlass.const_expr(piece == self.shape.pieces - 1):
                ptx.bulk_wait(0, read=False)
                pass_turn(turn)
        else:
            self.copy(ptx.tma_add, piece, shared, block)
            ptx.bulk_commit()

    def copy(self, instruction, piece: int, shared, block) -> None:
        """Both halves of the columns of a piece, by TMA ``instruction``."""
        c, shape = self.c, self.shape
        vectors = shape.dq_columns // 4
        for half in range(HALVES):
            vector = Int32(block) * (HALVES * vectors) + (half * vectors + piece * shape.piece_vectors)
            place = (c.rank * SCRATCH_ROW, vector)
            instruction(c.column_maps.dq, place, shared + half * (shape.piece_bytes // HALVES))
