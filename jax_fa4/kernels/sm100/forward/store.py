"""(DSL) The O-store warp: finished tiles from shared to global memory by TMA, which drops what is beyond the edges.

Data flow, per tile with at least one key block: out.full -> global memory -> out.empty (and q.empty where O leaves
through its Q tile's memory), each stage as soon as its reads of shared memory are done.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, ROWS
from jax_fa4.kernels.sm100.forward.context import Context


class StoreRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context

    @cute.jit
    def run(self):
        c = self.c
        stages = c.config.q_stages
        leader = ptx.elect()
        index = c.scheduler.first()
        asked = Int32(0)
        tiles = Int32(0)
        while index < c.problem.order.total:
            tile = c.problem.tile(index)
            if tile.blocks > 0:
                for stage in cutlass.range_constexpr(stages):
                    c.edges.out.wait_full(stage, tiles)
                    if leader:
                        self.store(tile, stage)
                if leader:
                    for stage in cutlass.range_constexpr(stages):
                        ptx.bulk_wait(stages - 1 - stage, read=True)
                        ptx.mbarrier_arrive(c.edges.out.empty(stage))
                        if cutlass.const_expr(c.config.o_over_q):
                            ptx.mbarrier_arrive(c.edges.q.empty(stage))
                tiles = tiles + 1
            index, asked = c.scheduler.next(index, asked)
        # Shared memory must outlive the last reads, global visibility comes with the kernel's end.
        if leader:
            ptx.bulk_wait(0, read=False)

    @cute.jit
    def store(self, tile, stage: cutlass.Constexpr):
        """One O tile as one bulk group."""
        c = self.c
        token = c.problem.first_token(tile, stage)
        for box in cutlass.range_constexpr(c.config.v_boxes):
            shared = c.base + (c.shared.o + stage * c.shared.o_stride + box * ROWS * c.config.box_row_bytes)
            coordinates = (Int32(box * BOX_COLUMNS), Int32(0), token, tile.head, tile.batch)
            ptx.tma_store(c.maps.o, coordinates, shared)
        ptx.bulk_commit()
