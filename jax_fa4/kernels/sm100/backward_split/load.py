"""(DSL) The load warp: the resident operands once, and per step the streamed ones (and, on the key_value side, the row
statistics), by TMA. One elected lane issues; all lanes wait."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.backward_split.config import (
    RESIDENT,
    RESIDENT_BOX,
    STAT_BYTES,
    STAT_STAGES,
    STREAMED,
    STREAMED_BOX,
)
from jax_fa4.kernels.sm100.backward_split.context import Context
from jax_fa4.kernels.sm100.bulk import bulk_load


class LoadRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context

    @cute.jit
    def run(self):
        c = self.c
        config, work = c.config, c.work
        leader = ptx.elect()
        head, block = work.first()
        row = work.block * RESIDENT
        steps = work.steps
        for i in cutlass.range(steps, unroll=1):
            first = (i == 0) & leader
            stage, use = stage_of(i, config.stages)
            if cutlass.const_expr(config.key_side):
                self.statistics(i, head, block, leader)
            if first:
                shared, barrier = c.base + c.shared.x, c.edges.x.full(0)
                self.boxes(c.maps.x, shared, config.qk_boxes, RESIDENT_BOX, barrier, row, work.head)
            c.edges.z.wait_empty(stage, use)
            if leader:
                barrier = c.edges.z.full(stage)
                self.boxes(c.maps.z, c.z(stage), config.qk_boxes, STREAMED_BOX, barrier, block * STREAMED, head)
            if first:
                shared, barrier = c.base + c.shared.y, c.edges.y.full(0)
                self.boxes(c.maps.y, shared, config.v_boxes, RESIDENT_BOX, barrier, row, work.head)
            c.edges.w.wait_empty(stage, use)
            if leader:
                barrier = c.edges.w.full(stage)
                self.boxes(c.maps.w, c.w(stage), config.v_boxes, STREAMED_BOX, barrier, block * STREAMED, head)
            head, block = work.next(head, block)
        # The tensor core's last arrivals at these barriers must not come after the CTA's end.
        for i in cutlass.range_constexpr(config.stages):
            stage, use = stage_of(steps + i, config.stages)
            c.edges.z.wait_empty(stage, use)
            c.edges.w.wait_empty(stage, use)

    def boxes(self, descriptor, shared, count: int, size: int, barrier, row, head) -> None:
        """Rows from ``row`` on of a head, as ``count`` boxes of ``size`` bytes; one thread calls this."""
        ptx.mbarrier_expect(barrier, count * size)
        for box in range(count):
            coordinates = (Int32(box * BOX_COLUMNS), row, head, self.c.work.batch)
            ptx.tma_load(shared + box * size, descriptor, coordinates, barrier)

    @cute.jit
    def statistics(self, i, head, block, leader):
        """lse2 and delta of one block of query rows."""
        c = self.c
        stage, use = stage_of(i, STAT_STAGES)
        c.edges.stat.wait_empty(stage, use)
        if leader:
            barrier = c.edges.stat.full(stage)
            ptx.mbarrier_expect(barrier, 2 * STAT_BYTES)
            offset = c.work.statistic(head, block * STREAMED)
            bulk_load(c.stat(stage), c.lse2 + offset, STAT_BYTES, barrier)
            bulk_load(c.stat(stage) + STAT_BYTES, c.delta + offset, STAT_BYTES, barrier)
