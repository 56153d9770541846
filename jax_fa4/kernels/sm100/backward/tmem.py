"""Map of tensor memory: 512 columns of 128 lanes of 32 bits, allocated whole.

Head dims above 64::

    0                128              256              384              512
    | S, P           | dV             | dP, dS; dQ     | dK             |

Head dims up to 64: dK needs 64 columns, and dQ has the last 64 for itself::

    0                128              256              384     448     512
    | S, P           | dV             | dP, dS         | dK    | dQ    |

Lanes are keys, but for dQ, where they are query rows. A compute warpgroup owns half of the columns of S and dP (64
query rows). The 16-bit P (dS) of a half takes the first 32 of its own S (dP) columns, so that no warp writes what
another one reads::

    S:   | queries 0..63                 | queries 64..127               |
    P:   | 0..31 used | free             | 64..95 used | free            |
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.backward.config import HALF, K_STEP, BackwardConfig

COLUMNS = 512
BASE = 0
"""The address that an allocation of all columns has."""

LANE_SHIFT = 16
"""A tensor-memory address is (lane << 16) + column."""

SCORES = 0
DVALUE = 128
DPROBABILITIES = 256
DKEY = 384


def dquery(config: BackwardConfig) -> int:
    """First column of dQ."""
    return DPROBABILITIES if config.dq_over_dp else DKEY + 64


def operand_step(step: int) -> int:
    """Columns from the start of S (dP) to K step ``step`` of the 16-bit operand P (dS)."""
    half, inside = divmod(step, HALF // K_STEP)
    return half * HALF + inside * (K_STEP // 2)
