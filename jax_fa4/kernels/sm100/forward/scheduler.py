"""(DSL) Which work item a CTA takes next, behind one interface: every role asks ``first`` and ``next``.

Static: the CTAs of the grid take turns; a grid of one CTA an item is not persistent. Cluster launch control: the grid
has one CTA an item, and a CTA that has finished takes over one that has not started. Data flow then::

    work.empty -> scheduler warp asks for a CTA -> (hardware) answer in shared memory -> work.full
    work.full  -> every warp, the scheduler included, reads the answer                -> work.empty
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, select_

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import ForwardConfig
from jax_fa4.kernels.sm100.forward.pipeline import Edges
from jax_fa4.kernels.sm100.forward.shared import RESPONSE_BYTES


class Scheduler(Invariant):
    """``responses``: shared-memory address of the answers. ``total``: number of work items, and the end mark."""

    def __init__(self, config: ForwardConfig, edges: Edges, responses: Int32, total: Int32):
        self.config = config
        self.edges = edges
        self.responses = responses
        self.total = total
        self.lane0 = Boolean((cute.arch.thread_idx()[0] & 31) == 0)

    def first(self) -> Int32:
        """This CTA's (or pair's) first work item."""
        return cute.arch.block_idx()[0] // self.config.ctas

    @cute.jit
    def next(self, index, asked):
        """(item after ``index``, or ``total`` or more at the end; number of items asked for so far)."""
        if cutlass.const_expr(self.config.launch_control):
            stage, use = asked & 1, asked >> 1
            self.edges.work.wait_full(stage, use)
            got, item = ptx.requested_cluster(self.responses + stage * RESPONSE_BYTES)
            index = select_(got, item, self.total)
            # The answer's place is written by the asynchronous proxy again.
            ptx.fence_async_shared()
            ptx.sync_warp()
            if self.lane0:
                ptx.mbarrier_arrive(self.edges.work.empty(stage))
        else:
            index = index + cute.arch.grid_dim()[0] // self.config.ctas
        return index, asked + 1

    @cute.jit
    def run(self):
        """The scheduler warp: nothing to do without cluster launch control."""
        if cutlass.const_expr(self.config.launch_control):
            leader = ptx.elect()
            index = self.first()
            asked = Int32(0)
            while index < self.total:
                stage, use = asked & 1, asked >> 1
                self.edges.work.wait_empty(stage, use)
                if leader:
                    barrier = self.edges.work.full(stage)
                    ptx.mbarrier_expect(barrier, RESPONSE_BYTES)
                    ptx.request_cluster(self.responses + stage * RESPONSE_BYTES, barrier)
                index, asked = self.next(index, asked)
