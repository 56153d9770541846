"""Closed-form block ranges of affine masks for one batch entry, traced.

Query block ``m`` and key block ``n``, below the block counts of the batch entry's lengths, meet iff

    (m + 1) tile_m - 1 + offset + right >= n tile_n    and    m tile_m + offset - left <= (n + 1) tile_n - 1.

Lengths enter through the block counts only, so that both directions of the question (which query blocks for a key
block, which key blocks for a query block) solve the same two inequalities and can never disagree. The order in which
key blocks add to a dQ block relies on that.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


class BlockRanges:
    """Block ranges for tiles of ``tile_m`` query rows by ``tile_n`` keys.

    ``mask`` is the spec's mask kind; ``left`` and ``right`` are used for ``"window"`` only.
    """

    def __init__(
        self,
        tile_m: int,
        tile_n: int,
        mask: str,
        q_len: Int32,
        kv_len: Int32,
        offset: Int32,
        left: Int32 | None,
        right: Int32 | None,
    ) -> None:
        self.tile_m, self.tile_n, self.mask = tile_m, tile_n, mask
        self.q_len, self.kv_len, self.offset = q_len, kv_len, offset
        self.left = left if mask == "window" else None
        self.right = {"none": None, "causal": Int32(0), "window": right}[mask]
        self.query_block_count = cute.ceil_div(q_len, tile_m)
        self.key_block_count = cute.ceil_div(kv_len, tile_n)

    def query_blocks(self, n: Int32) -> tuple[Int32, Int32]:
        """Half-open range of query blocks that meet key block ``n``; empty ranges have equal ends."""
        low, high = Int32(0), self.query_block_count
        if const_expr(self.right is not None):
            low = _blocks(n * self.tile_n - self.offset - self.right, self.tile_m)
        if const_expr(self.left is not None):
            last_row = (n + 1) * self.tile_n - 1 - self.offset + self.left
            high = cutlass.min(high, _blocks(last_row + self.tile_m, self.tile_m))
        high = choose(n < self.key_block_count, high, Int32(0))
        return low, cutlass.max(low, high)

    def key_blocks(self, m: Int32) -> tuple[Int32, Int32]:
        """Half-open range of key blocks that meet query block ``m``; empty ranges have equal ends."""
        low, high = Int32(0), self.key_block_count
        if const_expr(self.left is not None):
            low = _blocks(m * self.tile_m + self.offset - self.left, self.tile_n)
        if const_expr(self.right is not None):
            last_key = (m + 1) * self.tile_m - 1 + self.offset + self.right
            high = cutlass.min(high, _blocks(last_key + self.tile_n, self.tile_n))
        high = choose(m < self.query_block_count, high, Int32(0))
        return low, cutlass.max(low, high)

    def needs_mask(self, m: Int32, n: Int32) -> cutlass.Boolean:
        """Whether some (query, key) pair of the two blocks is hidden. Query rows past the end do not count: their
        ``lse2`` hides them."""
        partial_block = (n + 1) * self.tile_n > self.kv_len
        if const_expr(self.right is not None):
            partial_block = partial_block | (m * self.tile_m + self.offset + self.right < (n + 1) * self.tile_n - 1)
        if const_expr(self.left is not None):
            partial_block = partial_block | ((m + 1) * self.tile_m - 1 + self.offset - self.left > n * self.tile_n)
        return partial_block

    def row_bounds(self, key: Int32, m: Int32) -> tuple[Int32, Int32]:
        """Half-open range of rows, relative to the start of query block ``m``, that see ``key``."""
        low, high = Int32(0), Int32(self.tile_m)
        if const_expr(self.right is not None):
            low = key - self.offset - self.right - m * self.tile_m
        if const_expr(self.left is not None):
            high = key - self.offset + self.left + 1 - m * self.tile_m
        high = choose(key < self.kv_len, high, Int32(-(2**30)))
        return low, high

    def column_bounds(self, row: Int32, n: Int32) -> tuple[Int32, Int32]:
        """Half-open range of keys, relative to the start of key block ``n``, that query ``row`` sees."""
        low, high = Int32(0), self.kv_len
        if const_expr(self.right is not None):
            high = cutlass.min(high, row + self.offset + self.right + 1)
        if const_expr(self.left is not None):
            low = row + self.offset - self.left
        return low - n * self.tile_n, high - n * self.tile_n


def _blocks(position: Int32, tile: int) -> Int32:
    """Blocks of ``tile`` that end at or before ``position`` (0 for negative positions)."""
    return cutlass.max(position, Int32(0)) // tile


@cute.jit
def choose(condition: cutlass.Boolean, yes: Int32, no: Int32) -> Int32:
    """``yes`` where ``condition`` holds, else ``no``."""
    return yes if condition else no
