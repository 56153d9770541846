"""(DSL) Which output tiles a CTA computes, and in which order.

A CTA walks indices; every role of a kernel walks the same ones. Heads that share K and V are neighbours in each order,
and those that run at the same time fit the L2 cache together.

- *plain*: (batch, head) slow, query tile fast, in sections: the K and V of one section fit the L2 cache together, its
  query tiles are interleaved over its heads. With ``longest_last``, later tiles come first: they see more keys under a
  causal mask, and short ones should fill the tail. Index i, then i + gridDim.x.
- *paired*: for a causal mask, where the lengths of tile u and of tile ``tiles_m - 1 - u`` add up to the same: a CTA
  takes such a pair from two neighbouring heads, the long one first, so that a fixed share of pairs is a fair one. The
  last head of an odd number has no partner. Index ``2 * pair + half``.
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
    section: Int32  # (batch, head) pairs of one section, >= 1 (plain order)
    total: Int32  # indices: tiles_m * batch_heads, or twice the pairs


def decode(order: TileOrder, index: Int32, longest_last: bool) -> tuple[Int32, Int32, Int32]:
    """(query tile, head, batch) of an index in the plain order."""
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
    """The indices of one CTA, and what they mean."""

    def __init__(self, order: TileOrder, paired: bool, longest_last: bool):
        self.order, self.paired, self.longest_last = order, paired, longest_last
        self.ctas, _, _ = cute.arch.grid_dim()
        self.cta, _, _ = cute.arch.block_idx()

    def first(self) -> Int32:
        return Int32(self.cta) * (2 if const_expr(self.paired) else 1)

    def holds(self, index: Int32) -> Boolean:
        """Whether an index is work; if not, the CTA is done."""
        return index < self.order.total

    def next(self, index: Int32) -> Int32:
        """The index after ``index``."""
        if const_expr(not self.paired):
            return index + self.ctas
        pair, half = index >> 1, index & 1
        alone = Int32(pair // self.order.tiles_m * 2 + 1 >= self.order.batch_heads)
        leave = half | alone
        return (index + 1) * (1 - leave) + 2 * (pair + self.ctas) * leave

    def tile(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(query tile, head, batch) of an index that is work."""
        return self._paired_tile(index) if const_expr(self.paired) else decode(self.order, index, self.longest_last)

    def _paired_tile(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        pair, half = index >> 1, index & 1
        heads = pair // self.order.tiles_m
        rank = pair - heads * self.order.tiles_m
        batch_head = 2 * heads + half
        batch = batch_head // self.order.heads
        tile = half * rank + (1 - half) * (self.order.tiles_m - 1 - rank)
        return tile, batch_head - batch * self.order.heads, batch
