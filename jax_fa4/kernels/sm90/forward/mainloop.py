"""(DSL) The consumer role: products, softmax and the order in which they overlap."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup as wgmma

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.forward import epilogue, softmax
from jax_fa4.kernels.sm90.forward.layout import ROWS, TURN_BARRIER, WARPGROUP
from jax_fa4.kernels.sm90.forward.problem import Problem, Shared


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
    def tile(self, position: Int32, tile_blocks, lengths, row: Int32, query_free: cute.Pointer) -> Int32:
        """All key blocks of a tile, last to first; returns the ring position after them.

        Every warpgroup takes one turn more than the tile has blocks, whichever of them its rows see. Where O has a
        slot of its own, ``query_free`` is arrived at as soon as Q has been read for the last time.
        """
        ring_k, ring_v = self.shared.k_ring, self.shared.v_ring
        blocks = self.problem.warpgroup_blocks(row, lengths)
        sees = blocks.end > blocks.begin
        self.output.fill(0.0)
        self.maxima.fill(-Float32.inf)
        self.sums.fill(0.0)
        position = self.skip(position, tile_blocks.end - (blocks.end if sees else tile_blocks.begin))
        if sees:
            ring_k.wait_full(position)
            self.take_turn()
            self.issue_scores(position)
            self.pass_turn()
            wgmma.wait_group(0)
            self.release(ring_k.empty(position))
            self.mask(blocks.end - 1, lengths, row)
            softmax.first_block(self.scores, self.maxima, self.sums, self.problem.scale_log2)
            softmax.pack(self.scores, self.probabilities, self.dtype)
            if const_expr(self.layout.spec.mask != "none"):
                for step in cutlass.range(blocks.end - 1 - blocks.full_end, unroll=1):
                    position = self.step(position, blocks.end - 2 - step, lengths, row, True)
            for step in cutlass.range(blocks.full_end - blocks.full_begin, unroll=1):
                position = self.step(position, blocks.full_end - 1 - step, lengths, row, False)
            if const_expr(self.layout.spec.mask == "window"):
                for step in cutlass.range(blocks.full_begin - blocks.begin, unroll=1):
                    position = self.step(position, blocks.full_begin - 1 - step, lengths, row, True)
        if const_expr(self.layout.output_slot):
            self.release(query_free)
        if sees:
            ring_v.wait_full(position)
            self.take_turn()
            self.issue_output(position)
            self.pass_turn()
            wgmma.wait_group(0)
            self.release(ring_v.empty(position))
            position = self.skip(ring_v.advance(position), blocks.begin - tile_blocks.begin)
        elif tile_blocks.end > tile_blocks.begin:
            self.take_turn()
            self.pass_turn()
        return position


@cute.jit
def consume(problem: Problem, shared: Shared, operands, output_map, thread: Int32, number: Int32):
    """Every tile of this CTA, for one consumer warpgroup."""
    consumer = Consumer(problem, shared, operands, thread, number)
    layout = problem.layout
    q_ring = shared.q_ring(number)
    if const_expr(layout.ping_pong):  # noqa: SIM102 (this one is decided at compile time, the next at run time)
        if number == layout.warpgroups - 1:
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
    position, q_position = Int32(0), Int32(0)
    walk = problem.work_list()
    index = walk.first()
    while walk.holds(index):
        tile, head, batch = walk.tile(index)
        lengths = problem.lengths(batch)
        blocks = problem.tile_blocks(tile, lengths)
        row = problem.first_row(tile, number)
        q_ring.wait_full(q_position)
        position = consumer.tile(position, blocks, lengths, row, q_ring.empty(q_position))
        epilogue.finish(consumer, lengths, row, head, batch, output_map, q_ring.empty(q_position))
        q_position = q_position ^ 1
        index = walk.next(index)
    epilogue.drain(consumer)
    if const_expr(layout.ping_pong):  # noqa: SIM102 (this one is decided at compile time, the next at run time)
        if number == 0:
            cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)
