"""(DSL) The MMA warp: the five products of every step, in one order, from one elected lane.

Data flow (i counts steps; products complete in the order of issue)::

    k.full, q.full -> S(0) = K Q^T                                   -> s.full
    v.full, dout.full -> dP(0) = V dO^T                              -> dp.full
    for each step i:
      p.full       -> dV += P(i) dO(i)                               -> dout.empty
      q.full       -> S(i+1)                                         -> s.full
      ds.full      -> dK += dS(i) Q(i)                               -> q.empty
                      dQ = dS(i)^T K                                 -> dq.full
      dout.full, dq.empty -> dP(i+1)                                 -> dp.full
    grad.full after the last

S, dP, P and dS are transposed: lanes are keys. While the compute warpgroups work on dS(i), the tensor core has dV(i)
and S(i+1); while they work on P(i+1), it has dK(i), dQ(i) and dP(i+1). Where dQ has tensor memory of its own, dq.empty
is awaited before dQ and not before dP.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.config import BOX_BYTES, BOX_COLUMNS, BOX_ROW_BYTES, K_STEP, KEYS, ROWS
from jax_fa4.kernels.sm100.backward.context import Context
from jax_fa4.kernels.sm100.backward.work import stage_of
from jax_fa4.kernels.sm100.forward.descriptors import high_word, instruction_descriptor, low_word

STEPS_PER_BOX = BOX_COLUMNS // K_STEP
HIGH = high_word(stride_bytes=8 * BOX_ROW_BYTES)


def k_major(step: int) -> int:
    """Descriptor offset of K step ``step`` of an operand whose rows run along K."""
    box, inside = divmod(step, STEPS_PER_BOX)
    return (box * BOX_BYTES + inside * K_STEP * 2) >> 4


def mn_major(step: int) -> int:
    """Descriptor offset of K step ``step`` of an operand whose rows run along M or N: 16 rows a step."""
    return (step * K_STEP * BOX_ROW_BYTES) >> 4


class MmaRole:
    """See the module's text."""

    def __init__(self, context: Context):
        self.c = context
        config = context.config
        self.scores = instruction_descriptor(config.dtype, KEYS, ROWS, b_is_mn_major=False)
        self.dvalues = instruction_descriptor(config.dtype, KEYS, config.columns_v, b_is_mn_major=True)
        self.dkeys = instruction_descriptor(config.dtype, KEYS, config.columns, b_is_mn_major=True)
        self.dqueries = instruction_descriptor(
            config.dtype, ROWS, config.columns, b_is_mn_major=True, a_is_mn_major=True
        )

    @cute.jit
    def run(self):
        c = self.c
        config = c.config
        leader = ptx.elect()
        steps = c.work.steps
        if steps > 0:
            c.edges.k.wait_full(0, 0)
            self.score(Int32(0), leader)
            c.edges.v.wait_full(0, 0)
            self.dprobability(Int32(0), leader)
            for i in cutlass.range(steps, unroll=1):
                more = Boolean(i + 1 < steps)
                self.dvalue(i, leader)
                if more:
                    self.score(i + 1, leader)
                self.dkey(i, leader)
                if cutlass.const_expr(not config.dq_over_dp):
                    c.edges.dq.wait_empty(0, i)
                    ptx.tmem_fence_after()
                self.dquery(leader)
                if more:
                    if cutlass.const_expr(config.dq_over_dp):
                        c.edges.dq.wait_empty(0, i + 1)
                        ptx.tmem_fence_after()
                    self.dprobability(i + 1, leader)
            if leader:
                ptx.mma_commit(c.edges.grad.full(0))

    @cute.jit
    def score(self, i, leader):
        """S(i) = K Q(i)^T."""
        c = self.c
        stage, use = stage_of(i, c.config.query_stages)
        c.edges.q.wait_full(stage, use)
        k = low_word(c.base + c.shared.key)
        q = low_word(c.query(stage))
        if leader:
            self.shared_product(tmem.SCORES, k, q, c.config.qk_steps, k_major, k_major, self.scores)
            ptx.mma_commit(c.edges.s.full(0))

    @cute.jit
    def dprobability(self, i, leader):
        """dP(i) = V dO(i)^T."""
        c = self.c
        stage, use = stage_of(i, c.config.dout_stages)
        c.edges.dout.wait_full(stage, use)
        v = low_word(c.base + c.shared.value)
        dout = low_word(c.dout(stage))
        if leader:
            self.shared_product(tmem.DPROBABILITIES, v, dout, c.config.v_steps, k_major, k_major, self.scores)
            ptx.mma_commit(c.edges.dp.full(0))

    @cute.jit
    def dvalue(self, i, leader):
        """dV += P(i) dO(i)."""
        c = self.c
        c.edges.p.wait_full(0, i)
        ptx.tmem_fence_after()
        stage, _ = stage_of(i, c.config.dout_stages)
        dout = low_word(c.dout(stage), leading_bytes=BOX_BYTES)
        if leader:
            self.tensor_product(tmem.DVALUE, tmem.SCORES, dout, i, self.dvalues)
            ptx.mma_commit(c.edges.dout.empty(stage))

    @cute.jit
    def dkey(self, i, leader):
        """dK += dS(i) Q(i)."""
        c = self.c
        c.edges.ds.wait_full(0, i)
        ptx.tmem_fence_after()
        stage, _ = stage_of(i, c.config.query_stages)
        q = low_word(c.query(stage), leading_bytes=BOX_BYTES)
        if leader:
            self.tensor_product(tmem.DKEY, tmem.DPROBABILITIES, q, i, self.dkeys)
            ptx.mma_commit(c.edges.q.empty(stage))

    @cute.jit
    def dquery(self, leader):
        """dQ = dS(i)^T K, dS from shared memory."""
        c = self.c
        ds = low_word(c.base + c.shared.dscore, leading_bytes=BOX_BYTES)
        k = low_word(c.base + c.shared.key, leading_bytes=BOX_BYTES)
        if leader:
            steps = KEYS // K_STEP
            self.shared_product(tmem.dquery(c.config), ds, k, steps, mn_major, mn_major, self.dqueries)
            ptx.mma_commit(c.edges.dq.full(0))

    def shared_product(self, d: int, a, b, steps: int, place_a, place_b, instruction: int) -> None:
        """D = A B of operands in shared memory; one thread calls this."""
        for step in range(steps):
            ptx.mma_shared(
                Int32(d),
                a,
                b,
                Int32(step > 0),
                high_a=HIGH,
                high_b=HIGH,
                offset_a=place_a(step),
                offset_b=place_b(step),
                instruction=instruction,
            )

    def tensor_product(self, d: int, a: int, b, i, instruction: int) -> None:
        """D += A B with A in tensor memory; the first step of the kernel (``i`` = 0) starts from zero."""
        for step in range(ROWS // K_STEP):
            ptx.mma_tmem(
                Int32(d),
                Int32(a),
                b,
                i if step == 0 else Int32(1),
                high_b=HIGH,
                offset_a=tmem.operand_step(step),
                offset_b=mn_major(step),
                instruction=instruction,
            )
