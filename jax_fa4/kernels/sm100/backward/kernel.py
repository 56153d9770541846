"""(DSL) The main kernel of the backward: prologue, dispatch of warps to roles, epilogue; and its builder.

One CTA owns 128 keys of one key head and walks over every block of 128 query rows that sees them, each for all query
heads of the group in turn. Data flow of the whole::

    global --load--> K, V, Q, dO, lse2, delta in shared memory
      K, Q  --mma--> S in tensor memory --compute--> P over S                           P, dO --mma--> dV
      V, dO --mma--> dP in tensor memory --compute--> dS over dP, and in shared memory  dS, Q --mma--> dK
                                                                                        dS, K --mma--> dQ
      dQ --reduce--> shared memory --bulk addition--> float32 scratch
      dK, dV --compute (epilogue)--> shared memory --TMA--> global

See ``edges`` for every hand-over, ``tmem`` and ``shared`` for where things are, ``work`` for who computes what.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.compute import ComputeRole
from jax_fa4.kernels.sm100.backward.config import (
    BOX_COLUMNS,
    COMPUTE_REGISTERS,
    LOAD_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    REDUCE_REGISTERS,
    REDUCE_WARP,
    THREADS,
    BackwardConfig,
)
from jax_fa4.kernels.sm100.backward.context import Context, Edges, TensorMaps
from jax_fa4.kernels.sm100.backward.edges import edge_specs
from jax_fa4.kernels.sm100.backward.epilogue import EpilogueRole
from jax_fa4.kernels.sm100.backward.load import LoadRole
from jax_fa4.kernels.sm100.backward.mma import MmaRole
from jax_fa4.kernels.sm100.backward.reduce import ReduceRole
from jax_fa4.kernels.sm100.backward.shared import ALIGNMENT, SharedMap
from jax_fa4.kernels.sm100.backward.work import Problem, Work
from jax_fa4.kernels.spec import KernelSpec

TENSOR_BARRIER = 4
"""Hardware barrier of the warpgroups that read tensor memory (0 is the whole CTA's; see ``reduce``, ``epilogue``)."""

TENSOR_THREADS = 384


class Values(NamedTuple):
    """The run-time values after the tensor maps, in the order of ``plan``."""

    lse2: Int64
    delta: Int64
    dq_accum: Int64 | None  # None where a tensor map has it
    turn: Int64 | None
    batch_info: Int64 | None
    seqlen_q: Int32
    seqlen_k: Int32
    kv_heads: Int32
    group: Int32
    pairs: Int32
    pairs_together: Int32
    query_offset: Int32
    left: Int32 | None
    right: Int32 | None
    scale: Float32
    scale_log2: Float32

    @property
    def problem(self) -> Problem:
        return Problem(
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            kv_heads=self.kv_heads,
            group=self.group,
            pairs=self.pairs,
            pairs_together=self.pairs_together,
            query_offset=self.query_offset,
            left=self.left,
            right=self.right,
            batch_info=self.batch_info,
        )

    @classmethod
    def example(cls, spec: KernelSpec, scratch_by_map: bool) -> Values:
        """Values to compile for: which of them a kernel has depends on its spec."""
        address, integer, number = Int64(0), Int32(1), Float32(1.0)
        bound = integer if spec.mask == "window" else None
        return cls(
            lse2=address,
            delta=address,
            dq_accum=None if scratch_by_map else address,
            turn=address if spec.deterministic else None,
            batch_info=address if spec.varlen else None,
            seqlen_q=integer,
            seqlen_k=integer,
            kv_heads=integer,
            group=integer,
            pairs=integer,
            pairs_together=integer,
            query_offset=integer,
            left=bound,
            right=bound,
            scale=number,
            scale_log2=number,
        )


class BackwardKernel:
    """One compiled configuration. Parameters, in order: see ``plan``."""

    def __init__(self, spec: KernelSpec):
        self.config = BackwardConfig.from_spec(spec)
        self.shared = SharedMap.of(self.config)
        self.element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[self.config.dtype]

    @cute.jit
    def host(self, pointer: Int64, values: Values):
        """Launches the kernel. Only compiled: the launch plan takes this function's place at run time."""
        # The encoding happens at launch; here a tensor map is only a parameter of 128 bytes.
        swizzle = TensorMapSwizzle.s128b
        maps = [
            create_tensor_map_tiled(pointer, self.element, [values.seqlen_q], [], [BOX_COLUMNS], swizzle=swizzle)
            for _ in range(6)
        ]
        self.kernel(*maps, values).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], smem=self.shared.size, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        map_q: GridConstant[TensorMap],
        map_k: GridConstant[TensorMap],
        map_v: GridConstant[TensorMap],
        map_dout: GridConstant[TensorMap],
        map_dk: GridConstant[TensorMap],
        map_dv: GridConstant[TensorMap],
        values: Values,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=ALIGNMENT).toint()
        edges = Edges(edge_specs(config), base + self.shared.barriers)
        maps = TensorMaps(*(Int64(m.get_ptr().toint()) for m in (map_q, map_k, map_v, map_dout, map_dk, map_dv)))
        if warp == LOAD_WARP:
            self.initialise(edges, maps)
        if warp == REDUCE_WARP:
            ptx.tmem_alloc(base + self.shared.tmem_base, tmem.COLUMNS)
        ptx.tmem_fence_before()
        ptx.named_barrier(0, THREADS)
        ptx.tmem_fence_after()
        context = Context(
            config=config,
            element=self.element,
            shared=self.shared,
            base=base,
            edges=edges,
            maps=maps,
            work=Work.of(config, values.problem),
            scale=values.scale,
            scale_log2=values.scale_log2,
            lse2=values.lse2,
            delta=values.delta,
            dq_accum=values.dq_accum,
            turn=values.turn,
        )
        self.dispatch(context, warp)

    @cute.jit
    def initialise(self, edges, maps):
        """Barriers and the descriptor cache, by one lane of a warp."""
        if ptx.elect():
            for edge in edges.all:
                edge.initialise()
            ptx.mbarrier_init_fence()
            for descriptor in maps.all:
                ptx.tma_prefetch(descriptor)

    @cute.jit
    def dispatch(self, context, warp):
        """Every warp to its role, with the role's registers."""
        if warp >= MMA_WARP:
            ptx.set_registers(OTHER_REGISTERS, grow=False)
            if warp == MMA_WARP:
                MmaRole(context).run()
            elif warp == LOAD_WARP:
                LoadRole(context).run()
        elif warp >= REDUCE_WARP:
            ptx.set_registers(REDUCE_REGISTERS, grow=True)
            ReduceRole(context).run()
            ptx.tmem_fence_before()
            ptx.named_barrier(TENSOR_BARRIER, TENSOR_THREADS)
            if warp == REDUCE_WARP:
                ptx.tmem_fence_after()
                ptx.tmem_dealloc(Int32(tmem.BASE), tmem.COLUMNS)
        else:
            ptx.set_registers(COMPUTE_REGISTERS, grow=True)
            ComputeRole(context, warp >> 2).run()
            EpilogueRole(context, warp >> 2).run()
            ptx.tmem_fence_before()
            ptx.named_barrier(TENSOR_BARRIER, TENSOR_THREADS)


def build(spec: KernelSpec) -> tuple:
    """(host function, arguments to compile it for): what ``kernels.compile`` asks of a builder."""
    if spec.tile.option("ctas", 1) == 2:
        from jax_fa4.kernels.sm100.backward_pair import kernel as pair

        return pair.build(spec)
    return BackwardKernel(spec).host, (Int64(0), Values.example(spec, scratch_by_map=False))
