"""(DSL) The MMA warp: the products of every step, in one order, from one elected lane.

Data flow (i counts steps; products complete in the order of issue)::

    x.full, z.full -> S(0)                                     -> s.full
    y.full, w.full -> dP(0)                                    -> dp.full
    for each step i:
      p.full -> key_value side: dV += P(i) W(i)                -> w.empty
      z.full -> S(i+1), if there are two stages                -> s.full
      ds.full -> dK (or dQ) += dS(i) Z(i)                      -> z.empty
      z.full -> S(i+1), if there is one stage                  -> s.full
      w.full -> dP(i+1)                                        -> dp.full (query side: w.empty too)
    grad.full after the last
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS, K_STEP
from jax_fa4.kernels.sm100.backward.mma import HIGH, STEPS_PER_BOX, mn_major
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.backward_split import maps
from jax_fa4.kernels.sm100.backward_split.config import RESIDENT, RESIDENT_BOX, STREAMED, STREAMED_BOX
from jax_fa4.kernels.sm100.backward_split.context import Context
from jax_fa4.kernels.sm100.forward.descriptors import instruction_descriptor, low_word


class MmaRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context
        config = context.config
        self.scores = instruction_descriptor(config.dtype, RESIDENT, STREAMED, b_is_mn_major=False)

    @cute.jit
    def run(self):
        c = self.c
        config = c.config
        leader = ptx.elect()
        steps = c.work.steps
        if steps > 0:
            c.edges.x.wait_full(0, 0)
            self.score(Int32(0), leader)
            c.edges.y.wait_full(0, 0)
            self.dprobability(Int32(0), leader)
            for i in cutlass.range(steps, unroll=1):
                more = Boolean(i + 1 < steps)
                c.edges.p.wait_full(0, i)
                ptx.tmem_fence_after()
                if cutlass.const_expr(config.key_side):
                    self.dvalue(i, leader)
                if cutlass.const_expr(config.stages > 1):  # noqa: SIM102 - a compile-time condition must stand alone
                    if more:
                        self.score(i + 1, leader)
                self.gradient(i, leader)
                if more:
                    if cutlass.const_expr(config.stages == 1):
                        self.score(i + 1, leader)
                    self.dprobability(i + 1, leader)
            if leader:
                ptx.mma_commit(c.edges.grad.full(0))

    @cute.jit
    def score(self, i, leader):
        """S(i) = X Z(i)^T."""
        c = self.c
        stage, use = stage_of(i, c.config.stages)
        c.edges.z.wait_full(stage, use)
        x, z = low_word(c.base + c.shared.x), low_word(c.z(stage))
        if leader:
            self.score_product(maps.SCORES, x, z, c.config.qk_steps)
            ptx.mma_commit(c.edges.s.full(0))

    @cute.jit
    def dprobability(self, i, leader):
        """dP(i) = Y W(i)^T."""
        c = self.c
        stage, use = stage_of(i, c.config.stages)
        c.edges.w.wait_full(stage, use)
        y, w = low_word(c.base + c.shared.y), low_word(c.w(stage))
        if leader:
            self.score_product(maps.DPROBABILITIES, y, w, c.config.v_steps)
            ptx.mma_commit(c.edges.dp.full(0))
            if cutlass.const_expr(not c.config.key_side):
                ptx.mma_commit(c.edges.w.empty(stage))

    @cute.jit
    def dvalue(self, i, leader):
        """dV += P(i) W(i), this CTA's columns."""
        c = self.c
        config = c.config
        stage, _ = stage_of(i, config.stages)
        first = c.first_box(config.v_boxes, config.v_part)
        w = low_word(c.w(stage) + first * STREAMED_BOX, leading_bytes=STREAMED_BOX)
        if leader:
            self.gradient_product(maps.FIRST, maps.SCORES, w, i, config.v_part)
            ptx.mma_commit(c.edges.w.empty(stage))

    @cute.jit
    def gradient(self, i, leader):
        """dK (or dQ) += dS(i) Z(i), this CTA's columns."""
        c = self.c
        config = c.config
        c.edges.ds.wait_full(0, i)
        ptx.tmem_fence_after()
        stage, _ = stage_of(i, config.stages)
        first = c.first_box(config.qk_boxes, config.qk_part)
        z = low_word(c.z(stage) + first * STREAMED_BOX, leading_bytes=STREAMED_BOX)
        if leader:
            self.gradient_product(maps.second(config), maps.DPROBABILITIES, z, i, config.qk_part)
            ptx.mma_commit(c.edges.z.empty(stage))

    def score_product(self, d: int, a, b, steps: int) -> None:
        """D = A B^T, both operands with rows along the contraction; one thread calls this."""
        for step in range(steps):
            box, inside = divmod(step, STEPS_PER_BOX)
            ptx.mma_shared(
                Int32(d),
                a,
                b,
                Int32(step > 0),
                high_a=HIGH,
                high_b=HIGH,
                offset_a=(box * RESIDENT_BOX + inside * K_STEP * 2) >> 4,
                offset_b=(box * STREAMED_BOX + inside * K_STEP * 2) >> 4,
                instruction=self.scores,
            )

    def gradient_product(self, d: int, a: int, b, i, boxes: int) -> None:
        """D += A B with A in tensor memory; the first step of the kernel (``i`` = 0) starts from zero."""
        instruction = instruction_descriptor(self.c.config.dtype, RESIDENT, boxes * BOX_COLUMNS, b_is_mn_major=True)
        for step in range(STREAMED // K_STEP):
            ptx.mma_tmem(
                Int32(d),
                Int32(a),
                b,
                i if step == 0 else Int32(1),
                high_b=HIGH,
                offset_a=maps.operand_step(step),
                offset_b=mn_major(step),
                instruction=instruction,
            )
