"""(DSL) The producer role: one thread that keeps the Q slots and the K and V rings full."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from jax_fa4.kernels.common import tma
from jax_fa4.kernels.sm90.forward.problem import Problem, Shared


@cute.jit
def produce(problem: Problem, shared: Shared, query_map, key_map, value_map):
    """Loads for every tile of this CTA, in the order in which the consumers use the data."""
    layout = problem.layout
    position = Int32(0)  # both rings advance once per block
    q_position = Int32(0)
    walk = problem.work_list()
    index = walk.first()
    while walk.holds(index):
        tile, head, batch = walk.tile(index)
        blocks = problem.tile_blocks(tile, problem.lengths(batch))
        kv_head = problem.kv_head(head)
        count = blocks.end - blocks.begin
        if count > 0:
            _load_block(
                shared.k_ring,
                position,
                shared.k,
                key_map,
                layout.spec.head_dim,
                layout.chunk,
                layout.k_bytes,
                blocks.end - 1,
                kv_head,
                batch,
                layout.spec.tile.n,
            )
        for warpgroup in range_constexpr(layout.warpgroups):
            _load_query(problem, shared, warpgroup, q_position, query_map, tile, head, batch)
        for step in cutlass.range(count, unroll=1):
            block = blocks.end - 1 - step
            following = shared.k_ring.advance(position)
            if step + 1 < count:
                _load_block(
                    shared.k_ring,
                    following,
                    shared.k,
                    key_map,
                    layout.spec.head_dim,
                    layout.chunk,
                    layout.k_bytes,
                    block - 1,
                    kv_head,
                    batch,
                    layout.spec.tile.n,
                )
            _load_block(
                shared.v_ring,
                position,
                shared.v,
                value_map,
                layout.spec.head_dim_v,
                layout.chunk_v,
                layout.v_bytes,
                block,
                kv_head,
                batch,
                layout.spec.tile.n,
            )
            position = following
        q_position = q_position ^ 1
        index = walk.next(index)


@cute.jit
def _load_block(ring, position, memory, descriptor, width, chunk, size, block, head, batch, tile_n):
    """One block of ``tile_n`` keys into the ring: one box per chunk of columns."""
    ring.wait_empty(position)
    barrier = ring.full(position)
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
    target = memory + ring.stage(position) * size
    for index in range_constexpr(width // chunk):
        tma.load(
            descriptor, target + index * (size * chunk // width), barrier, (index * chunk, block * tile_n, head, batch)
        )


@cute.jit
def _load_query(problem, shared, warpgroup, q_position, descriptor, tile, head, batch):
    """One warpgroup's rows of Q; the byte count is the box's, which a packed tile may not fill."""
    layout = problem.layout
    ring = shared.q_rings[warpgroup]
    ring.wait_empty(q_position)
    barrier = ring.full(q_position)
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, problem.box_rows() * (layout.spec.head_dim * 2))
    row = problem.first_row(tile, warpgroup)
    for index in range_constexpr(layout.spec.head_dim // layout.chunk):
        tma.load(
            descriptor,
            shared.q_slot(warpgroup) + index * (64 * layout.chunk * 2),
            barrier,
            problem.row_coordinates(index * layout.chunk, row, head, batch),
        )
