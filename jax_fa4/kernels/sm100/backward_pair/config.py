"""Sizes of the backward on pairs of CTAs, beside those of the single-CTA kernel, in units as named."""

from __future__ import annotations

from jax_fa4.kernels.sm100.backward.config import BOX_ROW_BYTES, KEYS, ROWS

CTAS = 2

HALF_ROWS = ROWS // CTAS
"""Query rows whose Q and dO one CTA brings for the score products, and whose dQ it computes over the pair's keys."""

HALF_BOX_BYTES = HALF_ROWS * BOX_ROW_BYTES
"""A box of 64 columns of half of the query rows."""

SEND_BYTES = KEYS * HALF_ROWS * 2
"""What a CTA sends to its peer per step: dS of its keys with the peer's half of the query rows."""

DQ_COLUMNS = 64
"""Columns of tensor memory that dQ takes: lanes 0 to 63 have the first half of its columns, lanes 64 to 127 the same
rows' other half (data path of a product of 128 rows by a pair)."""

PIECE_VECTORS = 4
"""Vectors of 4 columns of each thread that leave through shared memory together: 128 threads, 8 KiB."""

PIECE_BYTES = 128 * PIECE_VECTORS * 16
PIECE_BUFFERS = 2

RELAY_WARP = 14
"""Exchanges dS with the peer."""

DOUT_WARP = 15
"""Loads what has to do with dO. The other warps have the numbers that they have in the single-CTA kernel, whose load
warp has the rest."""

COMPUTE_REGISTERS, REDUCE_REGISTERS, OTHER_REGISTERS = 152, 104, 104
