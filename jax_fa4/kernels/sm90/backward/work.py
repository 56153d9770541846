"""What one CTA of a backward kernel does, decoded from its block index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm90.backward.ranges import BlockRanges, choose
from jax_fa4.kernels.sm90.backward.values import Values


@dataclass(frozen=True)
class Work:
    """What one CTA does: a key block of one key head, and the query blocks of its group that meet it.

    Blocks are taken from the last to the first, each for all heads of the group before the next. Head by head, CTAs
    that wait for each other's dQ would all be as slow as the one with the most blocks: under a causal mask the next
    head begins for all of them where it begins for the first key block.
    """

    key_block: Int32
    key_head: Int32
    batch: Int32
    group: Int32
    query_heads: Int32
    row_blocks: Int32
    ranges: BlockRanges
    first_block: Int32
    end_block: Int32

    @property
    def steps(self) -> Int32:
        return (self.end_block - self.first_block) * self.group

    @property
    def first_head(self) -> Int32:
        return self.key_head * self.group

    def scratch_block(self, head: Int32, m: Int32) -> Int32:
        """Index of a query block in the scratch buffers."""
        return (self.batch * self.query_heads + head) * self.row_blocks + m

    def first(self) -> tuple[Int32, Int32]:
        """(query head within the group, query block) of the first step."""
        return Int32(0), self.end_block - 1

    def next(self, member: Int32, m: Int32) -> tuple[Int32, Int32]:
        """The step after (query head within the group, query block)."""
        following = member + 1
        last = following == self.group
        return choose(last, Int32(0), following), m - Int32(last)


def key_block_work(c: Any, index: Int32, rows_q: Int32, key: cute.Tensor, values: Values) -> Work:
    """Decodes the number of a tile (key block of one key head).

    (batch, key head) pairs go in teams of ``pairs_together``. In a team the key block is the slow index, ascending:
    CTAs that run at the same time mostly work on different heads, and a dQ block takes its key blocks in the order
    in which their CTAs start, so that a CTA waits only for CTAs started before it. For causal masks this is also
    longest first. Query blocks go down: under a causal mask or a window the last one that a key block meets is
    never met earlier by the key block before it, so a CTA that starts together with its predecessor in the order
    runs behind it and does not wait for it to come by.
    """
    pairs_together = values.pairs_together
    rows_k = key.shape[0]
    key_blocks = cute.ceil_div(rows_k, c.tile_n)
    team = index // (pairs_together * key_blocks)
    rest = index - team * pairs_together * key_blocks
    team_size = cutlass.min(pairs_together, values.pairs - team * pairs_together)
    key_block = rest // team_size
    pair = team * pairs_together + rest - key_block * team_size
    key_heads = key.shape[2]
    batch = pair // key_heads
    key_head = pair - batch * key_heads
    ranges = values.ranges(c, batch, rows_q, rows_k)
    first_block, end_block = ranges.query_blocks(key_block)
    return Work(
        key_block=key_block,
        key_head=key_head,
        batch=batch,
        group=values.group,
        query_heads=key_heads * values.group,
        row_blocks=cute.ceil_div(rows_q, c.row_padding) * (c.row_padding // c.tile_m),
        ranges=ranges,
        first_block=first_block,
        end_block=end_block,
    )
