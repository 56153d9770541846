"""(DSL) The main kernel of the backward on pairs of CTAs: prologue, dispatch of warps to roles, epilogue; its builder.

A pair owns 256 keys of one key head, 128 a CTA, and walks over every block of 128 query rows that sees one of them,
each for all query heads of the group in turn. Data flow of the whole, in each CTA::

    global --load--> own K, V; half of the pair's K by columns; half of Q and dO by rows and by columns; lse2, delta
      K, Q  --mma, of both CTAs' K--> S of its keys in tensor memory --compute--> P over S              P, dO --> dV
      V, dO --mma--> dP of its keys in tensor memory --compute--> dS over dP                            dS, Q --> dK
                                                     --compute--> dS of its keys and rows, in shared memory
                                                     --compute--> dS of the peer's rows, in shared memory
                                                          --relay, peer's relay--> the other keys' dS of its rows
      dS of 64 rows with 256 keys, K --mma--> dQ of 64 rows in tensor memory
      dQ --reduce--> shared memory --addition by TMA--> float32 scratch
      dK, dV --compute (epilogue)--> shared memory --TMA--> global

For dV and dK each CTA's tensor core reads half as much of dO and Q from shared memory as a single CTA's, for S and dP
half as much of Q and dO, and a CTA writes, reads and adds half as many rows of dQ per step. See
``edges`` for every hand-over, ``tmem`` and ``shared`` for where things are, ``mma`` for the products and their order,
``relay`` for the exchange. Preprocess and postprocess are the single-CTA kernel's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import GridConstant, Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import (
    BOX_COLUMNS,
    LOAD_WARP,
    MMA_WARP,
    REDUCE_WARP,
    THREADS,
    BackwardConfig,
)
from jax_fa4.kernels.sm100.backward.context import TensorMaps
from jax_fa4.kernels.sm100.backward.epilogue import EpilogueRole
from jax_fa4.kernels.sm100.backward.kernel import TENSOR_BARRIER, TENSOR_THREADS, Values
from jax_fa4.kernels.sm100.backward.shared import ALIGNMENT
from jax_fa4.kernels.sm100.backward.work import Work
from jax_fa4.kernels.sm100.backward_pair import tmem
from jax_fa4.kernels.sm100.backward_pair.compute import PairComputeRole
from jax_fa4.kernels.sm100.backward_pair.config import CTAS, DOUT_WARP, RELAY_WARP, PairShape
from jax_fa4.kernels.sm100.backward_pair.context import ColumnMaps, PairContext, PairEdges
from jax_fa4.kernels.sm100.backward_pair.edges import EDGES
from jax_fa4.kernels.sm100.backward_pair.load import PairLoadRole
from jax_fa4.kernels.sm100.backward_pair.mma import PairMmaRole
from jax_fa4.kernels.sm100.backward_pair.reduce import PairReduceRole
from jax_fa4.kernels.sm100.backward_pair.relay import RelayRole
from jax_fa4.kernels.sm100.backward_pair.shared import PairMap
from jax_fa4.kernels.spec import KernelSpec

LAUNCH_REGISTERS = 65536 // THREADS
"""Registers that a thread has at launch."""


class PairKernel:
    """One compiled configuration. Parameters, in order: see ``plan``."""

    def __init__(self, spec: KernelSpec):
        self.config = BackwardConfig.from_spec(spec)
        self.shared = PairMap.of(self.config)
        self.shape = PairShape.of(self.config)
        self.element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[self.config.dtype]

    @cute.jit
    def host(self, pointer: Int64, values: Values):
        """Launches the kernel. Only compiled: the launch plan takes this function's place at run time."""
        # The encoding happens at launch; here a tensor map is only a parameter of 128 bytes.
        maps = [
            create_tensor_map_tiled(
                pointer, self.element, [values.seqlen_q], [], [BOX_COLUMNS], swizzle=TensorMapSwizzle.s128b
            )
            for _ in range(10)
        ]
        self.kernel(*maps, values).launch(
            grid=[CTAS, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            smem=self.shared.size,
            min_blocks_per_mp=1,
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
        map_qt: GridConstant[TensorMap],
        map_kt: GridConstant[TensorMap],
        map_doutt: GridConstant[TensorMap],
        map_dq: GridConstant[TensorMap],
        values: Values,
    ):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=ALIGNMENT).toint()
        edges = PairEdges(EDGES, base + self.shared.barriers, CTAS)
        maps = TensorMaps(*(Int64(m.get_ptr().toint()) for m in (map_q, map_k, map_v, map_dout, map_dk, map_dv)))
        by_columns = [Int64(m.get_ptr().toint()) for m in (map_qt, map_kt, map_doutt, map_dq)]
        if warp == LOAD_WARP:
            self.initialise(edges, (*maps.all, *by_columns))
        if warp == REDUCE_WARP:
            ptx.tmem_alloc(base + self.shared.tmem_base, tmem.COLUMNS, CTAS)
        ptx.tmem_fence_before()
        ptx.cluster_barrier()
        ptx.tmem_fence_after()
        rank = ptx.cluster_rank()
        context = PairContext(
            config=config,
            element=self.element,
            shared=self.shared,
            base=base,
            edges=edges,
            maps=maps,
            work=Work.of(config, values.problem, rank),
            scale=values.scale,
            scale_log2=values.scale_log2,
            lse2=values.lse2,
            delta=values.delta,
            dq_accum=Int64(0),
            turn=values.turn,
            shape=self.shape,
            rank=rank,
            column_maps=ColumnMaps(*by_columns),
        )
        self.dispatch(context, warp)
        # The peer's arrivals at this CTA's barriers, and the pair's products from its shared memory, are over.
        ptx.cluster_barrier()

    @cute.jit
    def initialise(self, edges, descriptors):
        """Barriers and the descriptor cache, by one lane of a warp."""
        if ptx.elect():
            for edge in edges.all:
                edge.initialise()
            ptx.mbarrier_init_fence()
            for descriptor in descriptors:
                ptx.tma_prefetch(descriptor)

    @cute.jit
    def dispatch(self, context, warp):
        """Every warp to its role, with the role's registers."""
        compute_registers, reduce_registers, other_registers = self.shape.registers
        if warp >= MMA_WARP:
            ptx.set_registers(other_registers, grow=False)
            if warp == MMA_WARP:
                if context.rank == 0:
                    PairMmaRole(context).run()
            elif warp == LOAD_WARP:
                PairLoadRole(context, of_query=True).run()
            elif warp == DOUT_WARP:
                PairLoadRole(context, of_query=False).run()
            elif warp == RELAY_WARP:
                RelayRole(context).run()
        elif warp >= REDUCE_WARP:
            ptx.set_registers(reduce_registers, grow=reduce_registers > LAUNCH_REGISTERS)
            PairReduceRole(context).run()
            ptx.tmem_fence_before()
            ptx.named_barrier(TENSOR_BARRIER, TENSOR_THREADS)
            if warp == REDUCE_WARP:
                ptx.tmem_fence_after()
                ptx.tmem_dealloc(Int32(tmem.BASE), tmem.COLUMNS, CTAS)
        else:
            ptx.set_registers(compute_registers, grow=True)
            PairComputeRole(context, warp >> 2).run()
            dvalue, dkey = tmem.dvalue(self.shape), tmem.dkey(self.shape, self.config.columns_v)
            EpilogueRole(context, warp >> 2, dvalue, dkey).run()
            ptx.tmem_fence_before()
            ptx.named_barrier(TENSOR_BARRIER, TENSOR_THREADS)


def build(spec: KernelSpec) -> tuple:
    """(host function, arguments to compile it for): what ``kernels.compile`` asks of a builder."""
    return PairKernel(spec).host, (Int64(0), Values.example(spec, scratch_by_map=True))
