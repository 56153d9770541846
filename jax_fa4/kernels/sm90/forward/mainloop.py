"""(DSL) The consumer role: products, softmax and the order in which they overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup as wgmma

from jax_fa4.kernels.common.block_range import BlockRange, Lengths
from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.common.tile_order import WorkList
from jax_fa4.kernels.sm90.forward import epilogue, softmax
from jax_fa4.kernels.sm90.forward.layout import ROWS, TURN_BARRIER, WARPGROUP
from jax_fa4.kernels.sm90.forward.problem import Problem, Shared


class Work(NamedTuple):
    """One tile as one warpgroup sees it."""

    head: Int32
    batch: Int32
    lengths: Lengths
    row: Int32  # query position of the warpgroup's first row
    blocks: BlockRange  # that its rows see
    sees: Boolean  # whether there is one
    lead: Int32  # blocks of the tile after them
    trail: Int32  # blocks of the tile before them
    tile_has_blocks: Boolean


class Consumer(Invariant):
    """One consumer warpgroup: its operands as wgmma sees them and its accumulators.

    Register fragments (a thread's part of 64 rows): ``scores`` float32 tile_n/2, ``probabilities`` 16-bit tile_n/2,
    ``output`` float32 head_dim_v/2; ``maxima``, ``sums``, ``factors`` float32 of the thread's two rows.
    """

    def __init__(self, problem: Problem, shared: Shared, operands, thread: Int32, number: Int32):
        layout, spec = problem.layout, problem.layout.spec
        self.problem, self.shared, self.layout = problem, shared, layout
        self.number = number  # which consumer warpgroup
        self.thread = thread  # thread in the warpgroup
        self.dtype = operands.dtype
        self.qk_first, self.qk, self.pv = operands.qk_first, operands.qk, operands.pv
        qk, pv = self.qk.get_slice(0), self.pv.get_slice(0)
        query = operands.tensor(shared.q_slot(number), operands.query_layout)
        key = operands.tensor(shared.k, operands.key_layout)
        value = operands.tensor(shared.v, operands.value_layout)
        self.query = self.qk.make_fragment_A(qk.partition_A(query))
        self.key = self.qk.make_fragment_B(qk.partition_B(key))
        self.value = self.pv.make_fragment_B(pv.partition_B(value))
        self.scores = self.qk.make_fragment_C(self.qk.partition_shape_C((ROWS, spec.tile.n)))
        self.output = self.pv.make_fragment_C(self.pv.partition_shape_C((ROWS, spec.head_dim_v)))
        self.probabilities = self.pv.make_fragment_A(self.pv.partition_shape_A((ROWS, spec.tile.n)))
        self.maxima = cute.make_rmem_tensor(softmax.THREAD_ROWS, Float32)
        self.sums = cute.make_rmem_tensor(softmax.THREAD_ROWS, Float32)
        self.factors = cute.make_rmem_tensor(softmax.THREAD_ROWS, Float32)

    def issue_scores(self, position: Int32) -> None:
        """S = Q K^T of the block at a ring position; commits one wgmma group."""
        stage = self.shared.k_ring.stage(position)
        wgmma.fence()
        for k in range(cute.size(self.query, mode=[2])):
            product = self.qk if k else self.qk_first
            cute.gemm(product, self.scores, self.query[None, None, k], self.key[None, None, k, stage], self.scores)
        wgmma.commit_group()

    def issue_output(self, position: Int32) -> None:
        """O += P V of the block at a ring position; commits one wgmma group."""
        stage = self.shared.v_ring.stage(position)
        wgmma.fence()
        for k in range(cute.size(self.probabilities, mode=[2])):
            cute.gemm(
                self.pv, self.output, self.probabilities[None, None, k], self.value[None, None, k, stage], self.output
            )
        wgmma.commit_group()

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp no longer reads a stage."""
        if self.thread % 32 == 0:
            cute.arch.mbarrier_arrive(barrier)

    def take_turn(self) -> None:
        """Waits until the warpgroup before this one has issued its products."""
        if const_expr(self.layout.ping_pong):
            cute.arch.barrier(barrier_id=TURN_BARRIER + self.number, number_of_threads=2 * WARPGROUP)

    def pass_turn(self) -> None:
        """Lets the next warpgroup issue."""
        if const_expr(self.layout.ping_pong):
            following = self.number + 1
            following = following - Int32(following == self.layout.warpgroups) * self.layout.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def mask(self, block: Int32, lengths, row: Int32):
        """Applies the mask to the scores of a block; ``row`` is the query position of the thread's first row."""
        spec = self.layout.spec
        column = block * spec.tile.n + self.thread % 4 * 2
        begin, end = [], []
        for half in range_constexpr(softmax.THREAD_ROWS):
            position = self.row_position(row, half) + lengths.offset
            last = lengths.kv_len
            if const_expr(spec.mask != "none"):
                right = lengths.right if const_expr(spec.mask == "window") else 0
                last = cutlass.min(last, position + right + 1)
            end.append(last - column)
            begin.append(position - lengths.left - column if const_expr(spec.mask == "window") else None)
        softmax.apply_limits(self.scores, tuple(begin), tuple(end), spec.mask == "window")

    def row_position(self, row: Int32, half: int) -> Int32:
        """Query position of one of the thread's two rows (row ``r`` of a packed tile is position ``r // group``)."""
        local = self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * half
        return row + (local // self.problem.group if const_expr(self.problem.packed) else local)

    @cute.jit
    def step(self, position: Int32, block: Int32, lengths, row: Int32, masked: bool) -> Int32:
        """One further block: its scores and the previous block's output in flight together, then its softmax."""
        ring_k, ring_v = self.shared.k_ring, self.shared.v_ring
        following = ring_k.advance(position)
        ring_k.wait_full(following)
        self.take_turn()
        self.issue_scores(following)
        ring_v.wait_full(position)
        self.issue_output(position)
        self.pass_turn()
        if const_expr(masked or not self.layout.optimistic):
            wgmma.wait_group(1)
            self.release(ring_k.empty(following))
            if const_expr(masked):
                self.mask(block, lengths, row)
            softmax.next_block(self.scores, self.maxima, self.sums, self.factors, self.problem.scale_log2)
            wgmma.wait_group(0)
            self.release(ring_v.empty(position))
            softmax.rescale(self.output, self.factors)
            softmax.pack(self.scores, self.probabilities, self.dtype)
        else:
            # The probabilities' registers are free only after the PV product; the other warpgroups' products run.
            wgmma.wait_group(0)
            self.release(ring_k.empty(following))
            self.release(ring_v.empty(position))
            softmax.optimistic_block(
                self.scores,
                self.probabilities,
                self.maxima,
                self.sums,
                self.output,
                self.problem.scale_log2,
                self.dtype,
            )
        return following

    @cute.jit
    def skip(self, position: Int32, count: Int32) -> Int32:
        """Lets ``count`` blocks of the tile pass that this warpgroup's rows do not see."""
        ring_k, ring_v = self.shared.k_ring, self.shared.v_ring
        for _ in cutlass.range(count, unroll=1):
            ring_k.wait_full(position)
            self.take_turn()
            self.pass_turn()
            self.release(ring_k.empty(position))
            ring_v.wait_full(position)
            self.release(ring_v.empty(position))
            position = ring_k.advance(position)
        return position

    @cute.jit
    def begin(self, position: Int32, work: Work, query_full: tuple, meanwhile: Callable[[], None]) -> Int32:
        """Computes the scores of a tile's first block (if this warpgroup's rows see one); returns its ring position.

        ``meanwhile`` runs while the product is in flight. It is called on both paths instead of once after them: a
        product in flight must not cross the end of a branch, or the compiler serialises all products. Every warpgroup
        takes one turn more than the tile has blocks, whichever of them its rows see.
        """
        ring_k = self.shared.k_ring
        position = self.skip(position, work.lead)
        if work.sees:
            cute.arch.mbarrier_wait(*query_full)
            ring_k.wait_full(position)
            self.take_turn()
            self.issue_scores(position)
            self.pass_turn()
            meanwhile()
            wgmma.wait_group(0)
            self.release(ring_k.empty(position))
        else:
            meanwhile()
        return position

    @cute.jit
    def finish(self, position: Int32, work: Work, query_free: cute.Pointer) -> Int32:
        """All of a tile that was begun, last block to first; returns the ring position after it.

        Where O has a slot of its own, ``query_free`` is arrived at as soon as Q has been read for the last time.
        """
        ring_v = self.shared.v_ring
        blocks, lengths, row = work.blocks, work.lengths, work.row
        spec = self.layout.spec
        self.output.fill(0.0)
        self.maxima.fill(-Float32.inf)
        self.sums.fill(0.0)
        if work.sees:
            if (blocks.full_end < blocks.end) | (blocks.full_begin == blocks.end):
                self.mask(blocks.end - 1, lengths, row)
            softmax.first_block(self.scores, self.maxima, self.sums, self.problem.scale_log2)
            softmax.pack(self.scores, self.probabilities, self.dtype)
            full_end = cutlass.min(blocks.full_end, blocks.end - 1)
            if const_expr(spec.mask != "none"):
                for step in cutlass.range(blocks.end - 1 - full_end, unroll=1):
                    position = self.step(position, blocks.end - 2 - step, lengths, row, True)
            for step in cutlass.range(full_end - blocks.full_begin, unroll=1):
                position = self.step(position, full_end - 1 - step, lengths, row, False)
            if const_expr(spec.mask == "window"):
                left_end = cutlass.min(blocks.full_begin, full_end)
                for step in cutlass.range(left_end - blocks.begin, unroll=1):
                    position = self.step(position, left_end - 1 - step, lengths, row, True)
        if const_expr(self.layout.output_slot):
            self.release(query_free)
        if work.sees:
            ring_v.wait_full(position)
            self.take_turn()
            self.issue_output(position)
            self.pass_turn()
            wgmma.wait_group(0)
            self.release(ring_v.empty(position))
            position = self.skip(ring_v.advance(position), work.trail)
        elif work.tile_has_blocks:
            self.take_turn()
            self.pass_turn()
        return position


def look_up(problem: Problem, walk: WorkList, index: Int32, number: Int32) -> Work:
    """What an index means for a warpgroup; an index past the end is a tile without blocks."""
    held = walk.holds(index)
    tile, head, batch = walk.tile(cutlass.min(index, walk.order.total - 1))
    lengths = problem.lengths(batch)
    tile_blocks = problem.tile_blocks(tile, lengths)
    row = problem.first_row(tile, number)
    blocks = problem.warpgroup_blocks(row, lengths)
    count = (tile_blocks.end - tile_blocks.begin) * Int32(held)
    sees = (blocks.end > blocks.begin) & held
    lead = Int32(sees) * (tile_blocks.end - blocks.end) + (1 - Int32(sees)) * count
    trail = Int32(sees) * (blocks.begin - tile_blocks.begin)
    return Work(head, batch, lengths, row, blocks, sees, lead, trail, count > 0)


@cute.jit
def consume(problem: Problem, shared: Shared, operands, output_map, thread: Int32, number: Int32):
    """Every tile of this CTA, for one consumer warpgroup.

    Where O has a slot of its own, the first scores of the next tile are in flight while this one's O is stored.
    """
    consumer = Consumer(problem, shared, operands, thread, number)
    layout = problem.layout
    q_ring = shared.q_ring(number)
    if const_expr(layout.ping_pong):  # noqa: SIM102 (this one is decided at compile time, the next at run time)
        if number == layout.warpgroups - 1:
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
    walk = problem.work_list()
    index = walk.first()
    q_position = Int32(0)
    work = look_up(problem, walk, index, number)
    position = consumer.begin(Int32(0), work, q_ring.full_phase(q_position), lambda: None)
    while walk.holds(index):
        work = look_up(problem, walk, index, number)
        q_ring.wait_full(q_position)
        position = consumer.finish(position, work, q_ring.empty(q_position))
        store = partial(epilogue.finish, consumer, work, output_map, q_ring.empty(q_position))
        index = walk.next(index)
        q_position = q_position ^ 1
        following = look_up(problem, walk, index, number)
        if const_expr(not layout.output_slot):
            store()
        meanwhile = store if layout.output_slot else lambda: None
        position = consumer.begin(position, following, q_ring.full_phase(q_position), meanwhile)
    epilogue.drain(consumer)
    if const_expr(layout.ping_pong):  # noqa: SIM102 (this one is decided at compile time, the next at run time)
        if number == 0:
            cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
