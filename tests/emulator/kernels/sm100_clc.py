"""A persistent kernel under cluster launch control: running CTAs take over the tiles of CTAs not yet launched.

The grid has one CTA per tile. Each tile's word in ``visits`` is incremented by whoever works on it, so that a tile done
twice or never shows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, utils
from cutlass.cute.runtime import make_fake_compact_tensor

THREADS = 64
RESPONSE_BYTES = 16


@cute.kernel
def visit(visits: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()

    @cute.struct
    class Storage:
        response: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
        arrived: cutlass.Int64

    storage = utils.SmemAllocator().allocate(Storage)
    barrier = storage.arrived.ptr
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    phase = Int32(0)
    valid = Int32(1)
    while valid != 0:
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, RESPONSE_BYTES)
            cute.arch.issue_clc_query(barrier, storage.response.data_ptr(), multicast=False)
            visits[tile] = visits[tile] + 1
        cute.arch.mbarrier_wait(barrier, phase)
        tile, _, _, valid = cute.arch.clc_response(storage.response.data_ptr())
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
        phase = phase ^ 1


@cute.jit
def launch(visits: cute.Tensor):
    visit(visits).launch(grid=(cute.size(visits), 1, 1), block=(THREADS, 1, 1))


def build():
    """``(host function, fake arguments)``: visits, int32, one word per tile."""
    return launch, (make_fake_compact_tensor(Int32, (cute.SymInt(),), assumed_align=16),)
