"""(DSL) The relay warp: sends half of each block's dS to the peer, and tells the pair's MMA warp what has arrived.

Data flow per block::

    send.full                  -> bulk copy of ``outgoing`` to the peer's dS of this CTA's keys  -> received.full there
    received.full              -> exchange.full of the leader

The peer's dS is free by then: what is sent has been written after ds.empty, which says in both CTAs that the product
dQ of the block before is complete. A bulk copy, and not stores to the peer's shared memory: the compute warps need not
wait until these have arrived, and no fence is needed between generic writes in one CTA and the tensor core of another.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward_pair.config import SEND_BYTES
from jax_fa4.kernels.sm100.backward_pair.context import PairContext
from jax_fa4.kernels.sm100.bulk import bulk_send


class RelayRole:
    """See the module's text."""

    def __init__(self, context: PairContext):
        self.c = context

    @cute.jit
    def run(self):
        c = self.c
        leader = ptx.elect()
        received = c.edges.received.full(0)
        for i in cutlass.range(c.work.steps, unroll=1):
            c.edges.send.wait_full(0, i)
            if leader:
                ptx.mbarrier_expect(received, SEND_BYTES)
                bulk_send(c.dscore(), c.base + c.shared.outgoing, SEND_BYTES, received, c.rank ^ 1)
            c.edges.received.wait_full(0, i)
            if leader:
                ptx.mbarrier_arrive_leader(c.edges.exchange.full(0))
