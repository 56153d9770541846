"""A warp-specialised multi-stage TMA + wgmma GEMM for sm_90a: C = A B^T in float32, any operand majors.

One producer warpgroup, two consumer warpgroups of 64 rows each, tiles 128 x ``tile_n`` x ``tile_k``.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

TILE_M = 128


class Gemm:
    def __init__(self, tile_n: int, tile_k: int, stages: int):
        self.tile = (TILE_M, tile_n, tile_k)
        self.stages = stages

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        dtype = a.element_type
        layout = cutlass.utils.LayoutEnum
        a_layout, b_layout = layout.from_tensor(a), layout.from_tensor(b)
        smem_a = hopper.make_smem_layout_a(a_layout, self.tile, dtype, self.stages)
        smem_b = hopper.make_smem_layout_b(b_layout, self.tile, dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one_a, one_b = cute.slice_(smem_a, (None, None, 0)), cute.slice_(smem_b, (None, None, 0))
        tma_a, view_a = cpasync.make_tiled_tma_atom(load, a, one_a, (self.tile[0], self.tile[2]))
        tma_b, view_b = cpasync.make_tiled_tma_atom(load, b, one_b, (self.tile[1], self.tile[2]))
        mma = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            a_layout.sm90_mma_major_mode(),
            b_layout.sm90_mma_major_mode(),
            Float32,
            (2, 1, 1),
            (64, self.tile[1]),
        )
        nbytes = cute.size_in_bytes(dtype, one_a) + cute.size_in_bytes(dtype, one_b)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, self.stages * 2]
            a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(smem_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(smem_b)], 1024]

        self.storage = Storage
        grid = (cute.ceil_div(c.shape[0], self.tile[0]), cute.ceil_div(c.shape[1], self.tile[1]), 1)
        self.kernel(tma_a, view_a, tma_b, view_b, c, smem_a, smem_b, mma, nbytes).launch(
            grid=grid, block=(384, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        view_a: cute.Tensor,
        tma_b: cute.CopyAtom,
        view_b: cute.Tensor,
        c: cute.Tensor,
        smem_a: cute.ComposedLayout,
        smem_b: cute.ComposedLayout,
        mma: cute.TiledMma,
        nbytes: cutlass.Constexpr,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 8),
            tx_count=nbytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        shared_a = storage.a.get_tensor(smem_a.outer, swizzle=smem_a.inner)
        shared_b = storage.b.get_tensor(smem_b.outer, swizzle=smem_b.inner)
        tiles_a = cute.local_tile(view_a, (self.tile[0], self.tile[2]), (block_m, None))
        tiles_b = cute.local_tile(view_b, (self.tile[1], self.tile[2]), (block_n, None))
        tile_c = cute.local_tile(c, (self.tile[0], self.tile[1]), (block_m, block_n))
        one = cute.make_layout(1)
        to_a, from_a = cpasync.tma_partition(
            tma_a, 0, one, cute.group_modes(shared_a, 0, 2), cute.group_modes(tiles_a, 0, 2)
        )
        to_b, from_b = cpasync.tma_partition(
            tma_b, 0, one, cute.group_modes(shared_b, 0, 2), cute.group_modes(tiles_b, 0, 2)
        )
        steps = cute.size(tiles_a, mode=[2])
        if warp < 4:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
                for k in cutlass.range(steps, unroll=1):
                    pipe.producer_acquire(state)
                    barrier = pipe.producer_get_barrier(state)
                    cute.copy(tma_a, from_a[None, k], to_a[None, state.index], tma_bar_ptr=barrier)
                    cute.copy(tma_b, from_b[None, k], to_b[None, state.index], tma_bar_ptr=barrier)
                    pipe.producer_commit(state)
                    state.advance()
                pipe.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(232)
            part = mma.get_slice(thread - 128)
            operand_a = mma.make_fragment_A(part.partition_A(shared_a))
            operand_b = mma.make_fragment_B(part.partition_B(shared_b))
            total = cute.make_rmem_tensor(part.partition_shape_C((self.tile[0], self.tile[1])), Float32)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(steps, unroll=1):
                pipe.consumer_wait(state)
                warpgroup.fence()
                for k in cutlass.range_constexpr(cute.size(operand_a, mode=[2])):
                    cute.gemm(
                        mma, total, operand_a[None, None, k, state.index], operand_b[None, None, k, state.index], total
                    )
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                pipe.consumer_release(state)
                state.advance()
            cute.autovec_copy(total, part.partition_C(tile_c))


def operand(major: str, dtype):
    """A rows x K tensor, K contiguous ("k") or rows contiguous ("m")."""
    order = (1, 0) if major == "k" else (0, 1)
    rows = cute.sym_int(divisibility=1 if major == "k" else 8)
    depth = cute.sym_int(divisibility=8 if major == "k" else 1)
    return make_fake_compact_tensor(dtype, (rows, depth), stride_order=order, assumed_align=16)


def build(
    major_a: str = "k",
    major_b: str = "k",
    dtype: str = "bfloat16",
    tile_n: int = 128,
    tile_k: int = 64,
    stages: int = 3,
):
    """The host function and its fake arguments, for the kernel compiler of the tests."""
    element = {"bfloat16": BFloat16, "float16": Float16}[dtype]
    sizes = (cute.sym_int(), cute.sym_int(divisibility=8))
    c = make_fake_compact_tensor(Float32, sizes, stride_order=(1, 0), assumed_align=16)
    arguments = (operand(major_a, element), operand(major_b, element), c, make_fake_stream())
    return Gemm(tile_n, tile_k, stages), arguments
