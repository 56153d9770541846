"""(DSL) What one CTA works on: a block of keys of one key head, and the steps that it takes.

Decoded once, before the roles part, so that no role can disagree with another on the work list.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, select_

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.backward.ranges import BlockRanges
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import KEYS, ROWS, BackwardConfig


@dataclass(frozen=True)
class Problem(Invariant):
    """Run-time integers of a call (int32): lengths, query heads per key head, the affine mask, and the order of CTAs.

    ``pairs`` (batch, key head) pairs go in teams of ``pairs_together``. ``batch_info`` (global address, or None): int32
    (batch, 4) with query length, key length, offset, 0.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    kv_heads: Int32
    group: Int32
    pairs: Int32
    pairs_together: Int32
    query_offset: Int32
    left: Int32 | None
    right: Int32 | None
    batch_info: Int64 | None


@dataclass(frozen=True)
class Work(Invariant):
    """A key block, and the query blocks ``first_block`` to ``end_block - 1`` of each head of its group.

    ``key_block`` counts blocks of the CTA's ``KEYS`` keys, and ``mask_ranges`` is about them. In a pair of CTAs, both
    take the steps of the pair's keys: ``order_block`` counts blocks of those, ``ranges`` is about them, and dQ is added
    in their order. For a single CTA the two are the same.

    Blocks are taken from the last to the first, each for all heads of the group in ascending order before the next. dK
    and dV are therefore sums in one fixed order. Head by head, CTAs that wait for each other's dQ would all be as slow
    as the one with the most blocks: under a causal mask the next head begins for all of them where it begins for the
    first key block.
    """

    key_block: Int32
    order_block: Int32
    key_head: Int32
    batch: Int32
    first_head: Int32
    query_heads: Int32
    row_blocks: Int32
    ranges: BlockRanges
    mask_ranges: BlockRanges
    first_block: Int32
    end_block: Int32
    group: Int32

    @classmethod
    def of(cls, config: BackwardConfig, problem: Problem, rank: Int32 | int = 0) -> Work:
        """Decodes the block index; ``rank``: the CTA's number in its pair.

        Within a team the key block is the slow index, ascending: CTAs that run at the same time mostly work on
        different heads, and a block of dQ takes its key blocks in the order in which their CTAs start, so that a CTA
        waits only for CTAs that started before it.
        """
        keys = KEYS * config.ctas
        key_blocks = (problem.seqlen_k + (keys - 1)) // keys
        index = cute.arch.block_idx()[0]
        if const_expr(config.ctas == 2):
            index = index >> 1
        per_team = problem.pairs_together * key_blocks
        team = index // per_team
        rest = index - team * per_team
        width = cutlass.min(problem.pairs_together, problem.pairs - team * problem.pairs_together)
        order_block = rest // width
        pair = team * problem.pairs_together + rest - order_block * width
        batch = pair // problem.kv_heads
        key_head = pair - batch * problem.kv_heads
        q_len, kv_len, offset = problem.seqlen_q, problem.seqlen_k, problem.query_offset
        if const_expr(config.varlen):
            q_len, kv_len, offset, _ = ptx.load_global_vector(problem.batch_info + Int64(batch) * 16)
        affine = (config.mask, q_len, kv_len, offset, problem.left, problem.right)
        ranges = mask_ranges = BlockRanges(ROWS, keys, *affine)
        key_block = order_block
        if const_expr(config.ctas == 2):
            mask_ranges = BlockRanges(ROWS, KEYS, *affine)
            key_block = order_block * 2 + rank
        first_block, end_block = ranges.query_blocks(order_block)
        return cls(
            key_block=key_block,
            order_block=order_block,
            key_head=key_head,
            batch=batch,
            first_head=key_head * problem.group,
            query_heads=problem.kv_heads * problem.group,
            row_blocks=(problem.seqlen_q + (ROWS - 1)) // ROWS,
            ranges=ranges,
            mask_ranges=mask_ranges,
            first_block=first_block,
            end_block=end_block,
            group=problem.group,
        )

    @property
    def steps(self) -> Int32:
        """Steps of the CTA. Computed where it is asked for: one register fewer that lives through all roles."""
        return (self.end_block - self.first_block) * self.group

    @property
    def any_steps(self) -> Boolean:
        return Boolean(self.end_block > self.first_block)

    def scratch_block(self, head: Int32, m: Int32) -> Int64:
        """Index of a query block of a query head in the scratch buffers."""
        return Int64(self.batch * self.query_heads + head) * Int64(self.row_blocks) + Int64(m)

    def first(self) -> tuple[Int32, Int32]:
        """(query head, query block) of the first step."""
        return self.first_head, self.end_block - 1

    def next(self, head: Int32, m: Int32) -> tuple[Int32, Int32]:
        """The step after (head, m)."""
        last = head + 1 == self.first_head + self.group
        return select_(last, self.first_head, head + 1), m - Int32(last)


def stage_of(step: Int32, stages: int) -> tuple[Int32, Int32]:
    """(stage, use) of a ring at a step."""
    if const_expr(stages == 1):
        return Int32(0), step
    if const_expr(stages == 2):
        return step & 1, step >> 1
    return step % stages, step // stages
