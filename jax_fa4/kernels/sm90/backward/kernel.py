"""Main kernel of the Hopper backward: dK and dV of one key block per CTA, dQ added to float32 scratch.

One CTA owns ``tile_n`` keys of one key head and walks over every query block that sees them, for each query head of the
group in turn, so that dK and dV are reduced in registers in a fixed order. Warps 0 to 3: one loads (``producer``), two
write dQ (``dq_writer``); warps 4 to 11 are two consumer warpgroups, 64 keys each (``consumer``, ``epilogue``).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.sm90.backward.config import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    MainConfig,
    Warp,
)
from jax_fa4.kernels.sm90.backward.consumer import consume
from jax_fa4.kernels.sm90.backward.dq_writer import write_dq
from jax_fa4.kernels.sm90.backward.producer import load
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS
from jax_fa4.kernels.sm90.backward.shared import allocate, shared_layouts
from jax_fa4.kernels.sm90.backward.tiles import operand_atoms, store_atom
from jax_fa4.kernels.sm90.backward.values import TmaTensor, Values, arguments_to_compile_for
from jax_fa4.kernels.sm90.backward.work import key_block_work
from jax_fa4.kernels.spec import KernelSpec


class BackwardMain:
    """Compile-time object; :meth:`__call__` is the host function that ``cute.compile`` takes."""

    def __init__(self, config: MainConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        dout: cute.Tensor,
        dkey: cute.Tensor,
        dvalue: cute.Tensor,
        values: Values,
    ) -> None:
        """Launches one kernel. Global tensors are (batch, rows, heads, head dim), contiguous."""
        c = self.config
        layouts = shared_layouts(c)
        operands = operand_atoms(c, layouts, query, key, value, dout)
        dkey_tma = store_atom(dkey, layouts["key"], c.tile_n, c.head_dim)
        dvalue_tma = store_atom(dvalue, layouts["value"], c.tile_n, c.head_dim_v)
        self.kernel(*operands, dkey_tma, dvalue_tma, values).launch(
            grid=[cute.ceil_div(key.shape[1], c.tile_n) * values.pairs, 1, 1],
            block=[c.threads, 1, 1],
            smem=c.shared_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        query: TmaTensor,
        key: TmaTensor,
        value: TmaTensor,
        dout: TmaTensor,
        dkey: TmaTensor,
        dvalue: TmaTensor,
        values: Values,
    ) -> None:
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == Warp.LOAD:
            for operand in (query, key, value, dout, dkey, dvalue):
                cpasync.prefetch_descriptor(operand.atom)

        shared = allocate(c)
        if warp == Warp.LOAD:
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_init(shared.key_full, 1)
                cute.arch.mbarrier_init(shared.value_full, 1)
                for stage in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(shared.query_full + stage, 1)
                    cute.arch.mbarrier_init(shared.dout_full + stage, 1)
                    cute.arch.mbarrier_init(shared.query_empty + stage, c.consumers * 4)
                    cute.arch.mbarrier_init(shared.dout_empty + stage, c.consumers * 4)
                for stage in cutlass.range_constexpr(c.dscore_stages):
                    cute.arch.mbarrier_init(shared.dscore_full + stage, c.consumers * 4)
                    cute.arch.mbarrier_init(shared.dscore_empty + stage, c.consumers * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        work = key_block_work(c, query.tensor.shape[0], key.tensor, values)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == Warp.LOAD:
                load(c, work, shared, query, key, value, dout, values)
            elif warp < Warp.DQ_WRITER + DQ_CHUNKS:
                write_dq(c, work, shared, warp - Warp.DQ_WRITER, values.dq_accum, values.turn)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consume(c, work, shared, dkey, dvalue, values.scale, values.scale_log2)


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""
    config = MainConfig.of(spec)
    arguments = arguments_to_compile_for(config, 6, accumulates=True, counts_turns=config.deterministic)
    return BackwardMain(config), arguments
