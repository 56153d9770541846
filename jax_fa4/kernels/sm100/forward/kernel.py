"""(DSL) The kernel: prologue, dispatch of warps to roles, epilogue; and its builder for the compiler.

Data flow of the whole::

    global --load--> Q, K, V in shared memory --mma--> S in tensor memory --softmax--> P over S
                                    P, V --mma--> O in tensor memory <--correction (rescale)
                                                  O --correction (normalise)--> shared memory --store--> global

See ``edges`` for every hand-over, ``tmem`` and ``shared`` for where things are, ``work`` for who computes what.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from jax_fa4.kernels.common.tile_order import TileOrder
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward import tmem
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, ForwardConfig
from jax_fa4.kernels.sm100.forward.context import Context, TensorMaps
from jax_fa4.kernels.sm100.forward.correction import CorrectionRole
from jax_fa4.kernels.sm100.forward.load import LoadRole
from jax_fa4.kernels.sm100.forward.mma import MmaRole
from jax_fa4.kernels.sm100.forward.pipeline import Edges
from jax_fa4.kernels.sm100.forward.scheduler import Scheduler
from jax_fa4.kernels.sm100.forward.shared import ALIGNMENT, SharedMap
from jax_fa4.kernels.sm100.forward.softmax import SoftmaxRole
from jax_fa4.kernels.sm100.forward.store import StoreRole
from jax_fa4.kernels.sm100.forward.work import Problem
from jax_fa4.kernels.spec import KernelSpec

CORRECTION_BARRIER = 1
"""Hardware barrier of the correction warpgroup (0 is the whole CTA's)."""


class Values(NamedTuple):
    """The run-time values after the tensor maps, in the order of ``plan.parameters``."""

    output: Int64
    lse: Int64
    batch_info: Int64 | None
    group: Int32
    box_tokens: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    query_offset: Int32
    left: Int32
    right: Int32
    tiles_m: Int32
    heads: Int32
    batch_heads: Int32
    section: Int32
    total: Int32
    head_dim_v: Int32
    scale_log2: Float32


class ForwardKernel:
    """One compiled configuration. Parameters, in order: see ``plan.parameters``."""

    def __init__(self, spec: KernelSpec):
        self.config = ForwardConfig.from_spec(spec)
        self.shared = SharedMap.of(self.config)
        self.element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[self.config.dtype]

    @cute.jit
    def host(self, pointer: Int64, values: Values):
        """Launches the kernel. Only compiled: the launch plan takes this function's place at run time."""
        # The encoding happens at launch; here a tensor map is only a parameter of 128 bytes.
        swizzle = TensorMapSwizzle.s128b
        maps = [
            create_tensor_map_tiled(pointer, self.element, [values.seqlen_q], [], [BOX_COLUMNS], swizzle=swizzle)
            for _ in range(4)
        ]
        self.kernel(*maps, values).launch(
            grid=[self.config.ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[2, 1, 1] if self.config.ctas == 2 else None,
            smem=self.shared.size,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[TensorMap],
        map_k: GridConstant[TensorMap],
        map_v: GridConstant[TensorMap],
        map_o: GridConstant[TensorMap],
        values: Values,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=ALIGNMENT).toint()
        edges = Edges(config, base + self.shared.barriers)
        maps = TensorMaps(*(Int64(m.get_ptr().toint()) for m in (map_q, map_k, map_v, map_o)))

        if cutlass.const_expr(config.pack_gqa):
            self.clear_queries(base)
        if warp == config.load_warp:
            self.initialise(edges, maps)
        if warp == config.correction_warp:
            ptx.tmem_alloc(base + self.shared.tmem_base, tmem.COLUMNS, config.ctas)
        ptx.tmem_fence_before()
        if cutlass.const_expr(config.ctas == 2):
            ptx.cluster_barrier()
        else:
            ptx.named_barrier(0, config.threads)
        ptx.tmem_fence_after()
        rank = ptx.cluster_rank() if config.ctas == 2 else 0
        context = Context(
            config=config,
            element=self.element,
            shared=self.shared,
            base=base,
            rank=rank,
            edges=edges,
            scheduler=Scheduler(config, edges, base + self.shared.responses, values.total),
            maps=maps,
            problem=Problem(
                config=config,
                order=TileOrder(values.tiles_m, values.heads, values.batch_heads, values.section, values.total),
                group=values.group,
                box_tokens=values.box_tokens,
                seqlen_q=values.seqlen_q,
                seqlen_k=values.seqlen_k,
                query_offset=values.query_offset,
                left=values.left,
                right=values.right,
                batch_info=values.batch_info,
                rank=rank,
            ),
            scale_log2=values.scale_log2,
            output=values.output,
            lse=values.lse,
            head_dim_v=values.head_dim_v,
        )
        self.dispatch(context, warp)
        if cutlass.const_expr(config.ctas == 2):
            # The peer's arrivals at this CTA's barriers, and the pair's products from its shared memory, are over.
            ptx.cluster_barrier()

    @cute.jit
    def initialise(self, edges, maps):
        """Barriers and the descriptor cache, by one lane of a warp."""
        if ptx.elect():
            for edge in edges.all:
                edge.initialise()
            ptx.mbarrier_init_fence()
            for descriptor in (maps.q, maps.k, maps.v, maps.o):
                ptx.tma_prefetch(descriptor)

    @cute.jit
    def clear_queries(self, base):
        """Zeros for the Q tiles: rows of a packed tile that no query fills are multiplied too."""
        config = self.config
        for first in cutlass.range_constexpr(0, config.q_stages * config.q_bytes, config.threads * 16):
            offset = first + cute.arch.thread_idx()[0] * 16
            if offset < config.q_stages * config.q_bytes:
                ptx.store_shared_vector(base + self.shared.q + offset, [Int32(0)] * 4)
        ptx.fence_async_shared()

    @cute.jit
    def dispatch(self, context, warp):
        """Every warp to its role, with the role's registers."""
        config = self.config
        softmax_registers, correction_registers, other_registers = config.registers
        if warp >= config.mma_warp:
            ptx.set_registers(other_registers, grow=False)
            if warp == config.mma_warp:
                if cutlass.const_expr(config.ctas == 1) or context.rank == 0:
                    MmaRole(context).run()
            elif warp == config.load_warp:
                LoadRole(context).run()
            elif warp == config.store_warp:
                StoreRole(context).run()
            elif warp == config.scheduler_warp:
                context.scheduler.run()
        elif warp >= config.correction_warp:
            ptx.set_registers(correction_registers, grow=False)
            CorrectionRole(context).run()
            # This warpgroup is the last to read tensor memory: its own barrier is enough.
            ptx.tmem_fence_before()
            ptx.named_barrier(CORRECTION_BARRIER, 128)
            if warp == config.correction_warp:
                ptx.tmem_fence_after()
                ptx.tmem_dealloc(Int32(tmem.BASE), tmem.COLUMNS, config.ctas)
        else:
            ptx.set_registers(softmax_registers, grow=True)
            SoftmaxRole(context, warp >> 2).run()


def build(spec: KernelSpec) -> tuple:
    """(host function, arguments to compile it for): what ``kernels.compile`` asks of a builder."""
    batch_info = Int64(0) if spec.varlen else None
    values = Values._make((Int64(0), Int64(0), batch_info, *[Int32(1)] * 13, Float32(1.0)))
    return ForwardKernel(spec).host, (Int64(0), values)
