"""Split backward, dK and dV: one CTA per 64 keys of one key head, walking over the query blocks that see them.

The two consumer warpgroups share the work by product: the *value* warpgroup computes S and P and accumulates
dV = P^T dO, the *key* warpgroup computes dP and dS and accumulates dK = dS^T Q. P passes from the first to the second
through shared memory, thread to thread, because both hold the same fragment of a score tile. With the accumulator of
one gradient per warpgroup, 64 keys by 256 columns fit the registers, and every operand A but K and V comes from them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.backward import wgmma
from jax_fa4.kernels.sm90.backward.config import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from jax_fa4.kernels.sm90.backward.elementwise import probabilities, row_statistics, score_gradients
from jax_fa4.kernels.sm90.backward.ptx import arrive_once_per_warp, bulk_load
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.sm90.backward.tiles import operand_atoms, store_atom, tiles, to_global, to_shared
from jax_fa4.kernels.sm90.backward.values import TmaTensor, Values, arguments_to_compile_for
from jax_fa4.kernels.sm90.backward.work import key_block_work
from jax_fa4.kernels.sm90.backward_split.config import KeyValueConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward_split.shared import allocate_key_value, key_value_layouts
from jax_fa4.kernels.spec import KernelSpec


class KeyValueGradients:
    """Compile-time object; :meth:`__call__` is the host function that ``cute.compile`` takes."""

    def __init__(self, config: KeyValueConfig) -> None:
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
        layouts = key_value_layouts(c)
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
        shared = allocate_key_value(c)
        if warp == 0:
            for operand in (query, key, value, dout, dkey, dvalue):
                cpasync.prefetch_descriptor(operand.atom)
            if cute.arch.lane_idx() == 0:
                for ring in (shared.key_ring, shared.value_ring, shared.query_ring, shared.dout_ring):
                    ring.init(1, c.consumers * 4)
                shared.exchange_ring.init(4, 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        work = key_block_work(c, cute.arch.block_idx()[0], query.tensor.shape[0], key.tensor, values)
        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                load(c, work, shared, query, key, value, dout, values)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp < 8:
                value_gradient(c, work, shared, dvalue, values.scale_log2)
            else:
                key_gradient(c, work, shared, dkey, values.scale)


@cute.jit
def load(
    c: KeyValueConfig,
    work: Any,
    shared: Any,
    query: TmaTensor,
    key: TmaTensor,
    value: TmaTensor,
    dout: TmaTensor,
    values: Values,
) -> None:
    """Load warp: K and V once, then Q with lse2 and dO with delta for every step."""
    query_tma, query_to, query_from = tiles(query, shared.query, work.batch, (c.tile_m, c.head_dim))
    key_tma, key_to, key_from = tiles(key, shared.key, work.batch, (c.tile_n, c.head_dim))
    value_tma, value_to, value_from = tiles(value, shared.value, work.batch, (c.tile_n, c.head_dim_v))
    dout_tma, dout_to, dout_from = tiles(dout, shared.dout, work.batch, (c.tile_m, c.head_dim_v))
    if work.steps > 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.key_ring.full, c.key_bytes)
            cute.arch.mbarrier_arrive_and_expect_tx(shared.value_ring.full, c.value_bytes)
        cute.copy(key_tma, key_from[None, work.key_block, 0, work.key_head], key_to, tma_bar_ptr=shared.key_ring.full)
        cute.copy(
            value_tma,
            value_from[None, work.key_block, 0, work.key_head],
            value_to,
            tma_bar_ptr=shared.value_ring.full,
        )
    member, m = work.first()
    for step in cutlass.range(work.steps, unroll=1):
        stage = step % c.stages
        head = work.first_head + member
        rows = Int64(work.scratch_block(head, m)) * c.tile_m
        full = shared.query_ring.full + stage
        shared.query_ring.wait_empty(step)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.query_bytes + c.row_stat_bytes)
            bulk_load(values.lse2 + rows, shared.lse2[None, stage].iterator, full, c.row_stat_bytes)
        cute.copy(query_tma, query_from[None, m, 0, head], query_to[None, stage], tma_bar_ptr=full)
        full = shared.dout_ring.full + stage
        shared.dout_ring.wait_empty(step)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.dout_bytes + c.row_stat_bytes)
            bulk_load(values.delta + rows, shared.delta[None, stage].iterator, full, c.row_stat_bytes)
        cute.copy(dout_tma, dout_from[None, m, 0, head], dout_to[None, stage], tma_bar_ptr=full)
        member, m = work.next(member, m)


class RoleProducts(Invariant):
    """The two products of one warpgroup: a score tile (K Q^T or V dO^T), then the gradient it feeds."""

    def __init__(self, c: KeyValueConfig, left: cute.Tensor, right: cute.Tensor, other: cute.Tensor, columns: int):
        k_major, mn_major = wgmma.K_MAJOR, wgmma.MN_MAJOR
        self.score = wgmma.product(c.dtype, k_major, k_major, (1, 1), c.tile_m)
        self.gradient = wgmma.product(c.dtype, k_major, mn_major, (1, 1), columns, a_in_registers=True)
        score, gradient = self.score.get_slice(0), self.gradient.get_slice(0)
        self.left = score.make_fragment_A(score.partition_A(left))
        self.right = score.make_fragment_B(score.partition_B(right))
        self.other = gradient.make_fragment_B(gradient.partition_B(wgmma.transposed(other)))
        self.operand = cute.make_rmem_tensor(self.gradient.partition_shape_A((c.tile_n, c.tile_m)), c.dtype)
        self.score_acc = wgmma.accumulator(self.score, c.tile_n, c.tile_m)
        self.gradient_acc = wgmma.accumulator(self.gradient, c.tile_n, columns)
        self.gradient_acc.fill(0.0)

    def issue_score(self, stage: Int32) -> None:
        wgmma.issue(self.score, self.score_acc, self.left, self.right[None, None, None, stage], False)

    def issue_gradient(self, stage: Int32) -> None:
        wgmma.issue(self.gradient, self.gradient_acc, self.operand, self.other[None, None, None, stage], True)


def exchange_fragment(c: KeyValueConfig, shared: Any, stage: Int32, thread: Int32) -> cute.Tensor:
    """The thread's fragment of a P tile as 16-byte vectors, one warpgroup's threads side by side."""
    vectors = c.exchange_elements // WARPGROUP // 4
    start = (shared.exchange[None, stage].iterator + thread * 4).align(16)
    return cute.make_tensor(start, cute.make_layout((4, vectors), stride=(1, 4 * WARPGROUP)))


def as_vectors(acc: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))


@cute.jit
def value_step(
    c: KeyValueConfig,
    work: Any,
    shared: Any,
    p: RoleProducts,
    step: Int32,
    m: Int32,
    row: Int32,
    thread: Int32,
    scale_log2: Float32,
    last: cutlass.Constexpr[bool],
) -> None:
    """One step of the value warpgroup. On entry S of the step is complete and dV of the one before still runs; unless
    ``last``, the same holds for the next step on exit."""
    stage = step % c.stages
    probabilities(c, work, p.score_acc, row_statistics(c, shared.lse2[None, stage]), m, row, scale_log2)
    arrive_once_per_warp(shared.query_ring.empty + stage)
    slot = step % c.exchange_stages
    shared.exchange_ring.wait_empty(step)
    cute.autovec_copy(as_vectors(p.score_acc), exchange_fragment(c, shared, slot, thread))
    arrive_once_per_warp(shared.exchange_ring.full + slot)
    finish_gradient(c, shared.dout_ring, step)
    wgmma.to_operand(p.score_acc, p.operand)
    if const_expr(not last):
        shared.query_ring.wait_full(step + 1)
    shared.dout_ring.wait_full(step)
    issue_products(c, p, step, last)


@cute.jit
def finish_gradient(c: KeyValueConfig, ring: Any, step: Int32) -> None:
    """Waits for the gradient's product of the step before: its operand registers and its streamed tile are free."""
    warpgroup.wait_group(0)
    if step > 0:
        arrive_once_per_warp(ring.empty + (step - 1) % c.stages)


