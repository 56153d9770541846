"""(DSL) Which output tile a work index means.

Heads that share K and V are neighbours, and (batch, head) pairs are taken in sections whose K and V fit the L2 cache
together: all query tiles of a section come before the next section. Inside a section the query tile is the slow index
and counts down under a causal mask, so that long tiles start first and short ones fill the tail.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from jax_fa4.kernels.common.invariant import Invariant


class TileOrder(NamedTuple):
    """Run-time description of the work list: all int32, the same in every role of a kernel."""

    tiles_m: Int32  # query tiles of one head
    heads: Int32  # heads of one batch element
    batch_heads: Int32  # batch * heads
    section: Int32  # (batch, head) pairs of one section, >= 1
    total: Int32  # tiles_m * batch_heads


def decode(order: TileOrder, index: Int32, longest_last: bool) -> tuple[Int32, Int32, Int32]:
    """(query tile, head, batch) of a work index in [0, total).

    ``longest_last``: later query tiles see more keys (a causal mask), so the tile index counts down.
    """
    per_section = order.section * order.tiles_m
    section = index // per_section
    rest = index - section * per_section
    first = section * order.section
    width = cutlass.min(order.section, order.batch_heads - first)
    rank = rest // width
    batch_head = first + rest - rank * width
    batch = batch_head // order.heads
    tile = order.tiles_m - 1 - rank if const_expr(longest_last) else rank
    return tile, batch_head - batch * order.heads, batch


class WorkList(Invariant):
    """Work indices of one CTA: round r takes the r-th run of gridDim.x indices, every other round backwards.

    With tiles in order of falling length, going back and forth evens out what the CTAs get.
    """

    def __init__(self, order: TileOrder):
        self.total = order.total
        self.ctas, _, _ = cute.arch.grid_dim()
        self.cta, _, _ = cute.arch.block_idx()

    def first(self) -> Int32:
        return Int32(self.cta)

    def holds(self, index: Int32) -> Boolean:
        """Whether an index is work; if not, the CTA is done."""
        return index < self.total

    def next(self, index: Int32) -> Int32:
        """Index of the following round."""
        back = (index // self.ctas) & 1
        return index + (1 - back) * (2 * self.ctas - 1 - 2 * self.cta) + back * (2 * self.cta + 1)
