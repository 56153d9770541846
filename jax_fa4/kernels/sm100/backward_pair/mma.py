"""(DSL) The MMA warp of a pair: all products for both CTAs, from one elected lane of the leader.

Data flow (i counts parts, j blocks; products complete in the order of issue; every signal goes to both CTAs)::

    k.full, q.full    -> S(0) = K Q^T                                     -> s.full, q.empty
    v.full, dout.full -> dP(0) = V dO^T                                   -> dp.full, dout.empty
    for each part i:
      read.full, exchange.full -> dQ(j-1) = dS(j-1)^T K, over the tail of S(i) -> dq.full, ds.empty
                                  (if the part is the first of its block j, and j > 0)
      p.full, doutt.full       -> dV += P(i) dO(i)                        -> doutt.empty
      q.full, dq.empty         -> S(i+1)                                  -> s.full, q.empty
      ds.full, qt.full         -> dK += dS(i) Q(i)                        -> qt.empty
      dout.full                -> dP(i+1)                                 -> dp.full, dout.empty
    exchange.full     -> dQ of the last block                             -> dq.full
    grad.full

=======  =================  ====================  ======================  ============================================
product  M x N x K          A, of each CTA        B, half of each CTA     lanes, columns of D in each CTA
=======  =================  ====================  ======================  ============================================
S        256 keys x r x d   K of its keys         Q, half of the rows     its keys x r rows
dP       256 keys x r x d_v V of its keys         dO, half of the rows    its keys x r rows
dV       256 keys x d_v x r P of its keys, TMEM   dO, half of the columns its keys x d_v
dK       256 keys x d x r   dS of its keys, TMEM  Q, half of the columns  its keys x d
dQ       128 rows x d x 256 dS of its 64 rows     K, half of the columns  its 64 rows x half of d, twice
=======  =================  ====================  ======================  ============================================

r is the rows of a part. While the compute warpgroups turn scores into P(i), the tensor core has dK(i-1), dP(i) and, as
soon as the scores are in registers, dQ; while they turn dP(i) into dS(i), it has dV(i) and S(i+1). dS has the time of
dK(i-1) and dP(i) to reach the peer.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import K_STEP, KEYS, ROWS
from jax_fa4.kernels.sm100.backward.mma import HIGH, STEPS_PER_BOX, k_major, mn_major
from jax_fa4.kernels.sm100.backward_pair import tmem
from jax_fa4.kernels.sm100.backward_pair.config import CTAS, WIDE_ROW_BYTES
from jax_fa4.kernels.sm100.backward_pair.context import PairContext
from jax_fa4.kernels.sm100.forward.descriptors import (
    SWIZZLE_64B,
    SWIZZLE_128B,
    high_word,
    instruction_descriptor,
    low_word,
)

NEVER = 30
"""A CTA takes fewer than 2 ** NEVER steps."""


class PairMmaRole:
    """See the module's text."""

    def __init__(self, context: PairContext):
        self.c = context
        config, shape = context.config, context.shape
        self.shape = shape
        keys = CTAS * KEYS
        self.scores = instruction_descriptor(config.dtype, keys, shape.rows, b_is_mn_major=False)
        self.dvalues = instruction_descriptor(config.dtype, keys, config.columns_v, b_is_mn_major=True)
        self.dkeys = instruction_descriptor(config.dtype, keys, config.columns, b_is_mn_major=True)
        self.dqueries = instruction_descriptor(
            config.dtype, ROWS, config.columns, b_is_mn_major=True, a_is_mn_major=True
        )
        # What holds columns of K and Q.
        swizzle = SWIZZLE_128B if shape.column_row_bytes == WIDE_ROW_BYTES else SWIZZLE_64B
        self.high_columns = high_word(8 * shape.column_row_bytes, swizzle)

    @cute.jit
    def run(self):
        c = self.c
        edges = c.edges
        leader = ptx.elect()
        steps = c.work.steps
        if steps > 0:
            edges.k.wait_full(0, 0)
            self.score(Int32(0), leader)
            edges.v.wait_full(0, 0)
            self.dprobability(Int32(0), leader)
            edges.kt.wait_full(0, 0)
            for i in cutlass.range(steps, unroll=1):
                for part in cutlass.range_constexpr(self.shape.parts):
                    use = i * self.shape.parts + part
                    more = Boolean(part + 1 < self.shape.parts) | (i + 1 < steps)
                    edges.read.wait_full(0, use)
                    ptx.tmem_fence_after()
                    if (i > 0) & Boolean(part == 0):
                        self.dquery(i - 1, leader, last=False)
                    self.dvalue(use, leader)
                    if cutlass.const_expr(part == 0):
                        # The block before has left the tail of S.
                        edges.dq.wait_empty(0, i)
                        ptx.tmem_fence_after()
                    if more:
                        self.score(use + 1, leader)
                    self.dkey(use, leader)
                    if more:
                        self.dprobability(use + 1, leader)
            self.dquery(steps - 1, leader, last=True)
            if leader:
                ptx.mma_commit(edges.grad.full(0), CTAS)

    @cute.jit
    def score(self, i, leader):
        """S(i) = K Q(i)^T."""
        c = self.c
        c.edges.q.wait_full(0, i)
        k, q = self.tile(c.shared.key, i), self.tile(c.shared.query, i)
        if leader:
            self.shared_product(tmem.SCORES, k, q, c.config.qk_steps, k_major, self.half_k_major, self.scores)
            ptx.mma_commit(c.edges.s.full(0), CTAS)
            ptx.mma_commit(c.edges.q.empty(0), CTAS)

    @cute.jit
    def dprobability(self, i, leader):
        """dP(i) = V dO(i)^T."""
        c = self.c
        c.edges.dout.wait_full(0, i)
        v, dout = self.tile(c.shared.value, i), self.tile(c.shared.dout, i)
        if leader:
            self.shared_product(tmem.DPROBABILITIES, v, dout, c.config.v_steps, k_major, self.half_k_major, self.scores)
            ptx.mma_commit(c.edges.dp.full(0), CTAS)
            ptx.mma_commit(c.edges.dout.empty(0), CTAS)

    @cute.jit
    def dvalue(self, i, leader):
        """dV += P(i) dO(i)."""
        c = self.c
        c.edges.p.wait_full(0, i)
        ptx.tmem_fence_after()
        c.edges.doutt.wait_full(0, i)
        dout = self.tile(c.shared.dout_t, i)
        if leader:
            self.tensor_product(
                tmem.dvalue(self.shape), tmem.SCORES, tmem.probability_step, dout, mn_major, HIGH, i, self.dvalues
            )
            ptx.mma_commit(c.edges.doutt.empty(0), CTAS)

    @cute.jit
    def dkey(self, i, leader):
        """dK += dS(i) Q(i)."""
        c = self.c
        c.edges.ds.wait_full(0, i)
        ptx.tmem_fence_after()
        c.edges.qt.wait_full(0, i)
        q = self.tile(c.shared.query_t, i, self.shape.rows * self.shape.column_row_bytes)
        if leader:
            dk = tmem.dkey(self.shape, c.config.columns_v)
            self.tensor_product(
                dk, tmem.DPROBABILITIES, tmem.dscore_step, q, self.columns_step, self.high_columns, i, self.dkeys
            )
            ptx.mma_commit(c.edges.qt.empty(0), CTAS)

    @cute.jit
    def dquery(self, i, leader, *, last: cutlass.Constexpr):
        """dQ(i) = dS(i)^T K over the keys of both CTAs; after the last one, nobody waits to write dS."""
        c = self.c
        c.edges.exchange.wait_full(0, i)
        ds = self.tile(c.shared.dscore, i)
        k = self.tile(c.shared.key_t, i, CTAS * KEYS * self.shape.column_row_bytes)
        if leader:
            steps = CTAS * KEYS // K_STEP
            dq = tmem.dquery(self.shape)
            self.shared_product(dq, ds, k, steps, mn_major, self.columns_step, self.dqueries, high_b=self.high_columns)
            ptx.mma_commit(c.edges.dq.full(0), CTAS)
            if cutlass.const_expr(not last):
                ptx.mma_commit(c.edges.ds.empty(0), CTAS)

    def tile(self, offset: int, i, leading_bytes: int = 16) -> Int32:
        """Low word of the descriptor of a tile; ``leading_bytes`` where several boxes of columns run along N.

        No tile moves: the compiler would compute the descriptors of all K steps once and keep them, which takes more
        registers than there are, if they did not depend on ``i``.
        """
        return low_word(self.c.base + offset, leading_bytes) + (i >> NEVER)

    def half_k_major(self, step: int) -> int:
        """As ``k_major`` of a tile of a CTA's rows of a part."""
        box, inside = divmod(step, STEPS_PER_BOX)
        return (box * self.shape.row_box_bytes + inside * K_STEP * 2) >> 4

    def columns_step(self, step: int) -> int:
        """As ``mn_major`` of a tile that holds columns of K or Q."""
        return (step * K_STEP * self.shape.column_row_bytes) >> 4

    def shared_product(self, d: int, a, b, steps: int, place_a, place_b, instruction: int, high_b: int = HIGH) -> None:
        """D = A B of operands in shared memory; one thread calls this."""
        for step in range(steps):
            ptx.mma_shared(
                Int32(d),
                a,
                b,
                Int32(step > 0),
                high_a=HIGH,
                high_b=high_b,
                offset_a=place_a(step),
                offset_b=place_b(step),
                instruction=instruction,
                ctas=CTAS,
            )

    def tensor_product(self, d: int, a: int, place_a, b, place_b, high_b: int, i, instruction: int) -> None:
        """D += A B with A in tensor memory; the first step of the kernel (``i`` = 0) starts from zero."""
        for step in range(self.shape.rows // K_STEP):
            ptx.mma_tmem(
                Int32(d),
                Int32(a),
                b,
                i if step == 0 else Int32(1),
                high_b=high_b,
                offset_a=place_a(self.shape, step),
                offset_b=place_b(step),
                instruction=instruction,
                ctas=CTAS,
            )
