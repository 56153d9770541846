"""(DSL) The load warp: global memory to shared memory by TMA.

Data flow: K and V once, and per step::

    stat.empty -> lse2 and delta of the block -> stat.full
    q.empty    -> Q of the block              -> q.full     (before it, the first time: K -> k.full)
    dout.empty -> dO of the block             -> dout.full  (before it, the first time: V -> v.full)

One elected lane issues; all lanes wait, so that the warp stays converged. Rows and columns beyond a tensor arrive as
zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import (
    BOX_BYTES,
    BOX_COLUMNS,
    KEYS,
    ROWS,
    STAT_BYTES,
    STAT_STAGES,
)
from jax_fa4.kernels.sm100.backward.context import Context
from jax_fa4.kernels.sm100.backward.work import stage_of
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
        head, m = work.first()
        steps = work.steps
        for i in cutlass.range(steps, unroll=1):
            self.statistics(i, head, m, leader)
            first = (i == 0) & leader
            if first:
                shared, barrier = c.base + c.shared.key, c.edges.k.full(0)
                self.boxes(c.maps.k, shared, config.qk_boxes, barrier, work.key_block * KEYS, work.key_head)
            stage, use = stage_of(i, config.query_stages)
            c.edges.q.wait_empty(stage, use)
            if leader:
                self.boxes(c.maps.q, c.query(stage), config.qk_boxes, c.edges.q.full(stage), m * ROWS, head)
            if first:
                shared, barrier = c.base + c.shared.value, c.edges.v.full(0)
                self.boxes(c.maps.v, shared, config.v_boxes, barrier, work.key_block * KEYS, work.key_head)
            stage, use = stage_of(i, config.dout_stages)
            c.edges.dout.wait_empty(stage, use)
            if leader:
                self.boxes(c.maps.dout, c.dout(stage), config.v_boxes, c.edges.dout.full(stage), m * ROWS, head)
            head, m = work.next(head, m)
        # The tensor core's last arrivals at these barriers must not come after the CTA's end.
        for i in cutlass.range_constexpr(config.query_stages):
            stage, use = stage_of(steps + i, config.query_stages)
            c.edges.q.wait_empty(stage, use)
        for i in cutlass.range_constexpr(config.dout_stages):
            stage, use = stage_of(steps + i, config.dout_stages)
            c.edges.dout.wait_empty(stage, use)

    def boxes(self, descriptor, shared, count: int, barrier, row, head) -> None:
        """128 rows from ``row`` on of a head, as ``count`` boxes; one thread calls this."""
        ptx.mbarrier_expect(barrier, count * BOX_BYTES)
        for box in range(count):
            coordinates = (Int32(box * BOX_COLUMNS), row, head, self.c.work.batch)
            ptx.tma_load(shared + box * BOX_BYTES, descriptor, coordinates, barrier)

    @cute.jit
    def statistics(self, i, head, m, leader):
        """lse2 and delta of one block."""
        c = self.c
        stage, use = stage_of(i, STAT_STAGES)
        c.edges.stat.wait_empty(stage, use)
        if leader:
            barrier = c.edges.stat.full(stage)
            ptx.mbarrier_expect(barrier, 2 * STAT_BYTES)
            offset = c.work.scratch_block(head, m) * Int64(STAT_BYTES)
            bulk_load(c.stat(stage), c.lse2 + offset, STAT_BYTES, barrier)
            bulk_load(c.stat(stage) + STAT_BYTES, c.delta + offset, STAT_BYTES, barrier)
