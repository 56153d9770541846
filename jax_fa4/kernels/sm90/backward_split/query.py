"""Split backward, dQ: one CTA per 128 query rows of one head, walking over the key blocks that they see.

Two consumer warpgroups of 64 rows each recompute S and dP; dS feeds dQ = dS K from registers, and dQ leaves scaled and
rounded. Nothing is accumulated in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.backward import wgmma
from jax_fa4.kernels.sm90.backward.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from jax_fa4.kernels.sm90.backward.ptx import arrive_once_per_warp
from jax_fa4.kernels.sm90.backward.ranges import BlockRanges
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.sm90.backward.tiles import operand_atoms, store_atom, tiles, to_global, to_shared
from jax_fa4.kernels.sm90.backward.values import TmaTensor, Values, arguments_to_compile_for
from jax_fa4.kernels.sm90.backward_split.config import NamedBarrier, QueryConfig
from jax_fa4.kernels.sm90.backward_split.shared import allocate_query, query_layouts
from jax_fa4.kernels.spec import KernelSpec


@dataclass(frozen=True)
class QueryWork(Invariant):
    """A query block of one head, and the key blocks that it meets."""

    query_block: Int32
    head: Int32
    key_head: Int32
    batch: Int32
    first_row: Int32
    """Row of the block in the row statistics."""
    ranges: BlockRanges
    first_block: Int32
    end_block: Int32

    @property
    def steps(self) -> Int32:
        return self.end_block - self.first_block


class QueryGradient:
    """Compile-time object; :meth:`__call__` is the host function that ``cute.compile`` takes."""

    def __init__(self, config: QueryConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        dout: cute.Tensor,
        dquery: cute.Tensor,
        values: Values,
    ) -> None:
        """Launches one kernel. Global tensors are (batch, rows, heads, head dim), contiguous; ``pairs`` counts (batch,
        query head)."""
        c = self.config
        layouts = query_layouts(c)
        operands = operand_atoms(c, layouts, query, key, value, dout)
        dquery_tma = store_atom(dquery, layouts["query"], c.tile_m, c.head_dim)
        self.kernel(*operands, dquery_tma, values).launch(
            grid=[cute.ceil_div(query.shape[1], c.tile_m) * values.pairs, 1, 1],
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
        dquery: TmaTensor,
        values: Values,
    ) -> None:
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = allocate_query(c)
        if warp == 0:
            for operand in (query, key, value, dout, dquery):
                cpasync.prefetch_descriptor(operand.atom)
            if cute.arch.lane_idx() == 0:
                for ring in (shared.query_ring, shared.dout_ring, shared.key_ring, shared.value_ring):
                    ring.init(1, c.consumers * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        work = query_block_work(c, query.tensor, key.tensor.shape[0], values)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                load(c, work, shared, query, key, value, dout)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consume(c, work, shared, dquery, values)


def query_block_work(c: QueryConfig, query: cute.Tensor, rows_k: Int32, values: Values) -> QueryWork:
    """Decodes the block index: teams of (batch, head) pairs whose K and V stay in L2; in a team the query block is the
    slow index, descending, which under a causal mask is longest first."""
    pairs_together = values.pairs_together
    rows_q, heads = query.shape[0], query.shape[2]
    query_blocks = cute.ceil_div(rows_q, c.tile_m)
    index, _, _ = cute.arch.block_idx()
    team = index // (pairs_together * query_blocks)
    rest = index - team * pairs_together * query_blocks
    team_size = cutlass.min(pairs_together, values.pairs - team * pairs_together)
    slow = rest // team_size
    query_block = query_blocks - 1 - slow
    pair = team * pairs_together + rest - slow * team_size
    batch = pair // heads
    head = pair - batch * heads
    ranges = values.ranges(c, batch, rows_q, rows_k)
    first_block, end_block = ranges.key_blocks(query_block)
    padded_rows = cute.ceil_div(rows_q, c.row_padding) * c.row_padding
    return QueryWork(
        query_block=query_block,
        head=head,
        key_head=head // values.group,
        batch=batch,
        first_row=query_block * c.tile_m + pair * padded_rows,
        ranges=ranges,
        first_block=first_block,
        end_block=end_block,
    )


@cute.jit
def load(c: QueryConfig, work: QueryWork, shared: Any, query: Any, key: Any, value: Any, dout: Any) -> None:
    """Load warp: Q and dO once, then K and V for every step."""
    query_tma, query_to, query_from = tiles(query, shared.query, work.batch, (c.tile_m, c.head_dim))
    key_tma, key_to, key_from = tiles(key, shared.key, work.batch, (c.tile_n, c.head_dim))
    value_tma, value_to, value_from = tiles(value, shared.value, work.batch, (c.tile_n, c.head_dim_v))
    dout_tma, dout_to, dout_from = tiles(dout, shared.dout, work.batch, (c.tile_m, c.head_dim_v))
    if work.steps > 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.query_ring.full, c.query_bytes)
            cute.arch.mbarrier_arrive_and_expect_tx(shared.dout_ring.full, c.dout_bytes)
        cute.copy(
            query_tma, query_from[None, work.query_block, 0, work.head], query_to, tma_bar_ptr=shared.query_ring.full
        )
    for step in cutlass.range(work.steps, unroll=1):
        n = work.first_block + step
        stage = step % c.key_stages
        full = shared.key_ring.full + stage
        shared.key_ring.wait_empty(step)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.key_bytes)
        cute.copy(key_tma, key_from[None, n, 0, work.key_head], key_to[None, stage], tma_bar_ptr=full)
        if step == 0:
            cute.copy(
                dout_tma, dout_from[None, work.query_block, 0, work.head], dout_to, tma_bar_ptr=shared.dout_ring.full
            )
        stage = step % c.value_stages
        full = shared.value_ring.full + stage
        shared.value_ring.wait_empty(step)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.value_bytes)
        cute.copy(value_tma, value_from[None, n, 0, work.key_head], value_to[None, stage], tma_bar_ptr=full)


class Products(Invariant):
    """S = Q K^T, dP = dO V^T, dQ = dS K of one warpgroup's rows."""

    def __init__(self, c: QueryConfig, shared: Any, group: Int32) -> None:
        k_major, mn_major = wgmma.K_MAJOR, wgmma.MN_MAJOR
        self.score = wgmma.product(c.dtype, k_major, k_major, (2, 1), c.tile_n)
        self.dquery = wgmma.product(c.dtype, k_major, mn_major, (2, 1), c.head_dim, a_in_registers=True)
        score, dquery = wgmma.warpgroup_slice(self.score, group), wgmma.warpgroup_slice(self.dquery, group)
        self.query = score.make_fragment_A(score.partition_A(shared.query))
        self.dout = score.make_fragment_A(score.partition_A(shared.dout))
        self.key = score.make_fragment_B(score.partition_B(shared.key))
        self.value = score.make_fragment_B(score.partition_B(shared.value))
        self.key_t = dquery.make_fragment_B(dquery.partition_B(wgmma.transposed(shared.key)))
        self.operand = cute.make_rmem_tensor(self.dquery.partition_shape_A((c.tile_m, c.tile_n)), c.dtype)
        self.score_acc = wgmma.accumulator(self.score, c.tile_m, c.tile_n)
        self.dprobability_acc = wgmma.accumulator(self.score, c.tile_m, c.tile_n)
        self.dquery_acc = wgmma.accumulator(self.dquery, c.tile_m, c.head_dim)
        self.dquery_acc.fill(0.0)

    def issue_score(self, stage: Int32) -> None:
        wgmma.issue(self.score, self.score_acc, self.query, self.key[None, None, None, stage], False)

    def issue_dprobability(self, stage: Int32) -> None:
        wgmma.issue(self.score, self.dprobability_acc, self.dout, self.value[None, None, None, stage], False)

    def issue_dquery(self, stage: Int32) -> None:
        wgmma.issue(self.dquery, self.dquery_acc, self.operand, self.key_t[None, None, None, stage], True)


