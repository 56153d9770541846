"""(DSL) The two load warps of a CTA in a pair: global memory to shared memory by TMA.

Data flow of the query warp, per part; K and V stay, so that each is loaded once::

    q.empty     -> this CTA's rows of Q      -> q.full      (before it, the first time: K -> k.full)
    qt.empty    -> this CTA's columns of Q   -> qt.full     (after it, the first time: K by columns -> kt.full)

and of the dout warp::

    stat.empty  -> lse2 and delta            -> stat.full    (per block)
    dout.empty  -> this CTA's rows of dO     -> dout.full   (before it, the first time: V -> v.full)
    doutt.empty -> this CTA's columns of dO  -> doutt.full

The full barriers, but for stat's, are the leader's: it expects the bytes of both CTAs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import BOX_BYTES, BOX_COLUMNS, BOX_ROW_BYTES, KEYS, ROWS
from jax_fa4.kernels.sm100.backward.load import LoadRole
from jax_fa4.kernels.sm100.backward_pair.config import CTAS
from jax_fa4.kernels.sm100.backward_pair.context import PairContext


class PairLoadRole(LoadRole):
    """``of_query``: the query warp, or else the dout warp."""

    def __init__(self, context: PairContext, of_query: bool):
        super().__init__(context)
        self.pair = context
        self.of_query = of_query

    @cute.jit
    def run(self):
        c, shape = self.pair, self.pair.shape
        edges, maps, shared = c.edges, c.maps, c.shared
        if cutlass.const_expr(self.of_query):
            resident = (maps.k, shared.key, edges.k)
            boxes, descriptor = c.config.qk_boxes, maps.q
            by_rows, by_columns = (shared.query, edges.q), (shared.query_t, edges.qt)
        else:
            resident = (maps.v, shared.value, edges.v)
            boxes, descriptor = c.config.v_boxes, maps.dout
            by_rows, by_columns = (shared.dout, edges.dout), (shared.dout_t, edges.doutt)
        leader = ptx.elect()
        work = c.work
        head, m = work.first()
        steps = work.steps
        for i in cutlass.range(steps, unroll=1):
            if cutlass.const_expr(not self.of_query):
                self.statistics(i, head, m, leader)
            first = (i == 0) & leader
            if first:
                keys = work.key_block * KEYS
                self.rows(resident[0], resident[1], boxes, BOX_BYTES, resident[2], keys, work.key_head)
            for part in cutlass.range_constexpr(shape.parts):
                row = m * ROWS + part * shape.rows
                by_rows[1].wait_empty(0, i * shape.parts + part)
                if leader:
                    own = row + c.rank * shape.own_rows
                    self.rows(descriptor, by_rows[0], boxes, shape.row_box_bytes, by_rows[1], own, head)
                by_columns[1].wait_empty(0, i * shape.parts + part)
                if leader:
                    self.columns(by_columns[0], by_columns[1], row, head)
                if first & Boolean(part == 0):
                    self.pair_keys()
            head, m = work.next(head, m)
        # The tensor core's last arrivals at these barriers must not come after the CTA's end.
        by_rows[1].wait_empty(0, steps * shape.parts)
        by_columns[1].wait_empty(0, steps * shape.parts)

    def pair_keys(self) -> None:
        """K by columns, in the query warp; one thread calls this."""
        c, keys = self.pair, CTAS * KEYS
        if self.of_query:
            self.own_columns(
                c.column_maps.kt, c.shared.key_t, keys, c.edges.kt, c.work.order_block * keys, c.work.key_head
            )

    def columns(self, offset: int, edge, row, head) -> None:
        """This CTA's columns of a part of Q or dO; one thread calls this."""
        c, rows = self.pair, self.pair.shape.rows
        if self.of_query:
            self.own_columns(c.column_maps.qt, offset, rows, edge, row, head)
            return
        self.expect(edge.full(0), rows * BOX_ROW_BYTES)
        coordinates = (c.rank * BOX_COLUMNS, row, head, c.work.batch)
        ptx.tma_load(c.base + offset, c.column_maps.doutt, coordinates, edge.full(0), CTAS)

    def own_columns(self, descriptor, offset: int, count: int, edge, row, head) -> None:
        """This CTA's columns of ``count`` rows of K or Q from ``row`` on."""
        c, shape = self.pair, self.pair.shape
        size = count * shape.column_row_bytes
        self.expect(edge.full(0), shape.column_boxes * size)
        for box in range(shape.column_boxes):
            column = c.rank * shape.columns + box * shape.column_box
            coordinates = (column, row, head, c.work.batch)
            ptx.tma_load(c.base + (offset + box * size), descriptor, coordinates, edge.full(0), CTAS)

    def rows(self, descriptor, offset: int, count: int, size: int, edge, row, head) -> None:
        """All columns of the rows from ``row`` on, as ``count`` boxes of ``size`` bytes; one thread calls this."""
        self.expect(edge.full(0), count * size)
        for box in range(count):
            coordinates = (Int32(box * BOX_COLUMNS), row, head, self.c.work.batch)
            ptx.tma_load(self.c.base + (offset + box * size), descriptor, coordinates, edge.full(0), CTAS)

    @cute.jit
    def expect(self, barrier, own_bytes: cutlass.Constexpr):
        """Announces the bytes of a load, both CTAs' of them, in the leader."""
        if self.pair.rank == 0:
            ptx.mbarrier_expect(barrier, own_bytes * CTAS)
