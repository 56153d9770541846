"""(DSL) End of a tile: normalise O, write O through shared memory and LSE directly."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from jax_fa4.kernels.common import ptx, tma
from jax_fa4.kernels.sm90.forward import softmax
from jax_fa4.kernels.sm90.forward.layout import ELEMENT, ROWS, STORE_BARRIER, WARPGROUP

LN2 = 0.6931471805599453


@cute.jit
def finish(consumer, work, output_map, slot_free: cute.Pointer):
    """Stores one warpgroup's rows. Rows that see no key, and rows from ``q_len`` on, get output 0 and LSE -inf."""
    problem = consumer.problem
    lengths, row, head, batch = work.lengths, work.row, work.head, work.batch
    for half in range_constexpr(softmax.THREAD_ROWS):
        total = softmax.sum_over_lanes(consumer.sums[half])
        position = consumer.row_position(row, half)
        visible = (total > Float32(0.0)) & (position < lengths.q_len)
        consumer.factors[half] = ptx.reciprocal(total) if visible else Float32(0.0)
        lse = (consumer.maxima[half] * problem.scale_log2 + ptx.log2(total)) * LN2 if visible else -Float32.inf
        if consumer.thread % 4 == 0:
            _store_lse(consumer, lse, position, half, head, batch)
    for element in range_constexpr(cute.size(consumer.output)):
        consumer.output[element] = consumer.output[element] * consumer.factors[softmax.row_of(element)]
    slot = consumer.shared.o_slot(consumer.number)
    if const_expr(consumer.layout.output_slot):
        if consumer.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the tile before has left the slot
        cute.arch.barrier(barrier_id=STORE_BARRIER + consumer.number, number_of_threads=WARPGROUP)
    _to_shared(consumer, slot)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=STORE_BARRIER + consumer.number, number_of_threads=WARPGROUP)
    if consumer.thread == 0:
        spec = consumer.layout.spec
        chunk = consumer.layout.chunk_v
        for index in range_constexpr(spec.head_dim_v // chunk):
            tma.store(
                output_map,
                slot + index * (ROWS * chunk * ELEMENT),
                problem.row_coordinates(index * chunk, row, head, batch),
            )
        cute.arch.cp_async_bulk_commit_group()
        if const_expr(not consumer.layout.output_slot):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.mbarrier_arrive(slot_free)


@cute.jit
def drain(consumer):
    """Waits until the last store has read its slot: shared memory must outlive it."""
    if consumer.thread == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _store_lse(consumer, lse: Float32, position: Int32, half: int, head: Int32, batch: Int32):
    """One row's LSE to (batch, head, position), if the row is in the operand."""
    problem = consumer.problem
    local = consumer.thread // 32 * 16 + consumer.thread % 32 // 4 + 8 * half
    in_range = position < problem.seqlen_q
    heads = problem.order.heads
    if const_expr(problem.packed):
        # Rows past the box are not queries; the packed head index counts key/value heads.
        in_range = in_range & (local < problem.box_rows())
        heads = heads * problem.group
        head = head * problem.group + local % problem.group
    if in_range:
        offset = (Int64(batch) * heads + head) * problem.seqlen_q + position
        cute.make_tensor(problem.lse + offset, cute.make_layout(1))[0] = lse


def _to_shared(consumer, slot: cute.Pointer) -> None:
    """O, rounded to 16 bits, into the slot in the swizzled layout that the TMA store reads.

    A 16-byte store of matrix m of four covers rows 8 * (m % 2) and columns 8 * (m // 2) of a 16 x 16 block.
    """
    chunk = consumer.layout.chunk_v
    lane = consumer.thread % 32
    row = consumer.thread // 32 * 16 + lane % 16
    # Swizzle: bits 4.. of the address take the exclusive or with bits 7.. (three bits for 128 bytes, two for 64).
    mask = chunk * ELEMENT // 16 - 1
    turn = row & mask if chunk == 64 else row >> 1 & mask
    base = slot.toint() + row * (chunk * ELEMENT)
    for block in range(consumer.layout.spec.head_dim_v // 16):
        column = block * 16 % chunk // 8 + lane // 16
        address = base + (block * 16 // chunk) * (ROWS * chunk * ELEMENT) + ((column ^ turn) << 4)
        first = 8 * block
        values = [
            ptx.pack_pair(consumer.output[first + 2 * i], consumer.output[first + 2 * i + 1], consumer.dtype)
            for i in range(4)
        ]
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[Int32(address), *values],
        )
