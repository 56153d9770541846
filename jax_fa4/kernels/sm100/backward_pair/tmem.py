"""Map of tensor memory in each CTA of a pair: 512 columns of 128 lanes of 32 bits, allocated whole.

One part to a block (head dims up to 128)::

    0       64       128              256              384              512
    | S: P   | dQ     | dP, dS         | dV             | dK             |

Two parts (192 and 128)::

    0    32   64      128     192              320                      512
    | S: P | ...      | dP, dS | dV             | dK                     |
         | dQ         |

Lanes are the CTA's keys, but for dQ (``PairShape.dq_columns`` says which). dQ of a block is computed when the next
scores have been read, into the columns that their probabilities leave free.

A compute warpgroup ``g`` has the ``n`` (``group_rows``) rows from ``n g`` on of each half of a part. Its 16-bit P of
half ``h`` lies in the columns from ``n g + n h / 2`` on, which held scores of its own; its dS of half ``h`` in those
from ``2 n h + n g`` on, where dP of the same rows was. So no warp writes what another one still reads.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.backward.config import COMPUTE_GROUPS, K_STEP, ROWS
from jax_fa4.kernels.sm100.backward.tmem import BASE, COLUMNS, LANE_SHIFT, SCORES
from jax_fa4.kernels.sm100.backward_pair.config import PairShape

__all__ = [
    "BASE",
    "COLUMNS",
    "DPROBABILITIES",
    "LANE_SHIFT",
    "SCORES",
    "dkey",
    "dquery",
    "dscore_step",
    "dvalue",
    "probability_step",
]

DPROBABILITIES = ROWS


def dquery(shape: PairShape) -> int:
    """First column of dQ: P has two rows to a column."""
    return SCORES + shape.rows // 2


def dvalue(shape: PairShape) -> int:
    """First column of dV."""
    return DPROBABILITIES + shape.rows


def dkey(shape: PairShape, columns_v: int) -> int:
    """First column of dK."""
    return dvalue(shape) + columns_v


def _place(shape: PairShape, step: int) -> tuple[int, int, int]:
    """(half of the part, warpgroup, columns further) of K step ``step``, 16 query rows, of P or dS."""
    half, row = divmod(step * K_STEP, shape.own_rows)
    group, row = divmod(row, shape.own_rows // COMPUTE_GROUPS)
    return half, group, row // 2


def probability_step(shape: PairShape, step: int) -> int:
    """Columns from the start of S to K step ``step`` of P."""
    half, group, further = _place(shape, step)
    return group * shape.group_rows + half * (shape.group_rows // 2) + further


def dscore_step(shape: PairShape, step: int) -> int:
    """Columns from the start of dP to K step ``step`` of dS."""
    half, group, further = _place(shape, step)
    return half * shape.own_rows + group * shape.group_rows + further
