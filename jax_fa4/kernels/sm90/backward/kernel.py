"""Main kernel of the Hopper backward: dK and dV of key blocks, dQ added to float32 scratch.

A tile is ``tile_n`` keys of one key head: a CTA walks over every query block that sees them, each for all query heads
of the group in turn, so that dK and dV are reduced in registers in a fixed order. It does one tile, or, where the tile
option ``persistent`` is set, one after another from a queue (``tile_queue``). Warps 0 to 3: one loads (``producer``),
two write dQ (``dq_writer``), one stores dK and dV of persistent CTAs (``epilogue``); warps 4 to 11 are two consumer
warpgroups, 64 keys each (``consumer``). Edges between them, all mbarriers but the last two; (p): persistent CTAs only:

    edge                   producer -> consumer     arrivals          phase counts
    tile full, empty (p)   load -> all others       1, 11 warps       tiles (two slots)
    key full, empty (p)    load -> consumers        1 + tx, 8 warps   tiles with steps
    value full             load -> consumers        1 + tx            tiles with steps
    query, dout            load -> consumers        1 + tx, 8 warps   steps (two stages)
    dscore                 consumers -> consumers   8, 8 warps        steps (two stages)
    staged full (p)        consumers -> store       8 warps           tiles
    staged empty (p)       store -> consumers, load 1 warp            tiles (dK left dS's memory, dV left V's)
    DQ_FULL, DQ_EMPTY      consumers <-> dQ writer  named, 160        steps
    TURN, EPILOGUE         consumers <-> consumers  named, 256        steps, tiles
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.sm90.backward import tile_queue
from jax_fa4.kernels.sm90.backward.config import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    MainConfig,
    Warp,
)
from jax_fa4.kernels.sm90.backward.consumer import Consumer, consume, drain
from jax_fa4.kernels.sm90.backward.dq_writer import write_dq
from jax_fa4.kernels.sm90.backward.epilogue import store_gradients
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
                if const_expr(c.persistent):
                    cute.arch.mbarrier_init(shared.key_empty, c.consumers * 4)
                    cute.arch.mbarrier_init(shared.staged_full, c.consumers * 4)
                    cute.arch.mbarrier_init(shared.staged_empty, 1)
                    for slot in cutlass.range_constexpr(tile_queue.SLOTS):
                        cute.arch.mbarrier_init(shared.tile_full + slot, 1)
                        cute.arch.mbarrier_init(shared.tile_empty + slot, tile_queue.READERS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        def decode(number: Int32) -> Any:
            return key_block_work(c, number, query.tensor.shape[0], key.tensor, values)

        if const_expr(c.persistent):
            total = cute.ceil_div(key.tensor.shape[0], c.tile_n) * values.pairs
            each_tile = partial(tile_queue.each_tile, total, decode)
        else:
            each_tile = partial(tile_queue.only_tile, decode(cute.arch.block_idx()[0]))
        read = partial(tile_queue.read, shared)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == Warp.LOAD:

                def load_tile(work: Any, before: tile_queue.Before) -> None:
                    load(c, work, shared, query, key, value, dout, values, before)

                each_tile(partial(tile_queue.draw, shared, values.counter), load_tile)
            elif warp < Warp.DQ_WRITER + DQ_CHUNKS:

                def write_tile(work: Any, before: tile_queue.Before) -> None:
                    write_dq(c, work, shared, warp - Warp.DQ_WRITER, values.dq_accum, values.turn, before)

                each_tile(read, write_tile)
            elif const_expr(c.persistent):

                def store_tile(work: Any, before: tile_queue.Before) -> None:
                    store_gradients(c, work, shared, dkey, dvalue, before)

                each_tile(read, store_tile)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = Consumer(c, shared)

            def consume_tile(work: Any, before: tile_queue.Before) -> None:
                consume(c, work, shared, consumer, dkey, dvalue, values.scale, values.scale_log2, before)

            steps = each_tile(read, consume_tile)
            if const_expr(c.persistent):
                drain(c, consumer.group, steps)


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""
    config = MainConfig.of(spec)
    arguments = arguments_to_compile_for(
        config, 6, accumulates=True, draws_tiles=config.persistent, counts_turns=config.deterministic
    )
    return BackwardMain(config), arguments
