"""(DSL) Entry point of the Hopper forward and its build for a spec."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, GridConstant, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda.tensor_map import TensorMap, create_tensor_map_tiled

from jax_fa4.kernels.common import tma
from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.common.tile_order import TileOrder
from jax_fa4.kernels.sm90.forward.layout import ROWS, WARPGROUP, ForwardLayout, swizzle_chunk
from jax_fa4.kernels.sm90.forward.mainloop import consume
from jax_fa4.kernels.sm90.forward.problem import Problem, Shared
from jax_fa4.kernels.sm90.forward.producer import produce
from jax_fa4.kernels.spec import KernelSpec

DTYPES = {"bfloat16": BFloat16, "float16": Float16}


class Operands(Invariant):
    """Products and shared-memory layouts of one warpgroup."""

    def __init__(self, layout: ForwardLayout):
        spec = layout.spec
        self.dtype = DTYPES[spec.dtype]
        # The accumulate flag is part of the product's run-time value: one product for each setting, made once.
        self.qk_first = self._product(spec.tile.n, wgmma.OperandMajorMode.K, wgmma.OperandSource.SMEM, False)
        self.qk = self._product(spec.tile.n, wgmma.OperandMajorMode.K, wgmma.OperandSource.SMEM, True)
        self.pv = self._product(spec.head_dim_v, wgmma.OperandMajorMode.MN, wgmma.OperandSource.RMEM, True)
        stages = spec.tile.stages
        self.query_layout = self._layout((ROWS, spec.head_dim))
        self.key_layout = self._layout((spec.tile.n, spec.head_dim, stages))
        value_layout = self._layout((spec.tile.n, spec.head_dim_v, stages))
        # The B operand of the PV product is V transposed: head_dim_v by keys.
        self.value_layout = cute.composition(
            value_layout,
            cute.make_ordered_layout((spec.head_dim_v, spec.tile.n, stages), order=(1, 0, 2)),
        )

    def _product(self, n: int, b_major, a_source, accumulate: bool):
        op = wgmma.MmaF16BF16Op(self.dtype, Float32, (ROWS, n, 16), a_source, wgmma.OperandMajorMode.K, b_major)
        product = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        product.set(wgmma.Field.ACCUMULATE, accumulate)
        return product

    def _layout(self, shape: tuple):
        """Row-major blocks in column chunks of one swizzle width, as TMA boxes leave them."""
        kind = wgmma.SmemLayoutAtomKind.K_SW128 if swizzle_chunk(shape[1]) == 64 else wgmma.SmemLayoutAtomKind.K_SW64
        atom = wgmma.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    def tensor(self, pointer: cute.Pointer, layout) -> cute.Tensor:
        """A swizzled tensor at a byte pointer."""
        swizzled = cute.recast_ptr(pointer, layout.inner, dtype=self.dtype)
        return cute.make_tensor(swizzled, layout.outer)


class ForwardKernel:
    """The kernel for one spec; parameters of :meth:`kernel` are the entry's, in this order."""

    def __init__(self, spec: KernelSpec):
        self.layout = ForwardLayout(spec)
        self.layout.check()

    @cute.kernel
    def kernel(
        self,
        query_map: GridConstant[TensorMap],
        key_map: GridConstant[TensorMap],
        value_map: GridConstant[TensorMap],
        output_map: GridConstant[TensorMap],
        lse: cute.Pointer,
        batch_info: cute.Pointer | None,
        scale_log2: Float32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        query_offset: Int32,
        left: Int32,
        right: Int32,
        group: Int32,
        box_tokens: Int32,
        tiles_m: Int32,
        heads: Int32,
        batch_heads: Int32,
        section: Int32,
        total: Int32,
    ):
        layout = self.layout
        order = TileOrder(tiles_m, heads, batch_heads, section, total)
        problem = Problem(
            layout, order, scale_log2, seqlen_q, seqlen_k, query_offset, left, right, group, box_tokens, lse, batch_info
        )
        # Pointers are made before any branch: the DSL caches them where it first makes them.
        maps = [descriptor.get_ptr() for descriptor in (query_map, key_map, value_map, output_map)]
        base = cute.arch.get_dyn_smem(Int8, alignment=1024)
        shared = Shared(layout, base)
        thread, _, _ = cute.arch.thread_idx()
        warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if thread == 0:
            for ring in shared.q_rings:
                # Four warps that have read Q, or the one thread that saw O leave the same slot.
                ring.initialise(producers=1, consumers=4 if const_expr(layout.output_slot) else 1)
            shared.k_ring.initialise(producers=1, consumers=4 * layout.warpgroups)
            shared.v_ring.initialise(producers=1, consumers=4 * layout.warpgroups)
            cute.arch.mbarrier_init_fence()
            for pointer in maps:
                tma.prefetch_descriptor(pointer)
        cute.arch.sync_threads()
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(layout.producer_registers)
            if thread == 0:
                produce(problem, shared, *maps[:3])
        else:
            cute.arch.setmaxregister_increase(layout.consumer_registers)
            operands = Operands(layout)
            consume(problem, shared, operands, maps[3], thread % WARPGROUP, warpgroup - 1)

    @cute.jit
    def launch(self, lse: cute.Pointer, batch_info: cute.Pointer | None, number: Int32, scale_log2: Float32):
        """Exists to be compiled: LaunchPlans launch the kernel, and encode the real tensor maps."""
        rank = 5 if const_expr(self.layout.spec.pack_gqa) else 4
        dtype = DTYPES[self.layout.spec.dtype]
        maps = [
            create_tensor_map_tiled(Int64(0), dtype, [number] * r, [Int64(number)] * (r - 1), [8] + [1] * (r - 1))
            for r in (rank, 4, 4, rank)
        ]
        self.kernel(*maps, lse, batch_info, scale_log2, *([number] * 12)).launch(
            grid=[number, 1, 1],
            block=[self.layout.threads, 1, 1],
            smem=self.layout.shared_bytes,
            min_blocks_per_mp=1,
        )


def build(spec: KernelSpec) -> tuple:
    """Host function and fake arguments for :mod:`jax_fa4.kernels.compile`."""
    lse = make_ptr(Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    batch_info = make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=16) if spec.varlen else None
    return ForwardKernel(spec).launch, (lse, batch_info, Int32(1), Float32(1))
