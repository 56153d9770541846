"""Sums the row blocks of a float32 matrix for sm_90a: TMA loads, TMA reduce-adds into one tile of the output.

Block b of the grid loads rows ``b * rows`` .. of ``x`` (blocks * rows, columns), adds 1 to each element through
registers, and adds the tile to ``out`` (rows, columns) by an asynchronous bulk reduction.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class Reduce:
    def __init__(self, rows: int, columns: int):
        self.tile = (rows, columns)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        layout = cute.make_layout(self.tile, stride=(self.tile[1], 1))
        load, loaded = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, self.tile)
        add = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionOp.ADD)
        store, stored = cpasync.make_tiled_tma_atom(add, out, layout, self.tile)
        self.kernel(load, loaded, store, stored, layout).launch(
            grid=(cute.ceil_div(x.shape[0], self.tile[0]), 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, x: cute.Tensor, store: cute.CopyAtom, out: cute.Tensor, layout: cute.Layout):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barrier: cute.struct.MemRange[Int64, 1]
            tile: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(layout)], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        barrier, tile = storage.barrier.data_ptr(), storage.tile.get_tensor(layout)
        one = cute.make_layout(1)
        grouped = cute.group_modes(tile, 0, 2)
        sources = cute.group_modes(cute.local_tile(x, self.tile, (None, 0)), 0, 2)
        targets = cute.group_modes(cute.local_tile(out, self.tile, (0, 0)), 0, 2)
        to_tile, from_x = cpasync.tma_partition(load, 0, one, grouped, sources)
        from_tile, to_out = cpasync.tma_partition(store, 0, one, grouped, targets)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(Float32, layout))
            cute.copy(load, from_x[None, block], to_tile, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        flat = cute.make_tensor(tile.iterator, cute.make_layout(cute.size(layout)))
        for i in cutlass.range(Int32(thread), cute.size(layout), 128):
            flat[i] = flat[i] + Float32(1)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            cute.copy(store, from_tile, to_out)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


def build(rows: int = 32, columns: int = 32):
    """The host function and its fake arguments, for the kernel compiler of the tests."""
    x = make_fake_compact_tensor(Float32, (cute.sym_int(), columns), stride_order=(1, 0), assumed_align=16)
    out = make_fake_compact_tensor(Float32, (rows, columns), stride_order=(1, 0), assumed_align=16)
    return Reduce(rows, columns), (x, out, make_fake_stream())
