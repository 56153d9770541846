"""(DSL) What one CTA of a split kernel works on, decoded once, before the roles part."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, select_

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.backward.ranges import BlockRanges
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.work import Problem
from jax_fa4.kernels.sm100.backward_split.config import RESIDENT, STREAMED, SplitConfig


@dataclass(frozen=True)
class Work(Invariant):
    """A resident block of one head, and the streamed blocks ``first_block`` to ``end_block - 1`` that meet it.

    key_value side: for each of ``heads`` query heads from ``first_head`` on, one after the other. Streamed blocks are
    taken from the last to the first.
    """

    block: Int32  # resident block
    head: Int32  # head of the resident operands
    batch: Int32
    part: Int32
    first_head: Int32  # head of the streamed operands in the first step
    heads: Int32
    query_heads: Int32
    row_blocks: Int32  # blocks of 128 rows in the row statistics
    ranges: BlockRanges
    first_block: Int32
    end_block: Int32

    @classmethod
    def of(cls, config: SplitConfig, problem: Problem) -> Work:
        """Decodes the block index: part fast, then (batch, head) pair of a team, then resident block, then team.

        ``problem.pairs`` counts (batch, head) pairs of the resident operands. On the query side blocks descend: under
        a causal mask the longest come first; on the key_value side those are the first ones.
        """
        rows = problem.seqlen_k if const_expr(config.key_side) else problem.seqlen_q
        blocks = (rows + (RESIDENT - 1)) // RESIDENT
        index = cute.arch.block_idx()[0]
        part = index % config.parts
        index = index // config.parts
        per_team = problem.pairs_together * blocks
        team = index // per_team
        rest = index - team * per_team
        width = cutlass.min(problem.pairs_together, problem.pairs - team * problem.pairs_together)
        block = rest // width
        pair = team * problem.pairs_together + rest - block * width
        query_heads = problem.kv_heads * problem.group
        resident_heads = problem.kv_heads if const_expr(config.key_side) else query_heads
        batch = pair // resident_heads
        head = pair - batch * resident_heads
        q_len, kv_len, offset = problem.seqlen_q, problem.seqlen_k, problem.query_offset
        if const_expr(config.varlen):
            q_len, kv_len, offset, _ = ptx.load_global_vector(problem.batch_info + Int64(batch) * 16)
        tile_m, tile_n = (STREAMED, RESIDENT) if const_expr(config.key_side) else (RESIDENT, STREAMED)
        ranges = BlockRanges(tile_m, tile_n, config.mask, q_len, kv_len, offset, problem.left, problem.right)
        if const_expr(config.key_side):
            first_block, end_block = ranges.query_blocks(block)
            first_head, heads = head * problem.group, problem.group
        else:
            block = blocks - 1 - block
            first_block, end_block = ranges.key_blocks(block)
            first_head, heads = head // problem.group, Int32(1)
        return cls(
            block=block,
            head=head,
            batch=batch,
            part=part,
            first_head=first_head,
            heads=heads,
            query_heads=query_heads,
            row_blocks=(problem.seqlen_q + (RESIDENT - 1)) // RESIDENT,
            ranges=ranges,
            first_block=first_block,
            end_block=end_block,
        )

    @property
    def steps(self) -> Int32:
        """Steps of the CTA; computed where it is asked for."""
        return (self.end_block - self.first_block) * self.heads

    @property
    def any_steps(self) -> Boolean:
        return Boolean(self.end_block > self.first_block)

    def statistic(self, head: Int32, row: Int32) -> Int64:
        """Bytes from the start of lse2 or delta to a query row of a query head."""
        first = Int64(self.batch * self.query_heads + head) * Int64(self.row_blocks * RESIDENT)
        return (first + Int64(row)) * 4

    def first(self) -> tuple[Int32, Int32]:
        """(streamed head, streamed block) of the first step."""
        return self.first_head, self.end_block - 1

    def next(self, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """The step after (head, block)."""
        last = block == self.first_block
        return head + Int32(last), select_(last, self.end_block - 1, block - 1)
