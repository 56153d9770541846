"""(DSL) Key blocks that a query tile visits under an affine mask, in closed form.

Query row i may see key j iff ``j < kv_len``, ``i < q_len`` and ``i + offset - left <= j <= i + offset + right`` (the
parts that the mask kind has). Blocks are visited from the last to the first.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, const_expr


class Lengths(NamedTuple):
    """Run-time mask parameters of one batch element, int32."""

    q_len: Int32
    kv_len: Int32
    offset: Int32
    left: Int32  # used by mask "window" only
    right: Int32


class BlockRange(NamedTuple):
    """Blocks ``[begin, end)``, of which ``[full_begin, full_end)`` need no mask.

    begin <= full_begin <= full_end <= end.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32


def block_range(mask: str, tile_n: int, row: Int32, rows: Int32, lengths: Lengths) -> BlockRange:
    """Blocks of ``tile_n`` keys for query rows ``[row, row + rows)``; empty if no row is below ``q_len``."""
    last_row = cutlass.min(row + rows, lengths.q_len) - 1
    limit, full_limit = lengths.kv_len, lengths.kv_len
    if const_expr(mask != "none"):
        right = lengths.right if const_expr(mask == "window") else 0
        limit = cutlass.min(limit, last_row + lengths.offset + right + 1)
        full_limit = cutlass.min(full_limit, row + lengths.offset + right + 1)
    limit = cutlass.max(limit, 0)
    end = (limit + tile_n - 1) // tile_n * Int32(last_row >= row)
    begin, full_begin = Int32(0), Int32(0)
    if const_expr(mask == "window"):
        begin = cutlass.max(row + lengths.offset - lengths.left, 0) // tile_n
        full_begin = (cutlass.max(last_row + lengths.offset - lengths.left, 0) + tile_n - 1) // tile_n
    begin = cutlass.min(begin, end)
    full_end = cutlass.max(cutlass.min(cutlass.max(full_limit, 0) // tile_n, end), begin)
    full_begin = cutlass.min(cutlass.max(full_begin, begin), full_end)
    return BlockRange(begin, full_begin, full_end, end)
