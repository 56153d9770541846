"""C = A B^T with tcgen05.mma: every operand major, M and CTA group, with TMA multicast over a cluster.

One output tile per CTA (or CTA pair). Warps 0..3 read the accumulator back, warp 4 issues the MMAs, warp 5 the TMA
loads. C is float32 and written with ordinary stores, so that a wrong data path shows in the element it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import pipeline, utils
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor

EPILOGUE_WARPS = 4
MMA_WARP = 4
LOAD_WARP = 5
THREADS = 192
ACCUMULATOR_COLUMNS = 256
K_TILE = 64
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@dataclass(frozen=True)
class GemmConfig:
    """What is compiled in. ``m``, ``n``: tile of one MMA (of a CTA pair when ``ctas`` is 2); ``cluster`` in CTAs."""

    dtype: str = "bfloat16"
    m: int = 128
    n: int = 64
    ctas: int = 1
    a_major: str = "k"
    b_major: str = "k"
    cluster: tuple[int, int] = (1, 1)
    stages: int = 2

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.m, self.n, K_TILE


class Gemm:
    """Host function and kernel of one GemmConfig."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        config = self.config
        majors = {"k": tcgen05.OperandMajorMode.K, "mn": tcgen05.OperandMajorMode.MN}
        op = tcgen05.MmaF16BF16Op(
            self.dtype,
            cutlass.Float32,
            (config.m, config.n, 16),
            self.group,
            tcgen05.OperandSource.SMEM,
            majors[config.a_major],
            majors[config.b_major],
        )
        tiled_mma = cute.make_tiled_mma(op)
        a_layout = sm100_utils.make_smem_layout_a(tiled_mma, config.tile, self.dtype, config.stages)
        b_layout = sm100_utils.make_smem_layout_b(tiled_mma, config.tile, self.dtype, config.stages)
        cluster = cute.tiled_divide(cute.make_layout((*config.cluster, 1)), (tiled_mma.thr_id,))
        load = cpasync.CopyBulkTensorTileG2SMulticastOp(self.group)
        if cutlass.const_expr(config.cluster == (1, 1)):
            load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        a_atom, a_tma = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.slice_(a_layout, (None, None, None, 0)), config.tile, tiled_mma, cluster.shape
        )
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, cute.slice_(b_layout, (None, None, None, 0)), config.tile, tiled_mma, cluster.shape
        )
        rows = cute.ceil_div(cute.size(c, mode=[0]), config.m) * config.ctas
        columns = cute.ceil_div(cute.size(c, mode=[1]), config.n)
        self.kernel(tiled_mma, a_atom, a_tma, b_atom, b_tma, c, a_layout, b_layout, cluster).launch(
            grid=(rows, columns, 1), block=(THREADS, 1, 1), cluster=(*config.cluster, 1)
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        cluster: cute.Layout,
    ):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        pair_rank = block_m % config.ctas
        tile_m = block_m // config.ctas
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coordinate = cluster.get_flat_coord(rank)

        @cute.struct
        class Storage:
            loaded: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
            computed: cute.struct.MemRange[cutlass.Int64, 2]
            dealloc: cutlass.Int64
            tmem_address: cutlass.Int32

        smem = utils.SmemAllocator()
        storage = smem.allocate(Storage)
        s_a = smem.allocate_tensor(self.dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, swizzle=b_layout.inner)

        one_stage = (None, None, None, 0)
        tile_bytes = cute.size_in_bytes(self.dtype, cute.slice_(a_layout, one_stage)) + cute.size_in_bytes(
            self.dtype, cute.slice_(b_layout, one_stage)
        )
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        # A buffer is free when every MMA issuer that received this CTA's tiles has committed.
        receivers = cute.size(cluster, mode=[1]) + cute.size(cluster, mode=[2]) - 1
        producer, consumer = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.loaded.data_ptr(),
            num_stages=config.stages,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, receivers),
            tx_count=tile_bytes * config.ctas,
            cta_layout_vmnk=cluster,
        ).make_participants()
        done_producer, done_consumer = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.computed.data_ptr(),
            num_stages=1,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * config.ctas),
            cta_layout_vmnk=cluster,
        ).make_participants()
        tmem = utils.TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(1, 32 * (EPILOGUE_WARPS + 1)),
            allocator_warp_id=0,
            is_two_cta=config.ctas == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.dealloc.ptr,
        )

        a_mask = cpasync.create_tma_multicast_mask(cluster, coordinate, mcast_mode=2)
        b_mask = cpasync.create_tma_multicast_mask(cluster, coordinate, mcast_mode=1)
        thread_mma = tiled_mma.get_slice(pair_rank)
        g_a = thread_mma.partition_A(cute.local_tile(a_tma, (config.m, K_TILE), (tile_m, None)))
        g_b = thread_mma.partition_B(cute.local_tile(b_tma, (config.n, K_TILE), (block_n, None)))
        g_c = thread_mma.partition_C(cute.local_tile(c, (config.m, config.n), (tile_m, block_n)))
        s_a_tma, g_a_tma = cpasync.tma_partition(
            a_atom,
            coordinate[2],
            cute.make_layout(cute.size(cluster, mode=[2])),
            cute.group_modes(s_a, 0, 3),
            cute.group_modes(g_a, 0, 3),
        )
        s_b_tma, g_b_tma = cpasync.tma_partition(
            b_atom,
            coordinate[1],
            cute.make_layout(cute.size(cluster, mode=[1])),
            cute.group_modes(s_b, 0, 3),
            cute.group_modes(g_b, 0, 3),
        )
        if cutlass.const_expr(config.cluster != (1, 1)):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()
        k_tiles = cute.size(g_a, mode=[3])
        accumulator_shape = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((config.m, config.n)))

        if warp == LOAD_WARP:
            for k in range(k_tiles):
                slot = producer.acquire_and_advance()
                cute.copy(
                    a_atom, g_a_tma[None, k], s_a_tma[None, slot.index], tma_bar_ptr=slot.barrier, mcast_mask=a_mask
                )
                cute.copy(
                    b_atom, g_b_tma[None, k], s_b_tma[None, slot.index], tma_bar_ptr=slot.barrier, mcast_mask=b_mask
                )
            producer.tail()
        elif warp == MMA_WARP:
            tmem.wait_for_alloc()
            accumulator = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), accumulator_shape.layout)
            r_a, r_b = tiled_mma.make_fragment_A(s_a), tiled_mma.make_fragment_B(s_b)
            if pair_rank == 0:
                done = done_producer.acquire_and_advance()
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in range(k_tiles):
                    full = consumer.wait_and_advance()
                    for step in cutlass.range_constexpr(K_TILE // 16):
                        where = (None, None, step, full.index)
                        cute.gemm(tiled_mma, accumulator, r_a[where], r_b[where], accumulator)
                        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                    full.release()
                done.commit()
            done_producer.tail()
        else:
            tmem.allocate(ACCUMULATOR_COLUMNS)
            tmem.wait_for_alloc()
            address = tmem.retrieve_ptr(cutlass.Float32)
            accumulator = cute.make_tensor(address, accumulator_shape.layout)
            t_acc, g_out = accumulator[(None, None), 0, 0], g_c[(None, None), 0, 0]
            load = tcgen05.make_tmem_copy(
                sm100_utils.get_tmem_load_op(
                    (config.m // config.ctas, config.n, K_TILE),
                    utils.LayoutEnum.ROW_MAJOR,
                    cutlass.Float32,
                    cutlass.Float32,
                    (config.m // config.ctas, config.n),
                    config.ctas == 2,
                ),
                t_acc,
            )
            mine = load.get_slice(thread)
            source, target = mine.partition_S(t_acc), mine.partition_D(g_out)
            registers = cute.make_rmem_tensor(target.shape, cutlass.Float32)
            done = done_consumer.wait_and_advance()
            cute.copy(load, source, registers)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(registers, target)
            with cute.arch.elect_one():
                done.release()
            tmem.relinquish_alloc_permit()
            pipeline.NamedBarrier(2, 32 * EPILOGUE_WARPS).arrive_and_wait()
            tmem.free(address)


def build(**options):
    """``(host function, fake arguments)`` of GemmConfig(**options); A, B: (rows, K) views, C: (M, N) float32."""
    config = GemmConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    dtype = DTYPES[config.dtype]

    def operand(major: str) -> cute.Tensor:
        order = (1, 0) if major == "k" else (0, 1)
        shape = (cute.SymInt(divisibility=8), cute.SymInt(divisibility=8))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    c = make_fake_compact_tensor(
        cutlass.Float32, (cute.SymInt(), cute.SymInt(divisibility=8)), stride_order=(1, 0), assumed_align=16
    )
    return Gemm(config), (operand(config.a_major), operand(config.b_major), c)
