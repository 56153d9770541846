"""Load warp: for every tile K and V, then Q with lse2 and dO with delta for every step, through TMA and bulk copies.

In a persistent CTA it runs ahead of the consumers into the next tile, whose K it loads as soon as this one's last dQ is
done, and its V when dV, which leaves through V's memory, has been read.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr

from jax_fa4.kernels.sm90.backward.config import MainConfig
from jax_fa4.kernels.sm90.backward.ptx import bulk_load
from jax_fa4.kernels.sm90.backward.tile_queue import Before
from jax_fa4.kernels.sm90.backward.tiles import tiles
from jax_fa4.kernels.sm90.backward.values import TmaTensor, Values


@cute.jit
def load(
    c: MainConfig,
    work: Any,
    shared: Any,
    query: TmaTensor,
    key: TmaTensor,
    value: TmaTensor,
    dout: TmaTensor,
    values: Values,
    before: Before,
) -> None:
    """One tile, in one warp. Step ``i`` of all that the CTA makes uses stage ``i % stages``."""
    query_tma, query_to, query_from = tiles(query, shared.query, work.batch, (c.tile_m, c.head_dim))
    key_tma, key_to, key_from = tiles(key, shared.key, work.batch, (c.tile_n, c.head_dim))
    value_tma, value_to, value_from = tiles(value, shared.value, work.batch, (c.tile_n, c.head_dim_v))
    dout_tma, dout_to, dout_from = tiles(dout, shared.dout, work.batch, (c.tile_m, c.head_dim_v))

    if work.steps > 0:
        if const_expr(c.persistent):
            cute.arch.mbarrier_wait(shared.key_empty, (before.loaded & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_full, c.tile_n * c.head_dim * 2)
            if const_expr(not c.persistent):
                cute.arch.mbarrier_arrive_and_expect_tx(shared.value_full, c.tile_n * c.head_dim_v * 2)
        cute.copy(key_tma, key_from[None, work.key_block, 0, work.key_head], key_to, tma_bar_ptr=shared.key_full)

    member, m = work.first()
    for i in cutlass.range(work.steps, unroll=1):
        step = before.steps + i
        stage = step % c.stages
        parity = ((step // c.stages) & 1) ^ 1
        head = work.first_head + member
        rows = Int64(work.scratch_block(head, m)) * c.tile_m

        full = shared.query_full + stage
        cute.arch.mbarrier_wait(shared.query_empty + stage, parity)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.query_bytes + c.row_stat_bytes)
            bulk_load(values.lse2 + rows, shared.lse2[None, stage].iterator, full, c.row_stat_bytes)
        cute.copy(query_tma, query_from[None, m, 0, head], query_to[None, stage], tma_bar_ptr=full)

        if i == 0:
            if const_expr(c.persistent):
                cute.arch.mbarrier_wait(shared.staged_empty, (before.tiles & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.value_full, c.tile_n * c.head_dim_v * 2)
            cute.copy(
                value_tma,
                value_from[None, work.key_block, 0, work.key_head],
                value_to,
                tma_bar_ptr=shared.value_full,
            )
        full = shared.dout_full + stage
        cute.arch.mbarrier_wait(shared.dout_empty + stage, parity)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.dout_bytes + c.row_stat_bytes)
            bulk_load(values.delta + rows, shared.delta[None, stage].iterator, full, c.row_stat_bytes)
        cute.copy(dout_tma, dout_from[None, m, 0, head], dout_to[None, stage], tma_bar_ptr=full)
        member, m = work.next(member, m)
    if const_expr(c.persistent):  # noqa: SIM102 - a compile-time condition must stand alone
        if work.steps == 0:  # no phase may be skipped: a parity tells only one from the next
            cute.arch.mbarrier_wait(shared.staged_empty, (before.tiles & 1) ^ 1)