@cute.jit
def probabilities(
    c: QueryConfig, work: QueryWork, score: cute.Tensor, lse2: cute.Tensor, n: Int32, row: Int32, scale_log2: Float32
) -> None:
    """score becomes P = exp2(score * scale_log2 - lse2), hidden pairs 0. ``row`` is the thread's first query."""
    for j in cutlass.range_constexpr(c.tile_n // 8):
        for i in cutlass.range_constexpr(4):
            score[4 * j + i] = cute.math.exp2(score[4 * j + i] * scale_log2 - lse2[i // 2], fastmath=True)
    if work.ranges.needs_mask(work.query_block, n):
        column = (cute.arch.lane_idx() % 4) * 2
        for r in cutlass.range_constexpr(2):
            low, high = work.ranges.column_bounds(row + 8 * r, n)
            low, high = low - column, high - column
            for j in cutlass.range_constexpr(c.tile_n // 8):
                for i in cutlass.range_constexpr(2):
                    seen = (8 * j + i >= low) & (8 * j + i < high)
                    kept = score[4 * j + 2 * r + i]
                    score[4 * j + 2 * r + i] = kept if seen else Float32(0)


@cute.jit
def query_step(
    c: QueryConfig,
    work: QueryWork,
    shared: Any,
    p: Products,
    lse2: cute.Tensor,
    delta: cute.Tensor,
    step: Int32,
    row: Int32,
    scale_log2: Float32,
    last: cutlass.Constexpr[bool],
) -> None:
    """One step. On entry S of the step is complete; unless ``last``, that of the next is on exit."""
    shared.value_ring.wait_full(step)
    p.issue_dprobability(step % c.value_stages)
    probabilities(c, work, p.score_acc, lse2, work.first_block + step, row, scale_log2)
    warpgroup.wait_group(0)
    arrive_once_per_warp(shared.value_ring.empty + step % c.value_stages)
    for k in cutlass.range_constexpr(cute.size(p.score_acc)):
        p.dprobability_acc[k] = p.score_acc[k] * (p.dprobability_acc[k] - delta[(k % 4) // 2])
    wgmma.to_operand(p.dprobability_acc, p.operand)
    if const_expr(not last):
        shared.key_ring.wait_full(step + 1)
    p.issue_dquery(step % c.key_stages)
    if const_expr(not last):
        p.issue_score((step + 1) % c.key_stages)
    # dQ has left this step's K: the load of the step after next can start.
    warpgroup.wait_group(0 if last else 1)
    arrive_once_per_warp(shared.key_ring.empty + step % c.key_stages)
    warpgroup.wait_group(0)


@cute.jit
def consume(
    c: QueryConfig,
    work: QueryWork,
    shared: Any,
    dquery: TmaTensor,
    values: Values,
) -> None:
    """Runs in both consumer warpgroups."""
    thread = cute.arch.thread_idx()[0] - WARPGROUP
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    row_in_block = (thread // 32) * 16 + (thread % 32) // 4
    row = work.query_block * c.tile_m + row_in_block
    row_lse2, row_delta = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    rows = cute.make_layout(2, stride=8)
    cute.autovec_copy(cute.make_tensor(values.lse2 + (Int64(work.first_row) + row_in_block), rows), row_lse2)
    cute.autovec_copy(cute.make_tensor(values.delta + (Int64(work.first_row) + row_in_block), rows), row_delta)
    p = Products(c, shared, group)
    if work.steps > 0:
        shared.query_ring.wait_full(0)
        shared.key_ring.wait_full(0)
        p.issue_score(Int32(0))
        shared.dout_ring.wait_full(0)
        warpgroup.wait_group(0)
        for step in cutlass.range(work.steps - 1, unroll=1):
            query_step(c, work, shared, p, row_lse2, row_delta, step, row, values.scale_log2, False)
        query_step(c, work, shared, p, row_lse2, row_delta, work.steps - 1, row, values.scale_log2, True)

    p.dquery_acc.store(p.dquery_acc.load() * values.scale)
    # dQ takes the place of Q, which nothing reads any more once both warpgroups are here.
    threads = c.consumers * WARPGROUP
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    to_shared(c.dtype, p.dquery, p.dquery_acc, shared.query, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        to_global(dquery, shared.query, work.batch, work.query_block, work.head, (c.tile_m, c.head_dim))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""
    config = QueryConfig.of(spec)
    # Rows of these statistics are read one by one.
    arguments = arguments_to_compile_for(config, 5, statistics_align=4)
    return QueryGradient(config), arguments
