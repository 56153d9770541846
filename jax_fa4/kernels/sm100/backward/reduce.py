"""(DSL) The dQ-reduce warpgroup: adds each step's dQ to the float32 scratch, one thread per query row.

Data flow per step::

    dq.full -> dQ of a row, tensor memory to registers                     -> dq.empty
               for each piece of 32 columns: shared memory -> bulk addition to global memory

Deterministic kernels add in ascending order of key blocks: a counter per chunk (half of the columns) says how many have
been added. The first key block stores instead of adding, so that nothing has to clear the scratch. A turn is passed on
only when the bulk operation is complete, not when its shared memory has been read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int64

from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.config import PIECE_BUFFERS, PIECE_BYTES, PIECE_COLUMNS, ROWS
from jax_fa4.kernels.sm100.backward.context import Context
from jax_fa4.kernels.sm100.bulk import bulk_add, bulk_store, pass_turn, wait_for_turn

REDUCE_BARRIER = 1
"""Hardware barrier of this warpgroup (0 is the whole CTA's)."""

VECTOR_BYTES = 16
TURN_BYTES = 4


class ReduceRole:
    """See the module's text. Bulk groups belong to a thread: the first one does all bulk operations."""

    def __init__(self, context: Context):
        self.c = context
        thread = cute.arch.thread_idx()[0]
        self.row = thread & (ROWS - 1)
        self.lane0 = Boolean((thread & 31) == 0)
        self.issuer = Boolean(self.row == 0)
        self.lanes = (self.row & ~31) << tmem.LANE_SHIFT

    @cute.jit
    def run(self):
        c = self.c
        config = c.config
        head, m = c.work.first()
        for i in cutlass.range(c.work.steps, unroll=1):
            c.edges.dq.wait_full(0, i)
            ptx.tmem_fence_after()
            values = ptx.tmem_load(self.lanes + tmem.dquery(config), config.columns)
            ptx.tmem_fence_before()
            ptx.sync_warp()
            if self.lane0:
                ptx.mbarrier_arrive(c.edges.dq.empty(0))
            block = c.work.scratch_block(head, m)
            first_key_block, _ = c.work.ranges.key_blocks(m)
            place = c.work.order_block - first_key_block
            for piece in cutlass.range_constexpr(config.pieces):
                self.add(piece, values[piece * PIECE_COLUMNS : (piece + 1) * PIECE_COLUMNS], block, place)
            head, m = c.work.next(head, m)
        if self.issuer:
            ptx.bulk_wait(0, read=False)

    @cute.jit
    def add(self, piece: cutlass.Constexpr, values, block, place):
        """One piece of one row, in every thread; ``place``: how many key blocks come before this one."""
        c = self.c
        shared = c.base + (c.shared.piece + piece % PIECE_BUFFERS * PIECE_BYTES)
        if self.issuer:
            # The addition that last used this buffer has read it; the one after it may still do so.
            ptx.bulk_wait(PIECE_BUFFERS - 1, read=True)
        ptx.named_barrier(REDUCE_BARRIER, 128)
        # Vector v of all rows, then vector v + 1: what the scratch's layout says, and free of bank conflicts.
        for v in cutlass.range_constexpr(PIECE_COLUMNS // 4):
            registers = [ptx.bits(x) for x in values[4 * v : 4 * v + 4]]
            ptx.store_shared_vector(shared + (v * ROWS * VECTOR_BYTES + self.row * VECTOR_BYTES), registers)
        ptx.fence_async_shared()
        ptx.named_barrier(REDUCE_BARRIER, 128)
        if self.issuer:
            self.issue(piece, shared, block, place)

    @cute.jit
    def issue(self, piece: cutlass.Constexpr, shared, block, place):
        """Starts a piece's addition when its turn has come, and passes on the turn of what is complete."""
        c = self.c
        config = c.config
        chunk = piece // config.pieces_per_chunk
        target = c.dq_accum + block * Int64(config.dq_block.elements * 4) + Int64(piece * PIECE_BYTES)
        if cutlass.const_expr(config.deterministic):
            turn = c.turn + block * Int64(DQ_CHUNKS * TURN_BYTES)
            if place == 0:
                bulk_store(target, shared, PIECE_BYTES)
            else:
                if cutlass.const_expr(piece % config.pieces_per_chunk == 0):
                    wait_for_turn(turn + Int64(chunk * TURN_BYTES), place)
                bulk_add(target, shared, PIECE_BYTES)
            ptx.bulk_commit()
            if cutlass.const_expr(piece == config.pieces_per_chunk):
                ptx.bulk_wait(1, read=False)
                pass_turn(turn)
            if cutlass.const_expr(piece == config.pieces - 1):
                ptx.bulk_wait(0, read=False)
                pass_turn(turn + Int64(TURN_BYTES))
        else:
            bulk_add(target, shared, PIECE_BYTES)
            ptx.bulk_commit()
