"""dQ writer warps: add a chunk of each step's dQ from shared memory to the float32 scratch.

Deterministic kernels add in ascending order of key blocks: the counter ``turn`` of the chunk says how many have been
added. The first key block stores instead of adding, so nothing has to clear the scratch. A turn is passed on only when
the bulk operation is complete, not when its shared memory has been read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from jax_fa4.kernels.sm90.backward.config import MainConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward.ptx import bulk_add_f32, bulk_store, pass_turn, wait_for_turn
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS, WARPGROUP
from jax_fa4.kernels.sm90.backward.tile_queue import Before

THREADS = WARPGROUP + 32


@cute.jit
def write_dq(
    c: MainConfig,
    work: Any,
    shared: Any,
    chunk: Int32,
    dq_accum: cute.Pointer,
    turn: cute.Pointer | None,
    before: Before,
) -> None:
    """One tile, in one warp per chunk; all bulk operations are lane 0's, because bulk groups belong to a thread."""
    lane = cute.arch.lane_idx()
    size = c.dq_block.chunk_elements * 4
    member, m = work.first()
    for i in cutlass.range(work.steps, unroll=1):
        buffer = (before.steps + i) % c.dq_buffers
        slot = chunk * c.dq_buffers + buffer
        cute.arch.barrier(barrier_id=NamedBarrier.DQ_FULL + slot, number_of_threads=THREADS)
        if lane == 0:
            block = work.scratch_block(work.first_head + member, m)
            source = shared.dq[None, chunk, buffer].iterator
            target = dq_accum + (Int64(block) * c.dq_block.elements + chunk * c.dq_block.chunk_elements)
            if const_expr(c.deterministic):
                counter = turn + (Int64(block) * DQ_CHUNKS + chunk)
                first_key_block, _ = work.ranges.key_blocks(m)
                place = work.key_block - first_key_block
                if place == 0:
                    bulk_store(source, target, size)
                else:
                    wait_for_turn(counter, place)
                    bulk_add_f32(source, target, size)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                pass_turn(counter)
            else:
                bulk_add_f32(source, target, size)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        empty = partial(cute.arch.barrier_arrive, barrier_id=NamedBarrier.DQ_EMPTY + slot, number_of_threads=THREADS)
        if const_expr(c.persistent):
            empty()
        else:  # nobody waits for the last buffers
            if i + c.dq_buffers < work.steps:
                empty()
        member, m = work.next(member, m)
