"""C = A B^T with A in tensor memory: registers -> tcgen05.st -> tcgen05.mma (TS), as P V in attention.

One 128-row tile per CTA, or 256 rows per CTA pair, K fixed at compile time. Warps 0..3 fill A and read C back, warp 4
issues the MMAs, warp 5 loads B in one TMA copy. Barriers are plain mbarriers, written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import utils
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.cutlass_dsl import dsl_user_op

MMA_WARP = 4
LOAD_WARP = 5
THREADS = 192
EPILOGUE_THREADS = 128
TMEM_COLUMNS = 512
A_COLUMN = 256
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@dsl_user_op
def fence_after(*, loc=None, ip=None):
    """tcgen05.fence::after_thread_sync"""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_before(*, loc=None, ip=None):
    """tcgen05.fence::before_thread_sync"""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dataclass(frozen=True)
class TensorMemoryGemmConfig:
    """What is compiled in. ``m`` is 128 (one CTA) or 256 (a CTA pair); ``k`` up to 256."""

    dtype: str = "bfloat16"
    m: int = 128
    n: int = 64
    k: int = 128
    ctas: int = 1
    b_major: str = "mn"


class TensorMemoryGemm:
    """Host function and kernel of one TensorMemoryGemmConfig."""

    def __init__(self, config: TensorMemoryGemmConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a_words: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        config = self.config
        tile = (config.m, config.n, config.k)
        b_major = tcgen05.OperandMajorMode.MN if config.b_major == "mn" else tcgen05.OperandMajorMode.K
        op = tcgen05.MmaF16BF16Op(
            self.dtype,
            cutlass.Float32,
            (config.m, config.n, 16),
            self.group,
            tcgen05.OperandSource.TMEM,
            tcgen05.OperandMajorMode.K,
            b_major,
        )
        tiled_mma = cute.make_tiled_mma(op)
        a_layout = sm100_utils.make_smem_layout_a(tiled_mma, tile, self.dtype, 1)
        b_layout = sm100_utils.make_smem_layout_b(tiled_mma, tile, self.dtype, 1)
        cluster = cute.tiled_divide(cute.make_layout((config.ctas, 1, 1)), (tiled_mma.thr_id,))
        b_atom, b_tma = cute.nvgpu.make_tiled_tma_atom_B(
            cpasync.CopyBulkTensorTileG2SOp(self.group),
            b,
            cute.slice_(b_layout, (None, None, None, 0)),
            tile,
            tiled_mma,
            cluster.shape,
        )
        rows = cute.ceil_div(cute.size(c, mode=[0]), config.m) * config.ctas
        self.kernel(tiled_mma, a_words, b_atom, b_tma, c, a_layout, b_layout).launch(
            grid=(rows, cute.ceil_div(cute.size(c, mode=[1]), config.n), 1),
            block=(THREADS, 1, 1),
            cluster=(config.ctas, 1, 1),
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a_words: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        config = self.config
        rows = config.m // config.ctas
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, block_n, _ = cute.arch.block_idx()
        rank = block_m % config.ctas
        tile_m = block_m // config.ctas

        @cute.struct
        class Storage:
            loaded: cutlass.Int64
            filled: cutlass.Int64
            computed: cutlass.Int64
            dealloc: cutlass.Int64
            tmem_address: cutlass.Int32

        smem = utils.SmemAllocator()
        storage = smem.allocate(Storage)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
        loaded, filled, computed = storage.loaded.ptr, storage.filled.ptr, storage.computed.ptr
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(loaded, 1)
                cute.arch.mbarrier_init(filled, EPILOGUE_THREADS * config.ctas)
                cute.arch.mbarrier_init(computed, 1)
                cute.arch.mbarrier_init(storage.dealloc.ptr, 32)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            if cutlass.const_expr(config.ctas == 2):
                cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.ptr, is_two_cta=True)
                cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            else:
                cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem_address.ptr)
                cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.barrier()
        if cutlass.const_expr(config.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        address = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, storage.tmem_address.ptr)

        thread_mma = tiled_mma.get_slice(rank)
        g_b = thread_mma.partition_B(cute.local_tile(b_tma, (config.n, config.k), (block_n, 0)))
        g_c = thread_mma.partition_C(cute.local_tile(c, (config.m, config.n), (tile_m, block_n)))
        s_b_tma, g_b_tma = cpasync.tma_partition(
            b_atom, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 3), cute.group_modes(g_b, 0, 3)
        )
        fragment_c = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((config.m, config.n)))
        accumulator = cute.make_tensor(address, fragment_c.layout)

        if warp == LOAD_WARP:
            # In a pair both halves of B count on the leader's barrier, where the MMA warp waits.
            if rank == 0:
                with cute.arch.elect_one():
                    bytes_of_b = cute.size_in_bytes(self.dtype, cute.slice_(b_layout, (None, None, None, 0)))
                    cute.arch.mbarrier_arrive_and_expect_tx(loaded, bytes_of_b * config.ctas)
            cute.copy(b_atom, g_b_tma, s_b_tma[None, 0], tma_bar_ptr=loaded)
        elif warp == MMA_WARP:
            if rank == 0:
                t_a = cute.make_tensor(cute.recast_ptr(address + A_COLUMN, dtype=self.dtype), a_layout.outer)
                r_a = thread_mma.make_fragment_A(t_a)
                r_a = cute.make_tensor(cute.recast_ptr(address + A_COLUMN, dtype=r_a.element_type), r_a.layout)
                r_b = tiled_mma.make_fragment_B(s_b)
                cute.arch.mbarrier_wait(loaded, 0)
                cute.arch.mbarrier_wait(filled, 0)
                fence_after()
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                for step in cutlass.range_constexpr(config.k // 16):
                    where = (None, None, step, 0)
                    cute.gemm(tiled_mma, accumulator, r_a[where], r_b[where], accumulator)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    if cutlass.const_expr(config.ctas == 2):
                        tcgen05.commit(computed, 3, self.group)
                    else:
                        tcgen05.commit(computed)
        else:
            words = cute.make_tensor(address + A_COLUMN, cute.make_layout((rows, config.k // 2), stride=(1 << 16, 1)))
            g_words = cute.local_tile(a_words, (rows, config.k // 2), (block_m, 0))
            store = tcgen05.make_tmem_copy(
                cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(32)), cutlass.Float32), words
            )
            mine = store.get_slice(thread)
            source, target = mine.partition_S(g_words), mine.partition_D(words)
            registers = cute.make_rmem_tensor(source.shape, cutlass.Float32)
            cute.autovec_copy(source, registers)
            cute.copy(store, registers, target)
            cute.arch.fence_view_async_tmem_store()
            fence_before()
            if cutlass.const_expr(config.ctas == 2):
                cute.arch.mbarrier_arrive(filled, 0)
            else:
                cute.arch.mbarrier_arrive(filled)

            load = tcgen05.make_tmem_copy(
                cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(32)), cutlass.Float32),
                accumulator[(None, None), 0, 0],
            )
            mine = load.get_slice(thread)
            t_source, g_target = (
                mine.partition_S(accumulator[(None, None), 0, 0]),
                mine.partition_D(g_c[(None, None), 0, 0]),
            )
            result = cute.make_rmem_tensor(g_target.shape, cutlass.Float32)
            cute.arch.mbarrier_wait(computed, 0)
            fence_after()
            cute.copy(load, t_source, result)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(result, g_target)
            fence_before()
        cute.arch.barrier()
        if cutlass.const_expr(config.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.dealloc_tmem(address, TMEM_COLUMNS, is_two_cta=config.ctas == 2)


def build(**options):
    """``(host function, fake arguments)`` of TensorMemoryGemmConfig(**options).

    A comes as its 32-bit words, (M, K/2) float32; B is an (N, K) view; C is (M, N) float32.
    """
    config = TensorMemoryGemmConfig(**options)
    order = (1, 0) if config.b_major == "k" else (0, 1)
    b = make_fake_compact_tensor(
        DTYPES[config.dtype],
        (cute.SymInt(divisibility=8), cute.SymInt(divisibility=8)),
        stride_order=order,
        assumed_align=16,
    )
    a, c = (
        make_fake_compact_tensor(
            cutlass.Float32, (cute.SymInt(), cute.SymInt(divisibility=8)), stride_order=(1, 0), assumed_align=16
        )
        for _ in range(2)
    )
    return TensorMemoryGemm(config), (a, b, c)
