"""Backward preprocess: row statistics for the main kernels.

For each query row: ``delta = rowsum(out * dout) - dlse`` and ``lse2 = lse * log2(e)``, float32, in the padded layout of
:mod:`jax_fa4.kernels.sm90.backward.scratch`. The cotangent of LSE enters here: d LSE / d score is P, the same factor
that multiplies dP - rowsum(out * dout). Rows without probability (past the query length, padding, or fully masked)
get ``lse2 = +inf`` and ``delta = 0``. The counters ``turn`` start at zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.kernels.sm90.backward.config import element_type
from jax_fa4.kernels.sm90.backward.plan import PREPROCESS_ROWS as BLOCK_ROWS
from jax_fa4.kernels.sm90.backward.plan import PREPROCESS_THREADS as THREADS
from jax_fa4.kernels.sm90.backward.plan import counts_turns
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS, LSE2_OF_EMPTY_ROW
from jax_fa4.kernels.spec import KernelSpec

VECTOR = 8
"""16-bit elements in a 16-byte load."""

ROWS_IN_FLIGHT = 8
"""Rows whose loads a thread issues before it uses the first: enough to hide the memory's latency."""


class Parameters(NamedTuple):
    """out, dout (batch, rows, heads, head_dim_v); lse, dlse float32 (batch, heads, rows); lse2, delta the padded
    statistics; ``turn`` and ``batch_info`` where the kernel has them, else None and no parameters."""

    out: cute.Pointer
    dout: cute.Pointer
    lse: cute.Pointer
    dlse: cute.Pointer
    lse2: cute.Pointer
    delta: cute.Pointer
    turn: cute.Pointer | None
    batch_info: cute.Pointer | None
    rows: Int32
    heads: Int32
    head_dim_v: Int32


class Preprocess:
    """One CTA per (block of BLOCK_ROWS rows, query head, batch entry); rows are padded to a multiple of ``padding``."""

    def __init__(self, spec: KernelSpec) -> None:
        self.dtype = element_type(spec.dtype)
        self.padding = spec.tile.m
        self.varlen = spec.varlen
        self.counters = counts_turns(spec)
        # Lanes that share a row: a power of two, so that a butterfly sums them.
        self.lanes = 1 << max(0, math.ceil(math.log2(spec.head_dim_v / VECTOR)))
        self.rows_at_once = THREADS // self.lanes
        self.together = min(BLOCK_ROWS // self.rows_at_once, ROWS_IN_FLIGHT)

    @cute.jit
    def __call__(self, given: Parameters, batch: Int32) -> None:
        """Launches one kernel for ``batch`` batch entries."""
        self.kernel(given).launch(grid=[self.blocks(given.rows) * given.heads * batch, 1, 1], block=[THREADS, 1, 1])

    @cute.kernel
    def kernel(self, given: Parameters) -> None:
        rows, heads = given.rows, given.heads
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row_blocks = self.blocks(rows)
        # The head is the fast index: CTAs that run together read whole rows of the (rows, heads) plane.
        row_block = block // heads
        head = block - row_block * heads
        batch = row_block // row_blocks
        m = row_block - batch * row_blocks
        if const_expr(self.counters):
            self.clear_turns(given.turn, (Int64(batch) * heads + head) * row_blocks + m, thread)
        q_len = rows
        if const_expr(self.varlen):
            q_len = cutlass.min(rows, cute.make_tensor(given.batch_info + batch * 4, cute.make_layout(4))[0])

        lane = thread % self.lanes
        for outer in cutlass.range(BLOCK_ROWS // (self.rows_at_once * self.together), unroll=1):
            first_row = m * BLOCK_ROWS + outer * self.together * self.rows_at_once + thread // self.lanes
            self.rows(given, q_len, batch, head, lane, first_row)

    def blocks(self, rows: Int32) -> Int32:
        """CTAs per head."""
        return cute.ceil_div(rows, self.padding) * (self.padding // BLOCK_ROWS)

    @cute.jit
    def clear_turns(self, turn: cute.Pointer, block: Int64, thread: Int32) -> None:
        """The counters of a dQ block, by the CTA of its first rows."""
        ratio = self.padding // BLOCK_ROWS
        if (block % ratio == 0) & (thread < DQ_CHUNKS):
            cute.make_tensor(turn + (block // ratio * DQ_CHUNKS + thread), cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def rows(self, given: Parameters, q_len: Int32, batch: Int32, head: Int32, lane: Int32, first_row: Int32) -> None:
        """Rows ``first_row``, ``first_row + rows_at_once``, ...: all loads first, then sums and stores."""
        shape = cute.make_layout((VECTOR, self.together))
        outs, douts = cute.make_rmem_tensor(shape, self.dtype), cute.make_rmem_tensor(shape, self.dtype)
        lses, dlses = cute.make_rmem_tensor(self.together, Float32), cute.make_rmem_tensor(self.together, Float32)
        outs.fill(0.0)
        douts.fill(0.0)
        lses.fill(-float("inf"))
        dlses.fill(0.0)
        rows, heads, head_dim_v = given.rows, given.heads, given.head_dim_v
        head_of_batch = Int64(batch) * heads + head
        for i in cutlass.range_constexpr(self.together):
            row = first_row + i * self.rows_at_once
            if row < q_len:
                source = head_of_batch * rows + row
                lses[i] = cute.make_tensor(given.lse + source, cute.make_layout(1))[0]
                dlses[i] = cute.make_tensor(given.dlse + source, cute.make_layout(1))[0]
                if lane * VECTOR < head_dim_v:
                    element = ((Int64(batch) * rows + row) * heads + head) * head_dim_v + lane * VECTOR
                    cute.autovec_copy(self._vector(given.out, element), outs[None, i])
                    cute.autovec_copy(self._vector(given.dout, element), douts[None, i])
        padded = self.blocks(rows) * BLOCK_ROWS
        for i in cutlass.range_constexpr(self.together):
            total = Float32(0)
            for j in cutlass.range_constexpr(VECTOR):
                total += outs[j, i].to(Float32) * douts[j, i].to(Float32)
            distance = self.lanes // 2
            for _ in cutlass.range_constexpr(int(math.log2(self.lanes))):
                total += cute.arch.shuffle_sync_bfly(total, offset=distance)
                distance = distance // 2
            if lane == 0:
                row_lse2, row_delta = Float32(LSE2_OF_EMPTY_ROW), Float32(0)
                if lses[i] > -Float32(float("inf")):
                    row_lse2 = lses[i] * math.log2(math.e)
                    row_delta = total - dlses[i]
                target = head_of_batch * padded + first_row + i * self.rows_at_once
                cute.make_tensor(given.lse2 + target, cute.make_layout(1))[0] = row_lse2
                cute.make_tensor(given.delta + target, cute.make_layout(1))[0] = row_delta

    def _vector(self, base: cute.Pointer, element: Int64) -> cute.Tensor:
        return cute.make_tensor((base + element).align(16), cute.make_layout(VECTOR))


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""

    def pointer(dtype: Any, align: int) -> Any:
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    kernel = Preprocess(spec)
    given = Parameters(
        out=pointer(kernel.dtype, 16),
        dout=pointer(kernel.dtype, 16),
        lse=pointer(Float32, 4),
        dlse=pointer(Float32, 4),
        lse2=pointer(Float32, 4),
        delta=pointer(Float32, 4),
        turn=pointer(Int32, 4) if kernel.counters else None,
        batch_info=pointer(Int32, 16) if kernel.varlen else None,
        rows=Int32(1),
        heads=Int32(1),
        head_dim_v=Int32(1),
    )
    return kernel, (given, Int32(1))
