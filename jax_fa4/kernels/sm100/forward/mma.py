"""(DSL) The MMA warp: both products of every key block, in one order, from one elected lane.

Data flow, paired (block i counts from the first one processed; products complete in the order of issue)::

    q.full, kv.full -> S[0] = Q[0] K(0)^T, S[1] = Q[1] K(0)^T  -> s.full, kv.empty
    for each block i, for each stage:
      kv.full, o.empty, p_early.full -> O += P V(i), first three quarters of the keys
      p_late.full                    -> O += P V(i), last quarter                      -> o.full
      kv.full                        -> S = Q K(i+1)^T                                 -> s.full

so that one stage's softmax runs while the tensor core works for the other stage. Wide: S(i+1) goes into the other
buffer before O += P V(i), so that the tensor core works on while the softmax does.

``o.empty`` is awaited for each block: the accumulator has been rescaled, or, for a tile's first block, the previous
tile's result has been read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward import tmem
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, EARLY_STEPS, K_STEP, KEYS, ROWS
from jax_fa4.kernels.sm100.forward.context import Context
from jax_fa4.kernels.sm100.forward.descriptors import high_word, instruction_descriptor, low_word
from jax_fa4.kernels.sm100.forward.pipeline import take_slots

STEPS_PER_BOX = BOX_COLUMNS // K_STEP
STEP_BYTES = K_STEP * 2
"""K-major operands: bytes from one K step to the next within a swizzled row."""


class MmaRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context
        config = context.config
        rows = ROWS * config.ctas
        self.high = high_word(stride_bytes=8 * config.box_row_bytes)
        self.score_instruction = instruction_descriptor(config.dtype, rows, KEYS, b_is_mn_major=False)
        self.output_instruction = instruction_descriptor(
            config.dtype, rows, config.accumulator_columns, b_is_mn_major=True
        )

    @cute.jit
    def run(self):
        c = self.c
        leader = ptx.elect()
        index = c.scheduler.first()
        asked = Int32(0)
        slot = Int32(0)
        use = Int32(0)
        tiles = Int32(0)
        block = Int32(0)
        while index < c.problem.order.total:
            tile = c.problem.tile(index)
            if tile.blocks > 0:
                if cutlass.const_expr(c.config.paired):
                    slot, use, block = self.paired(tile.blocks, slot, use, tiles, block, leader)
                else:
                    slot, use, block = self.wide(tile.blocks, slot, use, tiles, block, leader)
                tiles = tiles + 1
            index, asked = c.scheduler.next(index, asked)

    @cute.jit
    def paired(self, blocks, slot, use, tiles, block, leader):
        """One tile of two stages; ``tiles`` and ``block`` count what came before. Returns slot, use, block."""
        c = self.c
        stages = c.config.kv_stages
        keys, slot, use = take_slots(slot, use, c.config.k_chunks, stages)
        for stage in cutlass.range_constexpr(2):
            c.edges.q.wait_full(stage, tiles)
            self.scores(stage, stage, keys, leader, wait=stage == 0)
        self.release(keys, leader)
        started = Int32(0)
        for i in cutlass.range(blocks, unroll=1):
            more = Boolean(i + 1 < blocks)
            values, slot, use = take_slots(slot, use, c.config.v_chunks, stages)
            if not more:
                self.release_queries(leader)
            self.output(0, 0, values, block, block, started, leader, wait=True)
            if more:
                keys, _, _ = take_slots(slot, use, c.config.k_chunks, stages)
                self.scores(0, 0, keys, leader, wait=True)
            self.output(1, 1, values, block, block, started, leader, wait=False)
            self.release(values, leader)
            if more:
                keys, slot, use = take_slots(slot, use, c.config.k_chunks, stages)
                self.scores(1, 1, keys, leader, wait=False)
                self.release(keys, leader)
            started = Int32(1)
            block = block + 1
        return slot, use, block

    @cute.jit
    def wide(self, blocks, slot, use, tiles, block, leader):
        """One tile of one stage; score buffers alternate with ``block``. Returns slot, use, block."""
        c = self.c
        stages = c.config.kv_stages
        keys, slot, use = take_slots(slot, use, c.config.k_chunks, stages)
        c.edges.q.wait_full(0, tiles)
        self.scores(0, block & 1, keys, leader, wait=True)
        self.release(keys, leader)
        started = Int32(0)
        for i in cutlass.range(blocks, unroll=1):
            if i + 1 < blocks:
                keys, slot, use = take_slots(slot, use, c.config.k_chunks, stages)
                self.scores(0, (block + 1) & 1, keys, leader, wait=True)
                self.release(keys, leader)
            else:
                self.release_queries(leader)
            values, slot, use = take_slots(slot, use, c.config.v_chunks, stages)
            self.output(0, block & 1, values, block >> 1, block, started, leader, wait=True)
            self.release(values, leader)
            started = Int32(1)
            block = block + 1
        return slot, use, block

    @cute.jit
    def scores(self, stage: cutlass.Constexpr, buffer, keys, leader, *, wait: cutlass.Constexpr):
        """S[buffer] = Q[stage] K^T; ``keys`` are the ring positions of K's chunks, awaited if ``wait``."""
        c = self.c
        config = c.config
        d = Int32(tmem.scores(config, buffer))
        q = low_word(c.base + c.shared.q + stage * config.q_bytes)
        for chunk in cutlass.range_constexpr(config.k_chunks):
            slot, use = keys[chunk]
            if cutlass.const_expr(wait):
                c.edges.kv.wait_full(slot, use)
                ptx.tmem_fence_after()
            k = low_word(c.slot_address(slot))
            if leader:
                first = chunk * config.qk_steps_per_chunk
                for step in cutlass.range_constexpr(first, min(first + config.qk_steps_per_chunk, config.qk_steps)):
                    ptx.mma_shared(
                        d,
                        q,
                        k,
                        step > 0,
                        high_a=self.high,
                        high_b=self.high,
                        offset_a=k_major_offset(step, ROWS * config.box_row_bytes) >> 4,
                        offset_b=k_major_offset(step - first, config.k_keys * config.box_row_bytes) >> 4,
                        instruction=self.score_instruction,
                        ctas=config.ctas,
                    )
        if leader:
            ptx.mma_commit(c.edges.s.full(buffer), c.config.ctas)

    @cute.jit
    def output(
        self,
        stage: cutlass.Constexpr,
        buffer,
        values,
        buffer_use,
        block,
        started,
        leader,
        *,
        wait: cutlass.Constexpr,
    ):
        """O[stage] (+)= P[buffer] V, early part as soon as three quarters of P are there.

        ``buffer_use`` and ``block`` count the uses of the buffer and of the accumulator, ``started`` is 0 for the
        tile's first block (O starts from zero), ``values`` are the ring positions of V's chunks.
        """
        c = self.c
        config = c.config
        keys = config.v_keys_per_chunk
        d = Int32(tmem.accumulator(config, stage))
        p = Int32(tmem.probabilities(config, buffer))
        for step in cutlass.range_constexpr(KEYS // K_STEP):
            chunk, inside = divmod(step, config.pv_steps_per_chunk)
            slot, use = values[chunk]
            if cutlass.const_expr(wait and inside == 0):
                c.edges.kv.wait_full(slot, use)
            if cutlass.const_expr(step == 0):
                c.edges.o.wait_empty(stage, block)
                c.edges.p_early.wait_full(buffer, buffer_use)
                ptx.tmem_fence_after()
            if cutlass.const_expr(step == EARLY_STEPS):
                c.edges.p_late.wait_full(buffer, buffer_use)
                ptx.tmem_fence_after()
            # MN-major V: 8 keys are one 1024-byte swizzle atom, boxes of 64 columns follow each other.
            v = low_word(c.slot_address(slot), leading_bytes=keys * config.box_row_bytes)
            accumulate = started if cutlass.const_expr(step == 0) else Int32(1)
            if leader:
                ptx.mma_tmem(
                    d,
                    p,
                    v,
                    accumulate,
                    high_b=self.high,
                    offset_a=step * (K_STEP // 2),
                    offset_b=inside * K_STEP * config.box_row_bytes >> 4,
                    instruction=self.output_instruction,
                    ctas=config.ctas,
                )
        if leader:
            ptx.mma_commit(c.edges.o.full(stage), c.config.ctas)

    @cute.jit
    def release_queries(self, leader):
        """Hands the Q tiles back once the last score product is complete."""
        c = self.c
        if leader:
            for stage in cutlass.range_constexpr(c.config.q_stages):
                ptx.mma_commit(c.edges.q.empty(stage), c.config.ctas)

    @cute.jit
    def release(self, slots, leader):
        """Hands ring positions back to the loader once everything issued so far is complete."""
        c = self.c
        if leader:
            for i in cutlass.range_constexpr(len(slots)):
                ptx.mma_commit(c.edges.kv.empty(slots[i][0]), c.config.ctas)


def k_major_offset(step: int, box_bytes: int) -> int:
    """Bytes from the start of a K-major tile to K step ``step``."""
    box, inside = divmod(step, STEPS_PER_BOX)
    return box * box_bytes + inside * STEP_BYTES
