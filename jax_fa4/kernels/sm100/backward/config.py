"""Configuration of one backward kernel, derived from its KernelSpec; sizes in elements, bytes and threads as named."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS, DqBlock
from jax_fa4.kernels.spec import KernelSpec

ROWS = 128
"""Query rows per block: the N of the score products and the lanes of dQ."""

KEYS = 128
"""Keys of one CTA: the M of the score products and the lanes of dK and dV."""

BOX_COLUMNS = 64
"""Elements of one 128-byte row of a swizzled shared-memory box."""

BOX_ROW_BYTES = BOX_COLUMNS * 2
BOX_BYTES = 128 * BOX_ROW_BYTES
"""A box holds 64 columns of 128 rows, of queries or of keys."""

K_STEP = 16
"""Contraction length of one 16-bit MMA instruction."""

PIECE_COLUMNS = 32
"""Columns of dQ that leave through shared memory together."""

PIECE_BYTES = ROWS * PIECE_COLUMNS * 4
PIECE_BUFFERS = 2

STAT_BYTES = ROWS * 4
"""Bytes of one block of lse2 or delta."""

STAT_STAGES = 2
SHARED_LIMIT = 227 * 1024

COMPUTE_GROUPS = 2
"""Warpgroups that turn scores into gradients of scores: each takes half of a block's query rows."""

HALF = ROWS // COMPUTE_GROUPS

REDUCE_WARP = 8
"""First warp of the dQ-reduce warpgroup; the compute warpgroups come before it."""

MMA_WARP = 12
LOAD_WARP = 13
THREADS = 512

COMPUTE_REGISTERS, REDUCE_REGISTERS, OTHER_REGISTERS = 152, 136, 72


def boxes(head_dim: int) -> int:
    """Swizzled boxes that hold a padded head dim."""
    return -(-head_dim // BOX_COLUMNS)


@dataclass(frozen=True)
class BackwardConfig:
    """Everything static that the roles ask for."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    varlen: bool
    deterministic: bool
    query_stages: int
    dout_stages: int
    ctas: int = 1

    @classmethod
    def from_spec(cls, spec: KernelSpec) -> BackwardConfig:
        return cls(
            dtype=spec.dtype,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            mask=spec.mask,
            varlen=spec.varlen,
            deterministic=spec.deterministic,
            query_stages=spec.tile.stages,
            dout_stages=spec.tile.option("dout", 1),
            ctas=spec.tile.option("ctas", 1),
        )

    @property
    def qk_boxes(self) -> int:
        return boxes(self.head_dim)

    @property
    def v_boxes(self) -> int:
        return boxes(self.head_dim_v)

    @property
    def columns(self) -> int:
        """Columns of the accumulators dQ and dK: whole boxes (what lies beyond the head dim is zero)."""
        return self.qk_boxes * BOX_COLUMNS

    @property
    def columns_v(self) -> int:
        """Columns of the accumulator dV."""
        return self.v_boxes * BOX_COLUMNS

    @property
    def qk_steps(self) -> int:
        """K steps of S = K Q^T; columns beyond the padded head dim are not touched."""
        return self.head_dim // K_STEP

    @property
    def v_steps(self) -> int:
        """K steps of dP = V dO^T."""
        return self.head_dim_v // K_STEP

    @property
    def dq_over_dp(self) -> bool:
        """Whether dQ takes the columns of dP in tensor memory, because there are no others."""
        return self.qk_boxes > 1

    @property
    def dq_block(self) -> DqBlock:
        """Layout of a block of the float32 dQ scratch."""
        return DqBlock(ROWS, self.columns, by_rows=True)

    @property
    def pieces(self) -> int:
        """Pieces in which a block of dQ leaves."""
        return self.columns // PIECE_COLUMNS

    @property
    def pieces_per_chunk(self) -> int:
        """Pieces under one turn counter."""
        return self.pieces // DQ_CHUNKS
