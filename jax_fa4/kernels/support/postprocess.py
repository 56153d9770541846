"""Backward postprocess: scales and rounds the float32 dQ scratch into dQ.

Reads each block in the order of :class:`jax_fa4.kernels.sm90.backward.scratch.DqBlock`, turns it round in
shared memory and writes whole rows. A block whose counter ``turn`` is still zero had no key block: dQ is zero there
and its scratch was never written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from jax_fa4.kernels.sm90.backward.config import element_type, whole_swizzle_rows
from jax_fa4.kernels.sm90.backward.plan import (
    POSTPROCESS_PITCH_PADDING,
    POSTPROCESS_THREADS,
    postprocess_shared_bytes,
)
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS, WARPGROUP, DqBlock
from jax_fa4.kernels.spec import KernelSpec

VECTOR = 8
"""16-bit elements in a 16-byte store."""


class Parameters(NamedTuple):
    """dq (batch, rows, heads, head_dim) = scale * dq_accum; ``turn`` is None, and no parameter, without counters."""

    dq_accum: cute.Pointer
    turn: cute.Pointer | None
    dq: cute.Pointer
    scale: Float32
    rows: Int32
    heads: Int32
    head_dim: Int32


class Postprocess:
    """One CTA per (block of ``tile_m`` rows, query head, batch entry)."""

    def __init__(self, spec: KernelSpec) -> None:
        self.dtype = element_type(spec.dtype)
        self.block = DqBlock(spec.tile.m, whole_swizzle_rows(spec.head_dim), by_rows=bool(spec.tile.option("rows")))
        self.counters = spec.deterministic
        self.pitch = self.block.head_dim + POSTPROCESS_PITCH_PADDING

    @property
    def shared_bytes(self) -> int:
        return postprocess_shared_bytes(self.block)

    @cute.jit
    def __call__(self, given: Parameters, batch: Int32) -> None:
        """Launches one kernel for ``batch`` batch entries."""
        self.kernel(given).launch(
            grid=[cute.ceil_div(given.rows, self.block.tile_m) * given.heads * batch, 1, 1],
            block=[POSTPROCESS_THREADS, 1, 1],
            smem=self.shared_bytes,
        )

    @cute.kernel
    def kernel(self, given: Parameters) -> None:
        rows, heads, head_dim = given.rows, given.heads, given.head_dim
        block_layout = self.block
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        row_blocks = cute.ceil_div(rows, block_layout.tile_m)
        # The head is the fast index: CTAs that run together write whole rows of the (rows, heads) plane.
        row_block = index // heads
        head = index - row_block * heads
        batch = row_block // row_blocks
        m = row_block - batch * row_blocks
        block = (batch * heads + head) * row_blocks + m
        chunk, in_chunk = thread // WARPGROUP, thread % WARPGROUP

        vectors = block_layout.thread_elements // 4
        values = cute.make_rmem_tensor(cute.make_layout((4, vectors)), Float32)
        values.fill(0.0)
        written = Int32(1)
        if const_expr(self.counters):
            written = cute.make_tensor(given.turn + (Int64(block) * DQ_CHUNKS + chunk), cute.make_layout(1))[0]
        if written > 0:
            start = Int64(block) * block_layout.elements + chunk * block_layout.chunk_elements + in_chunk * 4
            source = cute.make_tensor(
                (given.dq_accum + start).align(16), cute.make_layout((4, vectors), stride=(1, 4 * WARPGROUP))
            )
            cute.autovec_copy(source, values)

        tile = cutlass.utils.SmemAllocator().allocate_tensor(
            self.dtype, cute.make_layout((block_layout.tile_m, self.pitch), stride=(self.pitch, 1)), byte_alignment=16
        )
        # Each vector is two pairs: 8 rows apart in a wgmma fragment, side by side where a thread holds a row.
        row, column, rows_apart, columns_apart, vector_columns = in_chunk, Int32(0), 0, 2, 4
        if const_expr(not block_layout.by_rows):
            row, column = (in_chunk // 32) * 16 + (in_chunk % 32) // 4, (in_chunk % 4) * 2
            rows_apart, columns_apart, vector_columns = 8, 0, 8
        if const_expr(block_layout.splits_rows):
            row += chunk * 64
        else:
            column += chunk * block_layout.chunk_columns
        for v in cutlass.range_constexpr(vectors):
            for r in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, self.dtype)
                for i in cutlass.range_constexpr(2):
                    pair[i] = (values[2 * r + i, v] * given.scale).to(self.dtype)
                offset = (row + rows_apart * r) * self.pitch + column + vector_columns * v + columns_apart * r
                cute.autovec_copy(pair, cute.make_tensor((tile.iterator + offset).align(4), cute.make_layout(2)))
        cute.arch.sync_threads()

        row_vectors = block_layout.head_dim // VECTOR
        for i in cutlass.range_constexpr(block_layout.elements // (VECTOR * POSTPROCESS_THREADS)):
            index = i * POSTPROCESS_THREADS + thread
            tile_row, vector = index // row_vectors, index % row_vectors
            global_row = m * block_layout.tile_m + tile_row
            if (global_row < rows) & (vector * VECTOR < head_dim):
                element = ((Int64(batch) * rows + global_row) * heads + head) * head_dim + vector * VECTOR
                cute.autovec_copy(
                    cute.make_tensor(
                        (tile.iterator + (tile_row * self.pitch + vector * VECTOR)).align(16), cute.make_layout(VECTOR)
                    ),
                    cute.make_tensor((given.dq + element).align(16), cute.make_layout(VECTOR)),
                )


def build(spec: KernelSpec) -> tuple[Any, tuple[Any, ...]]:
    """Host function and fake arguments of the kernel for ``spec``."""

    def pointer(dtype: Any, align: int) -> Any:
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    kernel = Postprocess(spec)
    given = Parameters(
        dq_accum=pointer(Float32, 16),
        turn=pointer(Int32, 4) if kernel.counters else None,
        dq=pointer(kernel.dtype, 16),
        scale=Float32(1),
        rows=Int32(1),
        heads=Int32(1),
        head_dim=Int32(1),
    )
    return kernel, (given, Int32(1))
