"""(DSL) What every role of the Hopper forward knows: run-time scalars, and where things lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.kernels.common.block_range import BlockRange, Lengths, block_range
from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.common.ring import Ring
from jax_fa4.kernels.common.tile_order import TileOrder, WorkList
from jax_fa4.kernels.sm90.forward.layout import BARRIER, ROWS, ForwardLayout


@dataclass(frozen=True)
class Problem(Invariant):
    """Run-time scalars of a launch and the rules that follow from them. All counts are int32.

    ``box_tokens``: query positions in one warpgroup's box: 64, or with packed GQA ``64 // group`` positions of
    ``group`` heads each (then a row of the tile is ``position * group + head in group``).
    """

    layout: ForwardLayout
    order: TileOrder
    scale_log2: Float32  # softmax scale * log2(e)
    seqlen_q: Int32  # rows of the query operand
    seqlen_k: Int32
    query_offset: Int32
    left: Int32
    right: Int32
    group: Int32  # query heads per key/value head
    box_tokens: Int32
    lse: cute.Pointer  # float32 (batch, heads, seqlen_q)
    batch_info: Any  # int32 (batch, 4) or None

    @property
    def packed(self) -> bool:
        return self.layout.spec.pack_gqa

    def work_list(self) -> WorkList:
        """What this CTA computes."""
        return WorkList(self.order, self.layout.paired, self.layout.spec.mask == "causal")

    def lengths(self, batch: Int32) -> Lengths:
        """Lengths and mask bounds of one batch element."""
        q_len, kv_len, offset = self.seqlen_q, self.seqlen_k, self.query_offset
        if const_expr(self.layout.spec.varlen):
            info = cute.make_tensor(self.batch_info + batch * 4, cute.make_layout(4))
            q_len, kv_len, offset = info[0], info[1], info[2]
        return Lengths(q_len, kv_len, offset, self.left, self.right)

    def box_rows(self) -> Int32 | int:
        """Rows of one warpgroup's box that hold queries."""
        return self.box_tokens * self.group if const_expr(self.packed) else ROWS

    def kv_head(self, head: Int32) -> Int32:
        return head if const_expr(self.packed) else head // self.group

    def first_row(self, tile: Int32, warpgroup: int | Int32) -> Int32:
        """Query position of a warpgroup's first row."""
        return (tile * self.layout.warpgroups + warpgroup) * self.box_tokens

    def warpgroup_blocks(self, row: Int32, lengths: Lengths) -> BlockRange:
        """Key blocks that one warpgroup's rows see: a part of the tile's."""
        spec = self.layout.spec
        return block_range(spec.mask, spec.tile.n, row, Int32(self.box_tokens), lengths)

    def tile_blocks(self, tile: Int32, lengths: Lengths) -> BlockRange:
        """Key blocks of a tile: what the rings carry for all of its warpgroups."""
        spec = self.layout.spec
        rows = self.box_tokens * self.layout.warpgroups
        return block_range(spec.mask, spec.tile.n, self.first_row(tile, 0), rows, lengths)

    def row_coordinates(self, column, row: Int32, head: Int32, batch: Int32) -> tuple:
        """TMA coordinates in the map of Q or O."""
        if const_expr(self.packed):
            return (column, 0, row, head, batch)
        return (column, row, head, batch)


class Shared(Invariant):
    """Pointers into dynamic shared memory and the barrier rings, as :class:`ForwardLayout` places them."""

    def __init__(self, layout: ForwardLayout, base: cute.Pointer):
        self.layout = layout
        self.base = base
        self.k = base + layout.k_offset
        self.v = base + layout.v_offset
        stages = layout.spec.tile.stages
        self.k_ring = Ring(self._barriers(layout.k_barriers), stages)
        self.v_ring = Ring(self._barriers(layout.v_barriers), stages)
        self.q_rings = [
            Ring(self._barriers(layout.q_barriers + 2 * BARRIER * warpgroup), 1)
            for warpgroup in range(layout.warpgroups)
        ]

    def _barriers(self, offset: int) -> cute.Pointer:
        return cute.recast_ptr(self.base + offset, dtype=Int64)

    def q_slot(self, warpgroup: int | Int32) -> cute.Pointer:
        """A warpgroup's Q slot."""
        return self.base + self.layout.q_offset + warpgroup * self.layout.q_bytes

    def o_slot(self, warpgroup: int | Int32) -> cute.Pointer:
        """A warpgroup's O slot (the Q slot where there is no room for both)."""
        if const_expr(not self.layout.output_slot):
            return self.q_slot(warpgroup)
        return self.base + self.layout.o_offset + warpgroup * self.layout.o_bytes

    def q_ring(self, warpgroup: Int32) -> Ring:
        """Q barriers of a warpgroup given at run time."""
        return Ring(self._barriers(self.layout.q_barriers + 2 * BARRIER * warpgroup), 1)
