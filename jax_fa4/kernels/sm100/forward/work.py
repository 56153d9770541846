"""(DSL) What one CTA works on: the run-time problem, and the key blocks of a tile.

Every role computes the same numbers from the same inputs, so that no role can disagree with another on the work list.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.common.block_range import Lengths, block_range
from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.common.tile_order import TileOrder, decode
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import KEYS, ROWS, ForwardConfig


@dataclass(frozen=True)
class Tile(Invariant):
    """One work item: the query tiles of all stages for one head (or packed group of heads), and their key blocks.

    The CTAs of a pair have the same key blocks and each its own query tiles.

    ``token`` is the first query position; blocks ``first_block`` to ``end_block - 1`` are visited from the last to the
    first. ``blocks`` is 0 where no row sees a key.
    """

    batch: Int32
    head: Int32
    token: Int32
    lengths: Lengths
    first_block: Int32
    end_block: Int32
    blocks: Int32


@dataclass(frozen=True)
class Problem(Invariant):
    """Run-time integers of a call (int32), the same for every CTA.

    Without packing a tile's row is one query position of one head. With packing (``pack_gqa``) row r is position
    ``r // group`` of head ``r % group`` of the group that shares a key and value head; ``box_tokens`` positions fill
    a tile of 128 rows (up to a few unused ones at its end). ``left``, ``right``, ``query_offset``: the affine mask's
    bounds; ``batch_info`` (global address, or None): int32 (batch, 4) with query length, key length, offset, 0.
    ``rank``: the CTA's number in its pair.
    """

    config: ForwardConfig
    order: TileOrder
    group: Int32
    box_tokens: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    query_offset: Int32
    left: Int32
    right: Int32
    batch_info: Int64 | None
    rank: Int32 | int

    def tile(self, index: Int32) -> Tile:
        """Work item ``index`` of ``order.total``."""
        mask = self.config.mask
        tile, head, batch = decode(self.order, index, longest_last=mask == "causal")
        if const_expr(self.config.varlen):
            q_len, kv_len, offset, _ = ptx.load_global_vector(self.batch_info + Int64(batch) * 16)
        else:
            q_len, kv_len, offset = self.seqlen_q, self.seqlen_k, self.query_offset
        lengths = Lengths(q_len, kv_len, offset, self.left, self.right)
        own = self.config.q_stages * self.box_tokens
        tokens = self.config.ctas * own
        blocks = block_range(mask, KEYS, tile * tokens, tokens, lengths)
        token = tile * tokens + self.rank * own
        return Tile(batch, head, token, lengths, blocks.begin, blocks.end, blocks.end - blocks.begin)

    def kv_head(self, head: Int32) -> Int32:
        return head if const_expr(self.config.pack_gqa) else head // self.group

    @property
    def query_heads(self) -> Int32:
        """Heads of the query, unpacked."""
        return self.order.heads * self.group if const_expr(self.config.pack_gqa) else self.order.heads

    def first_token(self, tile: Tile, stage) -> Int32:
        """First query position of a stage's tile."""
        return tile.token + stage * self.box_tokens

    @property
    def box_rows(self) -> Int32 | int:
        """Rows of a 128-row tile that hold queries."""
        return self.box_tokens * self.group if const_expr(self.config.pack_gqa) else ROWS

    def locate(self, tile: Tile, stage, row: Int32) -> tuple[Int32, Int32]:
        """(query position, query head) of a row of a stage's tile."""
        first = self.first_token(tile, stage)
        if const_expr(not self.config.pack_gqa):
            return first + row, tile.head
        inside = row // self.group
        return first + inside, tile.head * self.group + row - inside * self.group
