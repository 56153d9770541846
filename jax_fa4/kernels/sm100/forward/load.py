"""(DSL) The load warp: global memory to shared memory by TMA.

Data flow, per tile with at least one key block (blocks are taken from the last to the first, so that the masked
diagonal comes first)::

    q.empty  -> Q tile of each stage            -> q.full
    kv.empty -> chunks of K and V, in the order -> kv.full
                the tensor core reads them

One elected lane issues; all lanes wait, so that the warp stays converged.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, KEYS, ROWS
from jax_fa4.kernels.sm100.forward.context import Context
from jax_fa4.kernels.sm100.forward.pipeline import next_slot


class LoadRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context

    @cute.jit
    def run(self):
        c = self.c
        leader = ptx.elect()
        index = c.scheduler.first()
        asked = Int32(0)
        slot = Int32(0)
        use = Int32(0)
        q_use = Int32(0)
        while index < c.problem.order.total:
            tile = c.problem.tile(index)
            if tile.blocks > 0:
                block = tile.end_block - 1
                if cutlass.const_expr(c.config.paired):
                    self.load_q(tile, 0, q_use, leader)
                    slot, use = self.load_k(tile, block, slot, use, leader)
                    self.load_q(tile, 1, q_use, leader)
                    for _ in cutlass.range(tile.blocks - 1, unroll=1):
                        slot, use = self.load_v(tile, block, slot, use, leader)
                        block = block - 1
                        slot, use = self.load_k(tile, block, slot, use, leader)
                else:
                    self.load_q(tile, 0, q_use, leader)
                    slot, use = self.load_k(tile, block, slot, use, leader)
                    for _ in cutlass.range(tile.blocks - 1, unroll=1):
                        block = block - 1
                        slot, use = self.load_k(tile, block, slot, use, leader)
                        slot, use = self.load_v(tile, block + 1, slot, use, leader)
                slot, use = self.load_v(tile, block, slot, use, leader)
                q_use = q_use + 1
            index, asked = c.scheduler.next(index, asked)
        # The tensor core's last arrivals at these barriers must not come after the CTA's end.
        for _ in cutlass.range_constexpr(c.config.kv_stages):
            c.edges.kv.wait_empty(slot, use)
            slot, use = next_slot(slot, use, c.config.kv_stages)
        for stage in cutlass.range_constexpr(c.config.q_stages):
            c.edges.q.wait_empty(stage, q_use)

    @cute.jit
    def load_q(self, tile, stage: cutlass.Constexpr, q_use, leader):
        """One tile of query rows; rows beyond the sequence arrive as zeros."""
        c = self.c
        c.edges.q.wait_empty(stage, q_use)
        if leader:
            barrier = c.edges.q.full(stage)
            # An unpacked box has all rows, a packed one those of its positions.
            self.expect(barrier, c.problem.box_rows * (c.config.qk_boxes * c.config.box_row_bytes))
            token = c.problem.first_token(tile, stage)
            for box in cutlass.range_constexpr(c.config.qk_boxes):
                shared = c.base + (c.shared.q + stage * c.config.q_bytes + box * ROWS * c.config.box_row_bytes)
                coordinates = (Int32(box * BOX_COLUMNS), Int32(0), token, tile.head, tile.batch)
                ptx.tma_load(shared, c.maps.q, coordinates, barrier, c.config.ctas)

    @cute.jit
    def load_k(self, tile, block, slot, use, leader):
        """The chunks of one key block: a chunk holds some columns of all keys."""
        c = self.c
        per_chunk = c.config.qk_boxes // c.config.k_chunks
        for chunk in cutlass.range_constexpr(c.config.k_chunks):
            c.edges.kv.wait_empty(slot, use)
            if leader:
                barrier = c.edges.kv.full(slot)
                self.expect(barrier, c.config.k_chunk_bytes)
                for box in cutlass.range_constexpr(per_chunk):
                    shared = c.slot_address(slot) + box * c.config.k_keys * c.config.box_row_bytes
                    column = Int32((chunk * per_chunk + box) * BOX_COLUMNS)
                    key = block * KEYS + c.rank * c.config.k_keys
                    coordinates = (column, key, c.problem.kv_head(tile.head), tile.batch)
                    ptx.tma_load(shared, c.maps.k, coordinates, barrier, c.config.ctas)
            slot, use = next_slot(slot, use, c.config.kv_stages)
        return slot, use

    @cute.jit
    def load_v(self, tile, block, slot, use, leader):
        """The chunks of one value block: a chunk holds all columns of some keys."""
        c = self.c
        keys = c.config.v_keys_per_chunk
        for chunk in cutlass.range_constexpr(c.config.v_chunks):
            c.edges.kv.wait_empty(slot, use)
            if leader:
                barrier = c.edges.kv.full(slot)
                self.expect(barrier, c.config.v_chunk_bytes)
                for box in cutlass.range_constexpr(c.config.v_own_boxes):
                    shared = c.slot_address(slot) + box * keys * c.config.box_row_bytes
                    column = Int32(box * BOX_COLUMNS) + c.rank * (c.config.v_own_boxes * BOX_COLUMNS)
                    key = block * KEYS + chunk * keys
                    coordinates = (column, key, c.problem.kv_head(tile.head), tile.batch)
                    ptx.tma_load(shared, c.maps.v, coordinates, barrier, c.config.ctas)
            slot, use = next_slot(slot, use, c.config.kv_stages)
        return slot, use

    @cute.jit
    def expect(self, barrier, own_bytes):
        """Announces the bytes of a load; in a pair the first CTA does so for both."""
        c = self.c
        if cutlass.const_expr(c.config.ctas == 1):
            ptx.mbarrier_expect(barrier, own_bytes)
        elif c.rank == 0:
            ptx.mbarrier_expect(barrier, own_bytes * 2)
