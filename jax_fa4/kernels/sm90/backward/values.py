"""Parameters that the kernels with products share, stated once: TMA operands, and the run-time values after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from jax_fa4.kernels.sm90.backward.ranges import BlockRanges


class TmaTensor(NamedTuple):
    """A TMA atom and the coordinate tensor that belongs to it."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Values(NamedTuple):
    """What follows the tensors of a launch; a member that is None is no parameter of the kernel.

    ``lse2``, ``delta``: float32 row statistics. ``dq_accum``, ``turn``: the dQ scratch and its counters. ``counter``:
    tiles drawn by persistent CTAs.
    ``batch_info``: int32 (batch, 4). ``left``, ``right``: bounds of a window. ``group``: query heads of a key head.
    ``pairs``: number of (batch, head) pairs, of which ``pairs_together`` run side by side.
    """

    lse2: cute.Pointer
    delta: cute.Pointer
    dq_accum: cute.Pointer | None
    counter: cute.Pointer | None
    turn: cute.Pointer | None
    batch_info: cute.Pointer | None
    query_offset: Int32
    left: Int32 | None
    right: Int32 | None
    scale: Float32
    scale_log2: Float32
    group: Int32
    pairs: Int32
    pairs_together: Int32

    def ranges(self, c: Any, batch: Int32, rows_q: Int32, rows_k: Int32) -> BlockRanges:
        """Block ranges of one batch entry."""
        q_len, kv_len, offset = rows_q, rows_k, self.query_offset
        if const_expr(c.varlen):
            info = cute.make_tensor(self.batch_info + batch * 4, cute.make_layout(4))
            q_len, kv_len, offset = info[0], info[1], info[2]
        return BlockRanges(c.tile_m, c.tile_n, c.mask, q_len, kv_len, offset, self.left, self.right)


def arguments_to_compile_for(
    config: Any,
    tensors: int,
    *,
    accumulates: bool = False,
    draws_tiles: bool = False,
    counts_turns: bool = False,
    statistics_align: int = 16,
) -> tuple[Any, ...]:
    """Fake arguments of a host function that takes ``tensors`` (batch, rows, heads, head dim) and :class:`Values`."""
    sym = cute.SymInt

    def tensor() -> Any:
        return cute.runtime.make_fake_compact_tensor(
            config.dtype, (sym(), sym(), sym(), sym(divisibility=8)), stride_order=(3, 2, 1, 0), assumed_align=16
        )

    def pointer(dtype: Any, align: int) -> Any:
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    window = config.mask == "window"
    values = Values(
        lse2=pointer(Float32, statistics_align),
        delta=pointer(Float32, statistics_align),
        dq_accum=pointer(Float32, 16) if accumulates else None,
        counter=pointer(Int32, 4) if draws_tiles else None,
        turn=pointer(Int32, 4) if counts_turns else None,
        batch_info=pointer(Int32, 16) if config.varlen else None,
        query_offset=Int32(0),
        left=Int32(0) if window else None,
        right=Int32(0) if window else None,
        scale=Float32(1),
        scale_log2=Float32(1),
        group=Int32(1),
        pairs=Int32(1),
        pairs_together=Int32(1),
    )
    return (*(tensor() for _ in range(tensors)), values)
