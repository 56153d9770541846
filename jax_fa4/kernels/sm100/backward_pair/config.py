"""Sizes of the backward on pairs of CTAs, beside those of the single-CTA kernel, in units as named."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS, BOX_ROW_BYTES, COMPUTE_GROUPS, KEYS, ROWS, BackwardConfig

CTAS = 2

HALF_ROWS = ROWS // CTAS
"""Query rows of a block whose dQ one CTA computes, over the pair's keys: those from its rank times HALF_ROWS on."""

SEND_BYTES = KEYS * HALF_ROWS * 2
"""What a CTA sends to its peer per block: dS of its keys with the peer's half of the query rows."""

PIECE_BUFFERS = 2

RELAY_WARP = 14
"""Exchanges dS with the peer."""

DOUT_WARP = 15
"""Loads what has to do with dO. The other warps have the numbers that they have in the single-CTA kernel, whose load
warp has the rest."""

WIDE_ROW_BYTES = BOX_ROW_BYTES
NARROW_ROW_BYTES = BOX_ROW_BYTES // 2
"""Bytes of a row of a tile that holds columns of K or Q: 64 columns in the 128-byte swizzle, or 32 in the 64-byte one,
where a CTA's half of the columns are no whole number of 64."""


@dataclass(frozen=True)
class PairShape:
    """How a block of 128 query rows is worked on: ``parts`` parts of ``rows`` rows each.

    Head dims up to 128: all rows at once; half of them are the peer's. 192 for queries and keys, 128 for values: tensor
    memory and shared memory have room for scores of 64 rows; those of part ``r`` are the rows of rank ``r``.
    """

    parts: int
    columns: int
    """Columns of Q and K that a CTA has of its own in products where they are N: half of them."""

    @classmethod
    def of(cls, config: BackwardConfig) -> PairShape:
        """Raises ValueError for head dims that the kernel does not take."""
        boxes = (config.qk_boxes, config.v_boxes)
        if boxes not in ((2, 2), (3, 2)):
            raise ValueError(
                f"head dims {config.head_dim}, {config.head_dim_v} of {boxes} boxes; (2, 2) and (3, 2) have kernels on "
                "pairs of CTAs: each CTA has half of the columns of Q, K and dO"
            )
        return cls(parts=config.qk_boxes - 1, columns=config.columns // CTAS)

    @property
    def rows(self) -> int:
        """Query rows of a part: the N of the score products."""
        return ROWS // self.parts

    @property
    def own_rows(self) -> int:
        """Rows of a part whose Q and dO one CTA brings for the score products."""
        return self.rows // CTAS

    @property
    def group_rows(self) -> int:
        """Rows of each half of a part that a compute warpgroup has."""
        return self.own_rows // COMPUTE_GROUPS

    @property
    def row_box_bytes(self) -> int:
        """A box of 64 columns of a CTA's rows of a part."""
        return self.own_rows * BOX_ROW_BYTES

    @property
    def column_row_bytes(self) -> int:
        """Bytes of a row of the tiles that hold a CTA's columns of K and Q."""
        return WIDE_ROW_BYTES if self.columns % BOX_COLUMNS == 0 else NARROW_ROW_BYTES

    @property
    def column_box(self) -> int:
        """Columns of such a row."""
        return self.column_row_bytes // 2

    @property
    def column_boxes(self) -> int:
        return self.columns // self.column_box

    @property
    def dq_columns(self) -> int:
        """Columns of tensor memory that dQ takes: lanes 0 to 63 have the first half of its columns, lanes 64 to 127 the
        same rows' other half (data path of a product of 128 rows by a pair)."""
        return self.columns

    @property
    def piece_vectors(self) -> int:
        """Vectors of 4 columns of each thread that leave through shared memory together."""
        return 4 if self.parts == 1 else 2

    @property
    def piece_bytes(self) -> int:
        return 128 * self.piece_vectors * 16

    @property
    def pieces(self) -> int:
        return self.dq_columns // 4 // self.piece_vectors

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread of compute, reduce, and the single-warp roles. A compute thread has ``rows`` / 2 scores,
        a reduce thread ``dq_columns`` values."""
        return (152, 104, 104) if self.parts == 1 else (136, 136, 104)
