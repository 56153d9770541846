"""Consumer warpgroups: recompute P and dS of each step, accumulate dV and dK in registers, hand dQ to its writer.

Scores are held transposed (keys are rows), so that P and dS feed dV and dK from registers; dS goes to shared memory
once, for dQ. The product S of the next step is issued before this step's dQ: it covers the wait for the other
warpgroup's dS.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from jax_fa4.kernels.sm90.backward import wgmma
from jax_fa4.kernels.sm90.backward.config import MainConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward.dq_writer import THREADS as DQ_THREADS
from jax_fa4.kernels.sm90.backward.elementwise import probabilities, row_statistics, score_gradients
from jax_fa4.kernels.sm90.backward.epilogue import stage_gradients, store_in_place
from jax_fa4.kernels.sm90.backward.ptx import arrive_once_per_warp
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.sm90.backward.tile_queue import Before


class Products:
    """The five products: tiled MMAs, operand views of one warpgroup, accumulators."""

    def __init__(self, c: MainConfig, shared: Any, group: Int32) -> None:
        k_major, mn_major = wgmma.K_MAJOR, wgmma.MN_MAJOR
        self.score = wgmma.product(c.dtype, k_major, k_major, (2, 1), c.tile_m)
        self.dvalue = wgmma.product(c.dtype, k_major, mn_major, (2, 1), c.head_dim_v, a_in_registers=True)
        self.dkey = wgmma.product(c.dtype, k_major, mn_major, (2, 1), c.head_dim, a_in_registers=True)
        dq_groups = (2, 1) if c.dq_block.splits_rows else (1, 2)
        self.dquery = wgmma.product(c.dtype, mn_major, mn_major, dq_groups, c.dq_block.chunk_columns)

        score, dkey, dvalue, dquery = (
            wgmma.warpgroup_slice(p, group) for p in (self.score, self.dkey, self.dvalue, self.dquery)
        )
        self.key = score.make_fragment_A(score.partition_A(shared.key))
        self.value = score.make_fragment_A(score.partition_A(shared.value))
        self.query = score.make_fragment_B(score.partition_B(shared.query))
        self.dout = score.make_fragment_B(score.partition_B(shared.dout))
        self.query_t = dkey.make_fragment_B(dkey.partition_B(wgmma.transposed(shared.query)))
        self.dout_t = dvalue.make_fragment_B(dvalue.partition_B(wgmma.transposed(shared.dout)))
        self.dscore = dquery.make_fragment_A(dquery.partition_A(wgmma.transposed(shared.dscore)))
        self.key_t = dquery.make_fragment_B(dquery.partition_B(wgmma.transposed(shared.key)))

        operand = self.dvalue.partition_shape_A((c.tile_n, c.tile_m))
        self.probability_operand = cute.make_rmem_tensor(operand, c.dtype)
        self.dscore_operand = cute.make_rmem_tensor(operand, c.dtype)
        self.score_acc = wgmma.accumulator(self.score, c.tile_n, c.tile_m)
        self.dprobability_acc = wgmma.accumulator(self.score, c.tile_n, c.tile_m)
        self.dkey_acc = wgmma.accumulator(self.dkey, c.tile_n, c.head_dim)
        self.dvalue_acc = wgmma.accumulator(self.dvalue, c.tile_n, c.head_dim_v)
        self.dquery_acc = wgmma.accumulator(self.dquery, c.tile_m, c.head_dim)


@cute.jit
def step_products(
    c: MainConfig,
    work: Any,
    shared: Any,
    p: Products,
    store_dscore: Any,
    step: Int32,
    m: Int32,
    first: Int32,
    row: Int32,
    group: Int32,
    scale_log2: Float32,
    last: cutlass.Constexpr[bool],
) -> None:
    """One step; ``step`` counts those of all tiles, the tile's own begin with ``first``. On entry S of the step is
    complete in ``p.score_acc``; unless ``last``, that of the next is on exit.

    dQ is one step behind, so that no warpgroup waits for the other's dS of the same step.
    """
    stage = step % c.stages
    issue_dprobability(c, shared, p, step)
    lse2 = row_statistics(c, shared.lse2[None, stage])
    probabilities(c, work, p.score_acc, lse2, m, row, scale_log2)
    wgmma.to_operand(p.score_acc, p.probability_operand)
    if const_expr(c.early_dvalue):
        issue_dvalue(c, p, stage)
    delta = row_statistics(c, shared.delta[None, stage])
    warpgroup.wait_group(1 if c.early_dvalue else 0)
    score_gradients(c, p.score_acc, p.dprobability_acc, delta)
    wgmma.to_operand(p.dprobability_acc, p.dscore_operand)

    wait_for_other_warpgroup(c, group)
    if const_expr(not c.early_dvalue):
        issue_dvalue(c, p, stage)
    wgmma.issue(p.dkey, p.dkey_acc, p.dscore_operand, p.query_t[None, None, None, stage], True)
    buffer = step % c.dscore_stages
    cute.arch.mbarrier_wait(shared.dscore_empty + buffer, ((step // c.dscore_stages) & 1) ^ 1)
    store_dscore(p.dscore_operand, buffer)
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_once_per_warp(shared.dscore_full + buffer)
    if const_expr(not last):
        issue_score(c, shared, p, step + 1)
    # dV and dK are done: Q and dO are free, and so are the registers of their operands.
    warpgroup.wait_group(0 if last else 1)
    arrive_once_per_warp(shared.query_empty + stage)
    arrive_once_per_warp(shared.dout_empty + stage)
    if step > first:
        wait_dscore(c, shared, step - 1)
        issue_dquery(c, p, step - 1)
        give_turn(c, group, last)
        warpgroup.wait_group(0)
        hand_over_dquery(c, shared, p, step - 1, group)
    else:
        give_turn(c, group, last)
    warpgroup.wait_group(0)
    if const_expr(last):
        wait_dscore(c, shared, step)
        issue_dquery(c, p, step)
        warpgroup.wait_group(0)
        hand_over_dquery(c, shared, p, step, group)


def wait_for_other_warpgroup(c: MainConfig, group: Int32) -> None:
    """Holds a warpgroup back until the other has issued its products of the step before: their elementwise parts then
    run while the other's products keep the tensor core busy."""
    if c.ping_pong:
        cute.arch.barrier(barrier_id=NamedBarrier.TURN + group, number_of_threads=c.consumers * WARPGROUP)


