"""Layout of the backward's scratch buffers: the one description that its writers and readers share.

Everything is counted in blocks of ``tile_m`` query rows of one (batch, query head); the blocks of a head follow each
other, heads of a batch entry follow each other. Sequence lengths that are no multiple of ``tile_m`` are padded here and
nowhere else: the preprocess kernel writes padding rows as "no probability" (``lse2 = +inf``, ``delta = 0``), so that
the main kernel needs no bounds on query rows.

- ``lse2``, ``delta``: float32, one per padded row.
- ``dq_accum``: float32, ``tile_m * head_dim`` per block, in the order in which threads hold it: the block is cut in
  :data:`DQ_CHUNKS` chunks; in a chunk, 16-byte vector ``v`` of thread ``t`` lies at vector index ``v * 128 + t``. On
  Hopper a chunk is one consumer warpgroup's, and vector ``v`` holds registers ``4 v .. 4 v + 3`` of the thread's wgmma
  accumulator. On Blackwell (``by_rows``) a chunk is half of the columns, thread ``t`` has row ``t``, and vector ``v``
  holds columns ``4 v .. 4 v + 3`` of the chunk.
- ``turn``: int32, :data:`DQ_CHUNKS` per block: how many key blocks have added their share of a chunk so far.
"""

from __future__ import annotations

from dataclasses import dataclass

DQ_CHUNKS = 2
"""Chunks per dQ block: one per consumer warpgroup of the main kernel."""

WARPGROUP = 128
"""Threads in a warpgroup."""

LSE2_OF_EMPTY_ROW = float("inf")
"""``lse2`` of a row without probability (padding, or fully masked): exp2(score - inf) is 0 and never NaN."""


@dataclass(frozen=True)
class DqBlock:
    """How the accumulator of one dQ block (``tile_m`` by ``head_dim``) is spread over chunks, threads and registers.

    With ``tile_m`` = 128 each warpgroup holds 64 rows of all columns, with 64 it holds all rows of half the columns.
    ``by_rows``: each thread of a warpgroup holds one of 128 rows, as it comes from Blackwell's tensor memory.
    """

    tile_m: int
    head_dim: int
    by_rows: bool = False

    def __post_init__(self) -> None:
        if self.tile_m not in ((128,) if self.by_rows else (64, 128)) or self.head_dim % 64:
            raise ValueError(f"no dQ block layout for tile_m {self.tile_m}, head_dim {self.head_dim}")

    @property
    def splits_rows(self) -> bool:
        """True where chunks are row halves, False where they are column halves."""
        return self.tile_m == 128 and not self.by_rows

    @property
    def chunk_columns(self) -> int:
        return self.head_dim if self.splits_rows else self.head_dim // DQ_CHUNKS

    @property
    def elements(self) -> int:
        return self.tile_m * self.head_dim

    @property
    def chunk_elements(self) -> int:
        return self.elements // DQ_CHUNKS

    @property
    def thread_elements(self) -> int:
        return self.chunk_elements // WARPGROUP


@dataclass(frozen=True)
class ScratchSizes:
    """Element counts of the scratch buffers of one call: B batch entries, N query heads, T query rows."""

    row_blocks: int
    rows: int
    lse2: int
    delta: int
    dq_accum: int
    turn: int

    @classmethod
    def of(cls, batch: int, query_heads: int, seqlen_q: int, block: DqBlock) -> ScratchSizes:
        row_blocks = -(-seqlen_q // block.tile_m)
        rows = row_blocks * block.tile_m
        heads = batch * query_heads
        return cls(
            row_blocks=row_blocks,
            rows=rows,
            lse2=heads * rows,
            delta=heads * rows,
            dq_accum=heads * row_blocks * block.elements,
            turn=heads * row_blocks * DQ_CHUNKS,
        )