def issue_products(c: KeyValueConfig, p: RoleProducts, step: Int32, last: bool) -> None:
    """The score tile of the next step, complete on exit, and behind it the gradient's product of this one."""
    if not last:
        p.issue_score((step + 1) % c.stages)
    p.issue_gradient(step % c.stages)
    warpgroup.wait_group(0 if last else 1)


@cute.jit
def value_gradient(c: KeyValueConfig, work: Any, shared: Any, dvalue: Any, scale_log2: Float32) -> None:
    """Runs in the value warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    row = work.key_block * c.tile_n + (thread // 32) * 16 + (thread % 32) // 4
    p = RoleProducts(c, shared.key, shared.query, shared.dout, c.head_dim_v)
    if work.steps > 0:
        shared.key_ring.wait_full(0)
        shared.query_ring.wait_full(0)
        p.issue_score(Int32(0))
        warpgroup.wait_group(0)
        member, m = work.first()
        for step in cutlass.range(work.steps - 1, unroll=1):
            value_step(c, work, shared, p, step, m, row, thread, scale_log2, False)
            member, m = work.next(member, m)
        value_step(c, work, shared, p, work.steps - 1, m, row, thread, scale_log2, True)
    store_gradient(c, work, p, shared.value, dvalue, c.head_dim_v, thread, 0)


@cute.jit
def key_step(
    c: KeyValueConfig,
    shared: Any,
    p: RoleProducts,
    step: Int32,
    thread: Int32,
    last: cutlass.Constexpr[bool],
) -> None:
    """One step of the key warpgroup. On entry dP of the step is complete and dK of the one before still runs; unless
    ``last``, the same holds for the next step on exit."""
    stage = step % c.stages
    slot = step % c.exchange_stages
    probability = cute.make_rmem_tensor(p.score_acc.layout, Float32)
    shared.exchange_ring.wait_full(step)
    cute.autovec_copy(exchange_fragment(c, shared, slot, thread), as_vectors(probability))
    arrive_once_per_warp(shared.exchange_ring.empty + slot)
    score_gradients(c, probability, p.score_acc, row_statistics(c, shared.delta[None, stage]))
    arrive_once_per_warp(shared.dout_ring.empty + stage)
    finish_gradient(c, shared.query_ring, step)
    wgmma.to_operand(p.score_acc, p.operand)
    if const_expr(not last):
        shared.dout_ring.wait_full(step + 1)
    shared.query_ring.wait_full(step)
    issue_products(c, p, step, last)


@cute.jit
def key_gradient(c: KeyValueConfig, work: Any, shared: Any, dkey: Any, scale: Float32) -> None:
    """Runs in the key warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    p = RoleProducts(c, shared.value, shared.dout, shared.query, c.head_dim)
    if work.steps > 0:
        shared.value_ring.wait_full(0)
        shared.dout_ring.wait_full(0)
        p.issue_score(Int32(0))
        warpgroup.wait_group(0)
        for step in cutlass.range(work.steps - 1, unroll=1):
            key_step(c, shared, p, step, thread, False)
        key_step(c, shared, p, work.steps - 1, thread, True)
    p.gradient_acc.store(p.gradient_acc.load() * scale)
    store_gradient(c, work, p, shared.key, dkey, c.head_dim, thread, 1)


@cute.jit
def store_gradient(
    c: KeyValueConfig,
    work: Any,
    p: RoleProducts,
    shared_tile: cute.Tensor,
    target: Any,
    columns: cutlass.Constexpr[int],
    thread: Int32,
    role: cutlass.Constexpr[int],
) -> None:
    """Rows past the key length hold exact zeros; TMA drops those past the tensor's end. The tile takes the place of V
    or K, which the other warpgroup may read until it is here too."""
    both = c.consumers * WARPGROUP
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.EPILOGUE + 1 - role, number_of_threads=both)
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE + role, number_of_threads=both)
    to_shared(c.dtype, p.gradient, p.gradient_acc, shared_tile, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + role, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        to_global(target, shared_tile, work.batch, work.key_block, work.key_head, (c.tile_n, columns))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""
    config = KeyValueConfig.of(spec)
    arguments = arguments_to_compile_for(config, 6)
    return KeyValueGradients(config), arguments