@cute.jit
def give_turn(c: MainConfig, group: Int32, last: cutlass.Constexpr[bool]) -> None:
    """Lets the other warpgroup issue its products; after the last step nobody follows the second."""
    if const_expr(c.ping_pong):  # noqa: SIM102 - a compile-time condition must stand alone
        if not last or group == 0:
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.TURN + 1 - group, number_of_threads=c.consumers * WARPGROUP
            )


def issue_dvalue(c: MainConfig, p: Products, stage: Int32) -> None:
    """dV of the step whose P is in ``p.probability_operand``."""
    wgmma.issue(p.dvalue, p.dvalue_acc, p.probability_operand, p.dout_t[None, None, None, stage], True)


def issue_score(c: MainConfig, shared: Any, p: Products, step: Int32) -> None:
    """S of a step, once its Q is there."""
    stage = step % c.stages
    cute.arch.mbarrier_wait(shared.query_full + stage, (step // c.stages) & 1)
    wgmma.issue(p.score, p.score_acc, p.key, p.query[None, None, None, stage], False)


def issue_dprobability(c: MainConfig, shared: Any, p: Products, step: Int32) -> None:
    """dP of a step, once its dO is there."""
    stage = step % c.stages
    cute.arch.mbarrier_wait(shared.dout_full + stage, (step // c.stages) & 1)
    wgmma.issue(p.score, p.dprobability_acc, p.value, p.dout[None, None, None, stage], False)


def wait_dscore(c: MainConfig, shared: Any, step: Int32) -> None:
    """Waits for both warpgroups' dS of a step."""
    cute.arch.mbarrier_wait(shared.dscore_full + step % c.dscore_stages, (step // c.dscore_stages) & 1)


def issue_dquery(c: MainConfig, p: Products, step: Int32) -> None:
    """dQ of a step."""
    wgmma.issue(p.dquery, p.dquery_acc, p.dscore[None, None, None, step % c.dscore_stages], p.key_t, False)


@cute.jit
def hand_over_dquery(c: MainConfig, shared: Any, p: Products, step: Int32, group: Int32) -> None:
    """Gives this warpgroup's chunk of a finished dQ to its writer warp."""
    arrive_once_per_warp(shared.dscore_empty + step % c.dscore_stages)
    buffer = step % c.dq_buffers
    slot = group * c.dq_buffers + buffer
    if step >= c.dq_buffers:
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_EMPTY + slot, number_of_threads=DQ_THREADS)
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    vectors = c.dq_block.thread_elements // 4
    target = (shared.dq[None, group, buffer].iterator + thread * 4).align(16)
    layout = cute.make_layout((4, vectors), stride=(1, 4 * WARPGROUP))
    source = cute.make_tensor(p.dquery_acc.iterator, cute.make_layout((4, vectors)))
    cute.autovec_copy(source, cute.make_tensor(target, layout))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.DQ_FULL + slot, number_of_threads=DQ_THREADS)


class Consumer:
    """One consumer warpgroup: its place among the two, and its products."""

    def __init__(self, c: MainConfig, shared: Any) -> None:
        self.thread = cute.arch.thread_idx()[0] - WARPGROUP
        self.group = cute.arch.make_warp_uniform(self.thread // WARPGROUP)
        self.products = Products(c, shared, self.group)


@cute.jit
def consume(
    c: MainConfig,
    work: Any,
    shared: Any,
    consumer: Consumer,
    dkey: Any,
    dvalue: Any,
    scale: Float32,
    scale_log2: Float32,
    before: Before,
) -> None:
    """One tile, in both consumer warpgroups."""
    p, thread, group = consumer.products, consumer.thread, consumer.group
    p.dkey_acc.fill(0.0)
    p.dvalue_acc.fill(0.0)
    row = work.key_block * c.tile_n + (thread // 32) * 16 + (thread % 32) // 4

    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), c.dtype)
    to_shared = cute.make_tiled_copy_C(atom, p.score).get_slice(thread)
    dscore_target = to_shared.partition_D(shared.dscore)

    def store_dscore(operand: cute.Tensor, buffer: Int32) -> None:
        fragment = cute.make_tensor(operand.iterator, p.score_acc.layout)
        cute.copy(atom, to_shared.retile(fragment), dscore_target[None, None, None, buffer])

    if const_expr(c.persistent):
        # The last tile's dK must have left the memory of dS.
        cute.arch.mbarrier_wait(shared.staged_empty, (before.tiles & 1) ^ 1)
    if work.steps > 0:
        cute.arch.mbarrier_wait(shared.key_full, before.loaded & 1)
        if const_expr(not c.persistent):
            cute.arch.mbarrier_wait(shared.value_full, 0)
        issue_score(c, shared, p, before.steps)
        if const_expr(c.persistent):
            cute.arch.mbarrier_wait(shared.value_full, before.loaded & 1)
        warpgroup.wait_group(0)
        one = partial(
            step_products,
            c,
            work,
            shared,
            p,
            store_dscore,
            first=before.steps,
            row=row,
            group=group,
            scale_log2=scale_log2,
        )
        if const_expr(c.ping_pong):  # noqa: SIM102 - a compile-time condition must stand alone
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.TURN, number_of_threads=c.consumers * WARPGROUP)
        member, m = work.first()
        for i in cutlass.range(work.steps - 1, unroll=1):
            one(before.steps + i, m, last=False)
            member, m = work.next(member, m)
        one(before.steps + work.steps - 1, m, last=True)
        if const_expr(c.persistent):
            arrive_once_per_warp(shared.key_empty)
    if const_expr(c.persistent):
        stage_gradients(c, shared, p, thread, scale)
    else:
        store_in_place(c, work, shared, p, thread, dkey, dvalue, scale)


@cute.jit
def drain(c: MainConfig, group: Int32, steps: Int32) -> None:
    """After the last tile: meets the dQ writer's arrivals that no step has waited for."""
    for buffer in cutlass.range_constexpr(c.dq_buffers):
        if steps > buffer:
            slot = group * c.dq_buffers + buffer
            cute.arch.barrier(barrier_id=NamedBarrier.DQ_EMPTY + slot, number_of_threads=DQ_THREADS)
