"""Main kernel of the Hopper backward: dK and dV of one key block per CTA, dQ added to float32 scratch.

One CTA owns ``tile_n`` keys of one key head and walks over every query block that sees them, for each query head of the
group in turn, so that dK and dV are reduced in registers in a fixed order. Warps 0 to 3: one loads (``producer``), two
write dQ (``dq_writer``); warps 4 to 11 are two consumer warpgroups, 64 keys each (``consumer``, ``epilogue``).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
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
from jax_fa4.kernels.sm90.backward.tiles import load_atom, store_atom
from jax_fa4.kernels.sm90.backward.work import MaskBounds, key_block_work
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
        lse2: cute.Pointer,
        delta: cute.Pointer,
        dq_accum: cute.Pointer,
        turn: cute.Pointer | None,
        batch_info: cute.Pointer | None,
        query_offset: Int32,
        left: Int32 | None,
        right: Int32 | None,
        scale: Float32,
        scale_log2: Float32,
        group: Int32,
        pairs: Int32,
        pairs_together: Int32,
    ) -> None:
        """Launches one kernel. Global tensors are (batch, rows, heads, head dim), contiguous."""
        c = self.config
        layouts = shared_layouts(c)
        query_tma, query_t = load_atom(query, layouts["query"], c.tile_m, c.head_dim)
        key_tma, key_t = load_atom(key, layouts["key"], c.tile_n, c.head_dim)
        value_tma, value_t = load_atom(value, layouts["value"], c.tile_n, c.head_dim_v)
        dout_tma, dout_t = load_atom(dout, layouts["dout"], c.tile_m, c.head_dim_v)
        dkey_tma, dkey_t = store_atom(dkey, layouts["key"], c.tile_n, c.head_dim)
        dvalue_tma, dvalue_t = store_atom(dvalue, layouts["value"], c.tile_n, c.head_dim_v)
        self.kernel(
            query_tma,
            query_t,
            key_tma,
            key_t,
            value_tma,
            value_t,
            dout_tma,
            dout_t,
            dkey_tma,
            dkey_t,
            dvalue_tma,
            dvalue_t,
            lse2,
            delta,
            dq_accum,
            turn,
            batch_info,
            query_offset,
            left,
            right,
            scale,
            scale_log2,
            group,
            pairs,
            pairs_together,
        ).launch(
            grid=[cute.ceil_div(key.shape[1], c.tile_n) * pairs, 1, 1],
            block=[c.threads, 1, 1],
            smem=c.shared_bytes,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        query_tma: cute.CopyAtom,
        query: cute.Tensor,
        key_tma: cute.CopyAtom,
        key: cute.Tensor,
        value_tma: cute.CopyAtom,
        value: cute.Tensor,
        dout_tma: cute.CopyAtom,
        dout: cute.Tensor,
        dkey_tma: cute.CopyAtom,
        dkey: cute.Tensor,
        dvalue_tma: cute.CopyAtom,
        dvalue: cute.Tensor,
        lse2: cute.Pointer,
        delta: cute.Pointer,
        dq_accum: cute.Pointer,
        turn: cute.Pointer | None,
        batch_info: cute.Pointer | None,
        query_offset: Int32,
        left: Int32 | None,
        right: Int32 | None,
        scale: Float32,
        scale_log2: Float32,
        group: Int32,
        pairs: Int32,
        pairs_together: Int32,
    ) -> None:
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == Warp.LOAD:
            for atom in (query_tma, key_tma, value_tma, dout_tma, dkey_tma, dvalue_tma):
                cpasync.prefetch_descriptor(atom)

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

        mask = MaskBounds(batch_info, query_offset, left, right)
        work = key_block_work(c, query.shape[0], key, mask, group, pairs, pairs_together)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == Warp.LOAD:
                load(
                    c,
                    work,
                    shared,
                    (query_tma, query),
                    (key_tma, key),
                    (value_tma, value),
                    (dout_tma, dout),
                    lse2,
                    delta,
                )
            elif warp < Warp.DQ_WRITER + DQ_CHUNKS:
                write_dq(c, work, shared, warp - Warp.DQ_WRITER, dq_accum, turn)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consume(c, work, shared, (dkey_tma, dkey), (dvalue_tma, dvalue), scale, scale_log2)


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""
    config = MainConfig.of(spec)
    sym = cute.SymInt

    def tensor() -> Any:
        return cute.runtime.make_fake_compact_tensor(
            config.dtype, (sym(), sym(), sym(), sym(divisibility=8)), stride_order=(3, 2, 1, 0), assumed_align=16
        )

    def pointer(dtype, align: int = 16) -> Any:
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    window = config.mask == "window"
    arguments = (
        *(tensor() for _ in range(6)),
        pointer(Float32),
        pointer(Float32),
        pointer(Float32),
        pointer(Int32, 4) if config.deterministic else None,
        pointer(Int32) if config.varlen else None,
        Int32(0),
        Int32(0) if window else None,
        Int32(0) if window else None,
        Float32(1),
        Float32(1),
        Int32(1),
        Int32(1),
        Int32(1),
    )
    return BackwardMain(config), arguments
