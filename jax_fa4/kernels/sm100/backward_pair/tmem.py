"""Map of tensor memory in each CTA of a pair: 512 columns of 128 lanes of 32 bits, allocated whole::

    0       64       128              256              384              512
    | S: P   | dQ     | dV             | dP, dS         | dK             |

Lanes are the CTA's keys, but for dQ (``config.DQ_COLUMNS`` says which). dQ of a step is computed when the scores of the
next one have been read, into the columns that their probabilities leave free.

A compute warpgroup ``g`` has query rows 32 g to 32 g + 31 of each half of a block. Its 16-bit P of half ``h`` lies in
the columns from 32 g + 16 h on, which held scores of its own; its dS of half ``h`` in those from 64 h + 32 g on, where
dP of the same rows was. So no warp writes what another one still reads.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.backward.tmem import BASE, COLUMNS, DKEY, DPROBABILITIES, DVALUE, LANE_SHIFT, SCORES
from jax_fa4.kernels.sm100.backward_pair.config import HALF_ROWS

__all__ = [
    "BASE",
    "COLUMNS",
    "DKEY",
    "DPROBABILITIES",
    "DQUERY",
    "DVALUE",
    "GROUP_COLUMNS",
    "LANE_SHIFT",
    "SCORES",
    "dscore_step",
    "probability_step",
]

DQUERY = SCORES + HALF_ROWS
"""The columns of S that P, with two rows to a column, leaves free."""

GROUP_COLUMNS = 32
"""Query rows of each half of a block that a compute warpgroup has: columns of S and dP."""


def _place(step: int) -> tuple[int, int, int]:
    """(half of the block, warpgroup, columns further) of K step ``step``, 16 query rows, of P or dS."""
    half, inside = divmod(step, 4)
    return half, inside // 2, inside % 2 * 8


def probability_step(step: int) -> int:
    """Columns from the start of S to K step ``step`` of P."""
    half, group, further = _place(step)
    return group * GROUP_COLUMNS + half * (GROUP_COLUMNS // 2) + further


def dscore_step(step: int) -> int:
    """Columns from the start of dP to K step ``step`` of dS."""
    half, group, further = _place(step)
    return half * HALF_ROWS + group * GROUP_COLUMNS + further
