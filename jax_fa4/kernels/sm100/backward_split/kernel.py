"""(DSL) The kernels of the split backward: prologue, dispatch of warps to roles, epilogue; and their builder.

See ``config`` for the two sides, ``maps`` for where things are and for every hand-over, ``work`` for who computes what.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS
from jax_fa4.kernels.sm100.backward.shared import ALIGNMENT
from jax_fa4.kernels.sm100.backward.work import Problem
from jax_fa4.kernels.sm100.backward_split import maps as memory
from jax_fa4.kernels.sm100.backward_split.compute import ComputeRole
from jax_fa4.kernels.sm100.backward_split.config import COMPUTE_WARPS, LOAD_WARP, MMA_WARP, THREADS, SplitConfig
from jax_fa4.kernels.sm100.backward_split.context import Context, Edges, TensorMaps
from jax_fa4.kernels.sm100.backward_split.epilogue import EpilogueRole
from jax_fa4.kernels.sm100.backward_split.load import LoadRole
from jax_fa4.kernels.sm100.backward_split.mma import MmaRole
from jax_fa4.kernels.sm100.backward_split.work import Work
from jax_fa4.kernels.spec import KernelSpec

COMPUTE_BARRIER = 1
"""Hardware barrier of both compute warpgroups (0 is the whole CTA's; see ``epilogue`` for others)."""


class SplitKernel:
    """One compiled configuration. Parameters, in order: see ``plan``."""

    def __init__(self, spec: KernelSpec):
        self.config = SplitConfig.from_spec(spec)
        self.shared = memory.SharedMap.of(self.config)
        self.element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[self.config.dtype]

    @cute.jit
    def host(
        self,
        pointer: Int64,
        lse2: Int64,
        delta: Int64,
        batch_info: Int64 | None,
        seqlen_q: Int32,
        seqlen_k: Int32,
        kv_heads: Int32,
        group: Int32,
        pairs: Int32,
        pairs_together: Int32,
        query_offset: Int32,
        left: Int32 | None,
        right: Int32 | None,
        scale: Float32,
        scale_log2: Float32,
    ):
        """Launches the kernel. Only compiled: the launch plan takes this function's place at run time."""
        # The encoding happens at launch; here a tensor map is only a parameter of 128 bytes.
        swizzle = TensorMapSwizzle.s128b
        maps = [
            create_tensor_map_tiled(pointer, self.element, [seqlen_q], [], [BOX_COLUMNS], swizzle=swizzle)
            for _ in range(6 if self.config.key_side else 5)
        ]
        if cutlass.const_expr(not self.config.key_side):
            maps.append(None)
        self.kernel(
            *maps,
            lse2,
            delta,
            batch_info,
            seqlen_q,
            seqlen_k,
            kv_heads,
            group,
            pairs,
            pairs_together,
            query_offset,
            left,
            right,
            scale,
            scale_log2,
        ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], smem=self.shared.size, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        map_x: GridConstant[TensorMap],
        map_y: GridConstant[TensorMap],
        map_z: GridConstant[TensorMap],
        map_w: GridConstant[TensorMap],
        map_dx: GridConstant[TensorMap],
        map_dy: GridConstant[TensorMap] | None,
        lse2: Int64,
        delta: Int64,
        batch_info: Int64 | None,
        seqlen_q: Int32,
        seqlen_k: Int32,
        kv_heads: Int32,
        group: Int32,
        pairs: Int32,
        pairs_together: Int32,
        query_offset: Int32,
        left: Int32 | None,
        right: Int32 | None,
        scale: Float32,
        scale_log2: Float32,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=ALIGNMENT).toint()
        edges = Edges(config, base + self.shared.barriers)
        given = (map_x, map_y, map_z, map_w, map_dx, map_dy)
        maps = TensorMaps(*(None if m is None else Int64(m.get_ptr().toint()) for m in given))
        if warp == LOAD_WARP:
            self.initialise(edges, maps)
        if warp == 0:
            ptx.tmem_alloc(base + self.shared.tmem_base, memory.COLUMNS)
        ptx.tmem_fence_before()
        ptx.named_barrier(0, THREADS)
        ptx.tmem_fence_after()
        problem = Problem(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            kv_heads=kv_heads,
            group=group,
            pairs=pairs,
            pairs_together=pairs_together,
            query_offset=query_offset,
            left=left,
            right=right,
            batch_info=batch_info,
        )
        context = Context(
            config=config,
            element=self.element,
            shared=self.shared,
            base=base,
            edges=edges,
            maps=maps,
            work=Work.of(config, problem),
            scale=scale,
            scale_log2=scale_log2,
            lse2=lse2,
            delta=delta,
        )
        self.dispatch(context, warp)

    @cute.jit
    def initialise(self, edges, maps):
        """Barriers and the descriptor cache, by one lane of a warp."""
        if ptx.elect():
            for edge in edges.all:
                edge.initialise()
            ptx.mbarrier_init_fence()
            for descriptor in (maps.x, maps.y, maps.z, maps.w):
                ptx.tma_prefetch(descriptor)

    @cute.jit
    def dispatch(self, context, warp):
        """Every warp to its role."""
        if warp == MMA_WARP:
            MmaRole(context).run()
        elif warp == LOAD_WARP:
            LoadRole(context).run()
        elif Boolean(warp < COMPUTE_WARPS):
            ComputeRole(context, warp >> 2).run()
            EpilogueRole(context, warp >> 2).run()
            ptx.tmem_fence_before()
            ptx.named_barrier(COMPUTE_BARRIER, 32 * COMPUTE_WARPS)
            if warp == 0:
                ptx.tmem_fence_after()
                ptx.tmem_dealloc(Int32(memory.BASE), memory.COLUMNS)


def build(spec: KernelSpec) -> tuple:
    """(host function, arguments to compile it for): what ``kernels.compile`` asks of a builder."""
    window = spec.mask == "window"
    arguments = [
        *[Int64(0)] * 3,
        Int64(0) if spec.varlen else None,
        *[Int32(1)] * 7,
        *[Int32(0) if window else None] * 2,
        *[Float32(1.0)] * 2,
    ]
    return SplitKernel(spec).host, arguments
